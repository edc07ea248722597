"""Says which versions of the libraries pip offers, next to those that pyproject.toml allows.

python .ci/versions.py            a table; exit code 1 if there is a newer version than is allowed
python .ci/versions.py oldest     constraints for pip: the lowest versions that are allowed
python .ci/versions.py wall       writes this environment's versions and the date into docs/wall.md, whose programs ran
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
WALL = PROJECT.parent / "docs/wall.md"
SEEN = re.compile(r"Seen on transformers .*? with torch \d[.\d]*\d", re.DOTALL)
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


def wall() -> int:
    transformers, accelerate, trl, deepspeed = map(version, ("transformers", "accelerate", "trl", "deepspeed"))
    seen = (
        f"Seen on transformers {transformers},\nAccelerate {accelerate}, TRL {trl} and DeepSpeed {deepspeed}, "
        f"the newest on {datetime.now(UTC).date()}, with torch {version('torch').partition('+')[0]}"
    )
    text, count = SEEN.subn(seen, WALL.read_text(encoding="utf-8"))
    assert count == 1, count
    WALL.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit({"oldest": oldest, "wall": wall}[sys.argv[1]]() if sys.argv[1:] else table())
