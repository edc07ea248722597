"""Which tests run by default and which by `pytest -m slow`, `grid` and `conformance`; docs/CONTRIBUTING.md says why."""

from __future__ import annotations

from functools import cache
from pathlib import Path, PurePath

import yaml


def is_slow(path: PurePath, marks: set[str]) -> bool:
    """Whether a test is of the second tier: outside tests/unit, where tests start ranks and commands, unless marked.

    Args:
        path: of its file, from tests/.
    """
    return path.parts[0] != "unit" and marks.isdisjoint({"first", "grid", "slow", "conformance"})


def is_control(node: str) -> bool:
    """Whether a test of the slow tier is in the control set.

    Args:
        node: its pytest name, from tests/.
    """
    return any(node == key or node.startswith((f"{key}::", f"{key}[")) for key in control_set())


@cache
def control_set() -> dict[str, str]:
    """The control set: file, test or case -> what the rest of its kind adds, which not every change runs."""
    found: dict[str, str] = yaml.safe_load((Path(__file__).parents[1] / "control.yaml").read_text(encoding="utf-8"))
    return found


def is_left_out(marks: set[str], expression: str) -> bool:
    """Whether a test is of the grid or of other projects' suites, and pytest's `-m` does not name these."""
    return any(mark in marks and mark not in expression for mark in ("grid", "conformance"))


def room_of(path: PurePath) -> str:
    """The folder of tests/ that a file is in; within tests/unit its folder there."""
    folders = path.parts[path.parts.index("tests") + 1 : -1]
    return "/".join(folders[: 2 if folders[:1] == ("unit",) else 1])
