"""What a machine without a network lacks to run the toolkit and its tests, and the wheels for it.

    python benchmarks/carry.py look --output needed.json     # there: what is installed, and what is missing
    python benchmarks/carry.py wheels needed.json FOLDER     # on a machine with a package index
    pip install --no-index --no-deps FOLDER/*.whl            # there again

What is there and recent enough stays: torch and the device's libraries are never fetched. `look` runs with nothing
but Python and `packaging`.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tomllib
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
ALSO = ("pytest>=9",)
"""For the steps that are tests."""


@dataclass(frozen=True)
class Machine:
    """What was found.

    Attributes:
        python: `3.12`, as in wheels' names.
        installed: name and version of every distribution.
        missing: requirements of the toolkit that nothing installed meets.
    """

    python: str
    platform: str
    installed: dict[str, str]
    missing: list[str]

    def told(self) -> str:
        found = ", ".join(f"{name} {self.installed.get(name, 'missing')}" for name in ("torch", "transformers"))
        if not self.missing:
            return f"Python {self.python}, {found}: everything that the toolkit needs is installed"
        lines = [f"Python {self.python}, {found}; not installed, or of another version:"]
        lines += [f"  {each} (found: {self.installed.get(_name(each), 'none')})" for each in self.missing]
        return "\n".join([*lines, "carry them here: see benchmarks/carry.py"])


def _name(requirement: str) -> str:
    return canonicalize_name(Requirement(requirement).name)


def look() -> Machine:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    installed = {canonicalize_name(each.metadata["Name"]): each.version for each in distributions()}
    return Machine(
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        platform=platform.machine(),
        installed=installed,
        missing=missing([*project["dependencies"], *ALSO], installed),
    )


def missing(requirements: list[str], installed: dict[str, str]) -> list[str]:
    """Those that no installed version meets. A build's own suffix (`2.14.1+cu130`) counts as its version."""
    found = []
    for text in requirements:
        version = installed.get(_name(text))
        if version is None or not Requirement(text).specifier.contains(version, prereleases=True):
            found.append(text)
    return found


def wanted(report: dict[str, list[dict[str, Any]]], machine: Machine) -> list[str]:
    """Of what pip would install: what the machine lacks, and what that needs and the machine does not have.

    What only another torch would need, such as its libraries of the device, is not reached.
    """
    planned = {canonicalize_name(each["metadata"]["name"]): each["metadata"] for each in report["install"]}
    names = {_name(each) for each in machine.missing}
    looked_at: set[str] = set()
    while waiting := names - looked_at:
        looked_at |= waiting
        needed = [each for name in waiting for each in _needs(planned[name], machine)]
        names |= {_name(each) for each in missing(needed, machine.installed)} & planned.keys()
    return [f"{name}=={planned[name]['version']}" for name in sorted(names)]


def _needs(metadata: dict[str, Any], machine: Machine) -> list[str]:
    """Requirements of a distribution on that machine, without those of its extras."""
    place = {"extra": "", "python_version": machine.python, "platform_machine": machine.platform}
    found = [Requirement(each) for each in metadata.get("requires_dist", [])]
    return [str(each) for each in found if each.marker is None or each.marker.evaluate(place)]


def wheels(machine: Machine, folder: Path) -> None:
    """Downloads wheels for the machine's Python."""
    folder.mkdir(parents=True, exist_ok=True)
    tags = [f"manylinux_2_{minor}_{machine.platform}" for minor in (28, 27, 17, 12)]
    tags.append(f"manylinux2014_{machine.platform}")
    target = ["--only-binary=:all:", f"--python-version={machine.python}"]
    target += [f"--platform={tag}" for tag in tags]
    report = folder / "report.json"
    pip = [sys.executable, "-m", "pip"]
    # What is installed is no constraint here: a transformers that is too old comes with a tokenizers that is, too.
    plan = [*pip, "install", "--dry-run", "--ignore-installed", "--quiet", f"--report={report}", f"--target={folder}"]
    subprocess.run([*plan, *target, *machine.missing], check=True)
    names = wanted(json.loads(report.read_text(encoding="utf-8")), machine)
    subprocess.run([*pip, "download", "--no-deps", f"--dest={folder}", *target, *names], check=True)
    report.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    look_at = commands.add_parser("look", help="say what is installed here and what is missing")
    look_at.add_argument("--output", type=Path, help="write it to this file, for `wheels`")
    fetch = commands.add_parser("wheels", help="download what another machine lacks")
    fetch.add_argument("needed", type=Path, help="what `look` has written there")
    fetch.add_argument("folder", type=Path, help="put the wheels here")
    options = parser.parse_args()
    if options.command == "wheels":
        wheels(Machine(**json.loads(options.needed.read_text(encoding="utf-8"))), options.folder)
        return
    here = look()
    print(here.told())
    if options.output is not None:
        options.output.write_text(json.dumps(asdict(here), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
