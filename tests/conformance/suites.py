"""Fetches suites that others wrote, and runs them as they are: on the stock backend, on ours, and with a fault."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

HERE = Path(__file__).parent


def source_of(package: str) -> Path:
    """The source package of the installed version, unpacked in the cache. Fetched by pip if it is not there."""
    name = f"{package}-{version(package)}"
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "finetune-toolkit", "suites")
    if not (cache / name).exists():
        with TemporaryDirectory() as folder:
            asked = ["--no-deps", "--no-binary", package, "--dest", folder, name.replace("-", "==")]
            subprocess.run(["pip", "download", "--quiet", *asked], check=True)
            with tarfile.open(next(Path(folder).glob("*.tar.gz"))) as archive:
                archive.extractall(cache, filter="data")
    return cache / name


def outcomes(package: str, tests: list[Path | str], backend: str, fault: str = "", **settings: str) -> dict[str, str]:
    """Runs tests of pytest in a process. Returns of each case an empty text if it passed, or how it failed or why not.

    Args:
        package: whose source package the process can import.
        tests: arguments of pytest.
        backend: `stock`, or the strategy of ours.
        settings: other variables of the environment.
    """
    paths = [source_of(package), HERE / "stand_ins", HERE, HERE.parent]
    named = {"CONFORMANCE_BACKEND": backend, "CONFORMANCE_FAULT": fault, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    with TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        plain = ["-p", "in_place", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", folder, "--noconftest"]
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *plain, *map(str, tests)]
        ended = subprocess.run(
            command, env=os.environ | named | settings, cwd=folder, capture_output=True, text=True, check=False
        )
        assert report.exists(), ended.stdout[-3000:] + ended.stderr[-3000:]
        return dict(pair for case in ElementTree.parse(report).iter("testcase") for pair in _cases(case))


def _cases(case: ElementTree.Element) -> list[tuple[str, str]]:
    name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
    inner = [(f"{name}.{each.get('name')}", each.get("value", "")) for each in case.iter("property")]
    ends = [each for each in case if each.tag in ("failure", "error", "skipped")]
    return [*inner, (name, "\n".join(f"{each.tag}: {each.get('message')}\n{each.text}" for each in ends))]
