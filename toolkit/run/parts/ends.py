"""What the end of a run depends on: its job's allocation, and its best evaluation (`training.best_by`)."""

from __future__ import annotations

from toolkit.run.stages.part import Loop, RunPart
from toolkit.training.extension import Extension
from toolkit.training.extensions.allocation import AllocationEnd, seconds_left
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
