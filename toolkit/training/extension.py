"""Extensions of the training loop: records, averages, early stopping, checkpoints, a profile, the heartbeat.

The loop itself knows batches, the loss and the optimizer step. Everything else is an extension, which the loop calls at
these points, and which can be left out of `Trainer(extensions=...)` alone:

    before_training                    before the first evaluation and the first step, after a checkpoint's state
    before_step                        the step's data are not waited for yet
    rate_factor                        all ranks must return the same
      enter_phase                      DATA, FORWARD, BACKWARD, COLLECTIVE, OPTIMIZER; elsewhere EVALUATE and SAVE
      reason_to_stop, wants_save       all ranks hear of it in the step's one exchange
      before_update                    gradients are clipped; host and device are together, once in a step
      after_update                     returns metrics for the step's record
    after_step                         the step is counted
      evaluating                       if an evaluation is due
        leaves_evaluation              before each of its batches; if a rank has a reason, `stopped` comes next
        at_evaluation                  inside, after the losses; returns figures for the evaluation's record
        after_evaluation
      ends_run                         after an evaluation that was due
    between_steps                      nothing is under way
    after_last_step, close             after the last evaluation; at the end, after an error too
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

# For types alone: the watchdog's process reads heartbeats, and does not import torch.
if TYPE_CHECKING:
    import torch

    from toolkit.training.loop_state import LoopState
    from toolkit.training.phase import Phase
    from toolkit.training.step import Step


class Extension:
    """Does nothing at any point; an extension overrides what it needs. They are called in the order of the list."""

    def before_training(self, trainer: LoopState) -> None:
        """Is called once, before the first evaluation and the first step of this start, with what is trained."""

    def enter_phase(self, phase: Phase, step: int) -> None:
        """`phase` of optimizer step `step` begins; phases of micro-batches begin once for each."""

    def before_step(self, step: int) -> None:
        """Optimizer step `step` begins: its data are waited for next."""

    def rate_factor(self, step: int) -> float:
        """Returns a factor on the learning rate of optimizer step `step`, which is equal on all ranks."""
        return 1.0

    def reason_to_stop(self) -> str | None:
        """Returns why this rank wants to end after this step, or None."""
        return None

    def leaves_evaluation(self) -> str | None:
        """Returns why this rank wants to end now, in the middle of an evaluation, or None."""
        return None

    def stopped(self, trainer: LoopState, reason: str) -> None:
        """Is called when an evaluation was left. The state is that of the last step. Collective."""

    def wants_save(self) -> bool:
        """Tells whether this rank wants a checkpoint after this step."""
        return False

    def before_update(self) -> None:
        """Is called when the host has just waited for the device, so figures can be read without another wait."""

    def after_update(self, step: int, skipped: bool) -> dict[str, Any]:
        """Is called after the optimizer was stepped, or skipped. Returns metrics for the step's record."""
        return {}

    def after_step(self, trainer: LoopState, step: Step) -> None:
        """Is called when a step is done, and the trainer's counters include it."""

    def evaluating(self) -> AbstractContextManager[None]:
        """Returns a context that is entered around each evaluation."""
        return nullcontext()

    def at_evaluation(self, trainer: LoopState) -> dict[str, Any]:
        """Is called with the model in evaluation mode, with the weights to evaluate. Returns figures for the record."""
        return {}

    def after_evaluation(self, trainer: LoopState, record: dict[str, Any]) -> None:
        """Is called when an evaluation is done, and `record` holds its figures."""

    def ends_run(self, trainer: LoopState) -> bool:
        """Tells whether the run ends after an evaluation that was due, also when a run resumes there. Collective."""
        return False

    def between_steps(self, trainer: LoopState, step: Step) -> None:
        """Is called when a step is done, and the evaluation after it, if one was due."""

    def after_last_step(self) -> None:
        """Is called when training and its last evaluation are done."""

    def close(self) -> None:
        """Is called when the loop ends, normally or by an error."""

    def state(self) -> dict[str, Any]:
        """Returns fields of a checkpoint's manifest, as plain JSON."""
        return {}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns tensors for checkpoints, by their names in a checkpoint. They are restored in place."""
        return {}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continues from the fields that `state` returned.

        Raises:
            ValueError: if they do not fit this run.
        """
