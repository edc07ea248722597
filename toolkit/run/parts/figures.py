"""The records of steps and evaluations, the end of a run that trains nothing, and a trace of some steps."""

from __future__ import annotations

import torch

from toolkit.planning.hardware import peak_flops_of
from toolkit.run.stages.part import Loop, RunPart
from toolkit.training.extension import Extension
from toolkit.training.extensions.non_finite import NonFiniteSteps
from toolkit.training.extensions.records import Records
from toolkit.training.profile import StepProfile
from toolkit.training.usage import model_flops


class Figures(RunPart):
    def extension(self, loop: Loop) -> Extension | None:
        accelerator, peak = self.opened.accelerator, None
        if accelerator.device.type == "cuda":
            peak = peak_flops_of(torch.cuda.get_device_name(accelerator.device), accelerator.mixed_precision)
        # No MFU for a device whose peak is not known, rather than a guess.
        return Records(loop.metrics, None if peak is None else (model_flops(loop.run.inner), peak))


class NonFinite(RunPart):
    """Steps without a finite loss and gradient (`training.max_non_finite_steps`)."""

    def extension(self, loop: Loop) -> Extension | None:
        return NonFiniteSteps(loop.metrics, self.recipe.training.max_non_finite_steps)


class Profile(RunPart):
    """A trace of some steps (`training.profile_steps`)."""

    def extension(self, loop: Loop) -> Extension | None:
        if (steps := self.recipe.training.profile_steps) is None:
            return None
        return StepProfile(self.opened.accelerator, steps[0], steps[1], self.opened.output_dir)
