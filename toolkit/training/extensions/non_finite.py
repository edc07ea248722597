"""Steps whose loss or gradient is not finite: they are reported, and too many in a row end the run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from toolkit.errors import TrainingError, counted
from toolkit.training.extension import Extension
from toolkit.training.metrics import Metrics
from toolkit.training.step import Step

if TYPE_CHECKING:
    from toolkit.training.loop_state import LoopState


class NonFiniteSteps(Extension):
    """Warns of each such step, and ends the run with a TrainingError after `limit` of them in a row."""

    def __init__(self, metrics: Metrics, limit: int) -> None:
        self._metrics = metrics
        self._limit = limit

    def before_training(self, trainer: LoopState) -> None:
        self._trainer = trainer

    def after_last_step(self) -> None:
        """Raises TrainingError if every step was skipped, so that the model is what it was before."""
        counters = self._trainer.counters
        if 0 < counters.global_step == counters.skipped_steps:
            raise TrainingError(
                f"each of the {counted(counters.global_step, 'step')} of this run was skipped, as its loss or gradient "
                "was not finite: nothing was learned, and nothing is exported; lower optimizer.learning_rate, look at "
                "the data, or, with fp16, set training.mixed_precision=bf16 or take more steps"
            )

    def after_step(self, trainer: LoopState, step: Step) -> None:
        counters = trainer.counters
        if math.isfinite(step.loss) and not step.skipped:
            counters.non_finite_in_a_row = 0
            return
        where = f" on rank {', '.join(map(str, step.non_finite_ranks))}" if step.non_finite_ranks else ""
        what = "loss" if not math.isfinite(step.loss) else "gradient norm"
        message = (
            f"step {trainer.global_step}: non-finite {what}{where} (loss {step.loss}, gradient norm {step.grad_norm}, "
            f"learning rate {step.learning_rate:.3e}); the optimizer step was skipped, {counters.skipped_steps} so far"
        )
        scaler = trainer.accelerator.scaler
        if scaler is not None and math.isfinite(step.loss) and scaler.get_scale() >= 1:
            # A scale is found by overflows, from 2^16 down: the run is broken only if none is left to try.
            self._metrics.warn(f"{message}; fp16 overflowed, and its loss scale is now {scaler.get_scale():g}")
            return
        self._metrics.warn(message)
        counters.non_finite_in_a_row += 1
        if counters.non_finite_in_a_row >= self._limit:
            raise TrainingError(
                f"{message}. That makes {counters.non_finite_in_a_row} in a row (training.max_non_finite_steps); "
                "lower optimizer.learning_rate, lengthen the warm-up or look at the data of these steps"
            )
