"""A run ends before its allocation does, with time for a save."""

from __future__ import annotations

import time

import pytest
from support.cases import cases

from toolkit.errors import BadInputError
from toolkit.run.parts.ends import AllocationEnd, seconds_left

TABLES = cases(__file__)


@pytest.mark.parametrize(("save", "left", "ends"), TABLES["SAVES"])
def test_the_time_for_a_save_is_that_of_the_last_ones(
    save: float | None, left: float, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter((0.0, 3600.0 - left - 10.0, 3600.0 - left))
    monkeypatch.setattr("toolkit.run.parts.ends.time.monotonic", lambda: next(clock))
    end = AllocationEnd(3600.0, lambda: save)
    end.reason_to_stop()
    told = end.reason_to_stop()
    assert told == (f"the allocation ends in {left:.0f} s (SLURM_JOB_END_TIME)" if ends else None)


def test_the_end_is_what_the_batch_system_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    assert seconds_left() is None
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 100))
    assert 98 < (seconds_left() or 0) < 101
    monkeypatch.setenv("SLURM_JOB_END_TIME", "Unknown")
    with pytest.raises(BadInputError, match="SLURM_JOB_END_TIME is 'Unknown'; needs seconds since 1970"):
        seconds_left()
