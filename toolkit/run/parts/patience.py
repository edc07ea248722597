"""Ends a run whose evaluations no longer get better (`training.patience`)."""

from __future__ import annotations

from toolkit.run.parts.part import Loop, RunPart
from toolkit.training.extension import Extension
from toolkit.training.extensions.early_stopping import EarlyStopping


class Patience(RunPart):
    def extension(self, loop: Loop) -> Extension | None:
        if self.recipe.training.patience is None:
            return None
        return EarlyStopping(self.recipe.training, loop.metrics, loop.save)
