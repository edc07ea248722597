"""What the end of a run depends on: its job's allocation, and its best evaluation (`training.best_by`)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from toolkit.errors import BadInputError
from toolkit.run.stages.part import Loop, RunPart
from toolkit.training.extension import Extension
from toolkit.training.extensions.best import BestEvaluation
from toolkit.training.loop_state import LoopState


class Allocation(RunPart):
    def extension(self, loop: Loop) -> Extension | None:
        seconds = seconds_left()
        return None if seconds is None else AllocationEnd(seconds, loop.checkpoints.seconds_to_save)


class Best(RunPart):
    """Evaluations that get no better end the run (`patience`); the best one may be what is exported (`keep_best`)."""

    def extension(self, loop: Loop) -> Extension | None:
        training, keeps = self.recipe.training, self.recipe.checkpoint.keep_best
        if training.patience is None and not keeps:
            return None

        def restore(trainer: LoopState) -> None:
            if keeps and (best := loop.checkpoints.restore_best(trainer)) is not None:
                self.opened.shown.exported_step = best.step

        return BestEvaluation(training, loop.metrics, loop.save, restore)


ENDS = "SLURM_JOB_END_TIME"
"""The variable with the end of the allocation in seconds since 1970. Slurm sets it, or the file of `toolkit job`."""


SPARE_SECONDS = 20.0
"""For the end of the ranks after the save: pages, launchers and the queue."""


UNMEASURED_SHARE, LEAST_UNMEASURED_SECONDS, MOST_UNMEASURED_SECONDS = 0.1, 30.0, 600.0
"""Until a save was measured, it gets this share of the time that was left at the start, inside these bounds."""


class AllocationEnd(Extension):
    """Asks the run to end when no more than two saves, the longest step and `SPARE_SECONDS` are left.

    Args:
        seconds: the time until the allocation ends.
        seconds_to_save: returns how long the longest save so far took, or None before the first.
    """

    def __init__(self, seconds: float, seconds_to_save: Callable[[], float | None]) -> None:
        self._until = time.monotonic() + seconds
        self._unmeasured = min(max(UNMEASURED_SHARE * seconds, LEAST_UNMEASURED_SECONDS), MOST_UNMEASURED_SECONDS)
        self._seconds_to_save = seconds_to_save
        self._longest_step = 0.0
        self._looked: float | None = None

    def reason_to_stop(self) -> str | None:
        """Is called after each step, by which it knows how long the longest was."""
        now = time.monotonic()
        if self._looked is not None:
            self._longest_step = max(self._longest_step, now - self._looked)
        self._looked = now
        return self._reason(self._until - now)

    def leaves_evaluation(self) -> str | None:
        return self._reason(self._until - time.monotonic())

    def _reason(self, left: float) -> str | None:
        return None if left > self._seconds_needed() else f"the allocation ends in {max(0.0, left):.0f} s ({ENDS})"

    def _seconds_needed(self) -> float:
        save = self._seconds_to_save()
        return (self._unmeasured if save is None else 2 * save + SPARE_SECONDS) + self._longest_step


def seconds_left() -> float | None:
    """Returns the seconds until the allocation of this job ends, or None if no batch system says so.

    Raises:
        BadInputError: if the variable is not a number.
    """
    if not (text := os.environ.get(ENDS, "")):
        return None
    try:
        return float(text) - time.time()
    except ValueError as error:
        raise BadInputError(f"{ENDS} is {text!r}; needs seconds since 1970, or unset it") from error
