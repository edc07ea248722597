"""Which tests `pytest` runs, which `pytest -m slow` and which `pytest -m grid`; docs/CONTRIBUTING.md says why."""

from __future__ import annotations

from pathlib import PurePath


def is_slow(path: PurePath, marks: set[str]) -> bool:
    """Whether a test is of the second tier: outside tests/unit, where tests start ranks and commands, unless marked.

    Args:
        path: of its file, from tests/.
    """
    return path.parts[0] != "unit" and marks.isdisjoint({"first", "grid", "slow"})


def is_left_out(marks: set[str], expression: str) -> bool:
    """Whether a test is of the grid, and pytest's `-m` does not name it."""
    return "grid" in marks and "grid" not in expression


def room_of(path: PurePath) -> str:
    """The folder of tests/ that a file is in; within tests/unit its folder there."""
    folders = path.parts[path.parts.index("tests") + 1 : -1]
    return "/".join(folders[: 2 if folders[:1] == ("unit",) else 1])
