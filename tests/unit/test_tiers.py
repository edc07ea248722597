"""A test's tier comes from its folder and its marks; what each tier took is summed by room."""

from __future__ import annotations

from collections import Counter
from pathlib import Path, PurePath

from support.tiers import HEAD, is_left_out, is_slow, keep_last_runs, room_of

UNIT, RANKS = PurePath("unit/data/test_a.py"), PurePath("multiprocess/test_b.py")


def test_what_starts_ranks_is_slow_unless_it_is_marked() -> None:
    assert is_slow(RANKS, {"parametrize"})
    assert not any(is_slow(RANKS, {mark}) for mark in ("first", "grid", "slow", "conformance"))
    assert not is_slow(UNIT, set())


def test_the_grid_runs_only_by_its_name() -> None:
    assert is_left_out({"grid", "first"}, "slow or not slow")
    assert is_left_out({"grid"}, "")
    assert is_left_out({"conformance"}, "grid")
    assert not is_left_out({"grid"}, "grid")
    assert not is_left_out({"slow"}, "slow")


def test_rooms_are_folders() -> None:
    files = ("tests/unit/data/test_a.py", "tests/unit/planning/memory/test_b.py", "tests/unit/test_c.py")
    assert [room_of(PurePath(file)) for file in files] == ["unit/data", "unit/planning", "unit"]
    assert room_of(PurePath("tests/multiprocess/test_d.py")) == "multiprocess"


def test_a_run_of_the_grid_replaces_its_rows_in_the_table(tmp_path: Path) -> None:
    table, passed = tmp_path / "grid.md", Counter(passed=3, skipped=1)
    keep_last_runs(
        table, {"tests/b.py": (passed, 90.0), "tests/a.py": (Counter(failed=1), 6.0)}, "2026-01-02", "torch 2"
    )
    keep_last_runs(table, {"tests/a.py": (passed, 6.0)}, "2026-01-03", "torch 3")
    assert table.read_text() == HEAD + (
        "| tests/a.py | 3 | 0 | 1 | 0.1 | 2026-01-03 | torch 3 |\n"
        "| tests/b.py | 3 | 0 | 1 | 1.5 | 2026-01-02 | torch 2 |\n"
    )
