"""Which tests run by default and which by `pytest -m slow`, `grid` and `conformance`; docs/CONTRIBUTING.md says why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path, PurePath

HEAD = """# Last runs of the grid

`pytest -m grid FILES` writes the rows of the files that it ran; see docs/CONTRIBUTING.md.

| file | passed | failed | skipped | minutes | on | with |
|---|---|---|---|---|---|---|
"""


def is_slow(path: PurePath, marks: set[str]) -> bool:
    """Whether a test is of the second tier: outside tests/unit, where tests start ranks and commands, unless marked.

    Args:
        path: of its file, from tests/.
    """
    return path.parts[0] != "unit" and marks.isdisjoint({"first", "grid", "slow", "conformance"})


def is_left_out(marks: set[str], expression: str) -> bool:
    """Whether a test is of the grid or of other projects' suites, and pytest's `-m` does not name these."""
    return any(mark in marks and mark not in expression for mark in ("grid", "conformance"))


def room_of(path: PurePath) -> str:
    """The folder of tests/ that a file is in; within tests/unit its folder there."""
    folders = path.parts[path.parts.index("tests") + 1 : -1]
    return "/".join(folders[: 2 if folders[:1] == ("unit",) else 1])


def keep_last_runs(table: Path, runs: Mapping[str, tuple[Counter[str], float]], day: str, versions: str) -> None:
    """Writes the rows of files that ran into the table, in place of what they said before.

    Args:
        runs: of each file, how often each outcome came out, and the seconds.
    """
    lines = table.read_text(encoding="utf-8").splitlines()[HEAD.count("\n") :] if table.exists() else []
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in lines}
    for file, (outcomes, seconds) in runs.items():
        counts = " | ".join(str(outcomes[name]) for name in ("passed", "failed", "skipped"))
        rows[file] = f"| {file} | {counts} | {seconds / 60:.1f} | {day} | {versions} |"
    table.write_text(HEAD + "".join(f"{rows[file]}\n" for file in sorted(rows)), encoding="utf-8")
