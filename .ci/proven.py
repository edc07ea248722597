"""Says whether the slow tier has passed on the rooms and versions of this commit: then `.ci/run` runs its control set.

python .ci/proven.py              exit code 0 if it has
python .ci/proven.py write        after `pytest -m slow`: keeps the rooms' hashes in .ci/proven.txt
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATHS = ("toolkit/checkpoint", "toolkit/sharding", "toolkit/training", ".ci/constraints.txt")
"""What most of the slow tier is about. Other rooms have the first tier and the control set (tests/control.yaml)."""


def git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout  # noqa: S603


def main() -> None:
    if git("status", "--porcelain", "--", *PATHS):
        sys.exit(f"not committed yet: a change of {', '.join(PATHS)}")
    found = "".join(f"{git('rev-parse', f'HEAD:{path}').strip()} {path}\n" for path in PATHS)
    kept = ROOT / ".ci/proven.txt"
    if sys.argv[1:] == ["write"]:
        kept.write_text(found)
    elif not kept.exists() or kept.read_text() != found:
        sys.exit("the slow tier has not run on these rooms and versions")


if __name__ == "__main__":
    main()
