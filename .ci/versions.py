"""Says which versions of the libraries pip offers, next to those that pyproject.toml allows.

python .ci/versions.py            a table; exit code 1 if there is a newer version than is allowed
python .ci/versions.py oldest     constraints for pip: the lowest versions that are allowed
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
WATCHED = ("torch", "accelerate", "transformers", "datasets", "peft", "trl")


def allowed() -> dict[str, Requirement]:
    """The requirements for these libraries, by name."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    found = map(Requirement, project["dependencies"] + project["optional-dependencies"]["test"])
    return {each.name: each for each in found if each.name in WATCHED}


def offered(name: str) -> list[Version]:
    """The releases that pip offers, newest first."""
    asked = ["pip", "index", "versions", name]
    told = subprocess.run(asked, capture_output=True, text=True, check=True).stdout  # noqa: S603
    (line,) = (line for line in told.splitlines() if line.startswith("Available versions: "))
    return sorted({Version(each) for each in line.partition(": ")[2].split(", ")}, reverse=True)


def table() -> int:
    print(f"{'library':14} {'allowed':14} {'newest allowed':16} newer")
    rows = {name: (each, offered(name)) for name, each in allowed().items()}
    newer = 0
    for name, (each, versions) in rows.items():
        newest = next(version for version in versions if version in each.specifier)
        above = [str(version) for version in versions if version > newest]
        newer += len(above)
        print(f"{name:14} {each.specifier!s:14} {newest!s:16} {', '.join(above) or '-'}")
    return int(newer > 0)


def oldest() -> int:
    for name, each in allowed().items():
        print(f"{name}=={min(Version(limit.version) for limit in each.specifier if limit.operator == '>=')}")
    return 0


if __name__ == "__main__":
    sys.exit(oldest() if sys.argv[1:] == ["oldest"] else table())
