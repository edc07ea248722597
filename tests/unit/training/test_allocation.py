"""A run ends before its allocation does, with time for a save."""

from __future__ import annotations

import time

import pytest

from toolkit.errors import BadInputError
from toolkit.training.extensions import allocation
from toolkit.training.extensions.allocation import AllocationEnd, seconds_left


@pytest.mark.parametrize(
    ("save", "left", "ends"),
    [
        (None, 375.0, False),  # a tenth of the hour, as no save was measured, and the longest step
        (None, 365.0, True),
        (100.0, 235.0, False),  # two saves, 20 s and the longest step
        (100.0, 225.0, True),
        (1.0, 37.0, False),
        (1.0, 27.0, True),
    ],
)
def test_the_time_for_a_save_is_that_of_the_last_ones(
    save: float | None, left: float, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter((0.0, 3600.0 - left - 10.0, 3600.0 - left))
    monkeypatch.setattr(allocation.time, "monotonic", lambda: next(clock))
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
