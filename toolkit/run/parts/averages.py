"""Averages of the weights (`training.ema`), which are evaluated and exported in place of the last ones."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from toolkit.optim.ema import AVERAGE, Ema
from toolkit.run.stages.part import Loop, RunPart
from toolkit.run.stages.stages import PreparedRun
from toolkit.training.extension import Extension


class Averages(RunPart):
    """Averages of the weights (`training.ema`), which are evaluated and exported in place of the last ones."""

    def prepared(self, run: PreparedRun) -> None:
        if (decay := self.recipe.training.ema) is not None:
            self.facts["average"] = f"of the weights, decay {decay:g} a step; it is evaluated and exported"

    def extension(self, loop: Loop) -> Extension | None:
        decay = self.recipe.training.ema
        return None if decay is None else WeightAverages(Ema(loop.run.inner, decay))


class WeightAverages(Extension):
    """Averages the weights after each update. After the last step the model has the averages."""

    def __init__(self, ema: Ema) -> None:
        self.ema = ema

    def after_update(self, step: int, skipped: bool) -> dict[str, Any]:
        if not skipped:
            self.ema.update()
        return {}

    def evaluating(self) -> AbstractContextManager[None]:
        return self.ema.in_place()

    def after_last_step(self) -> None:
        self.ema.put()  # nothing is saved any more; what is left to do shows and exports the model

    def tensors(self) -> dict[str, torch.Tensor]:
        return {f"{AVERAGE}{name}": tensor for name, tensor in self.ema.tensors.items()}
