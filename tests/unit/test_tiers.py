"""A test's tier comes from its folder and its marks; what each tier took is summed by room."""

from __future__ import annotations

from pathlib import Path, PurePath

import pytest
from support.tiers import control_set, is_control, is_left_out, is_slow, room_of

TESTS = Path(__file__).parents[1]
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


@pytest.mark.parametrize("room", ["unit/data", "unit/planning", "unit", "multiprocess"])
def test_rooms_are_folders(room: str) -> None:
    assert room_of(PurePath("tests", room, "memory" if room == "unit/planning" else "", "test_a.py")) == room


def test_the_control_set_names_tests_that_are_there() -> None:
    for key in control_set():
        file, _, test = key.partition("::")
        assert f"def {test.partition('[')[0]}(" in (TESTS / file).read_text() if test else (TESTS / file).is_file(), key
    assert [is_control(f"multiprocess/test_lora.py::test_the_run_is_that_of_peft_alone[{n}]") for n in (2, 4)] == [1, 0]
