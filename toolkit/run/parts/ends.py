"""What ends a run early: its job's allocation, and evaluations that no longer get better (`training.patience`)."""

from __future__ import annotations

from toolkit.run.parts.part import Loop, RunPart
from toolkit.training.extension import Extension
from toolkit.training.extensions.allocation import AllocationEnd, seconds_left
from toolkit.training.extensions.early_stopping import EarlyStopping


class Allocation(RunPart):
    def extension(self, loop: Loop) -> Extension | None:
        seconds = seconds_left()
        return None if seconds is None else AllocationEnd(seconds, loop.checkpoints.seconds_to_save)


class Patience(RunPart):
    def extension(self, loop: Loop) -> Extension | None:
        if self.recipe.training.patience is None:
            return None
        return EarlyStopping(self.recipe.training, loop.metrics, loop.save)
