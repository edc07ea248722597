"""A trace of some steps (`training.profile_steps`)."""

from __future__ import annotations

from toolkit.run.parts.part import Loop, RunPart
from toolkit.training.extension import Extension
from toolkit.training.profile import StepProfile


class Profile(RunPart):
    def extension(self, loop: Loop) -> Extension | None:
        if (steps := self.recipe.training.profile_steps) is None:
            return None
        return StepProfile(self.opened.accelerator, steps[0], steps[1], self.opened.output_dir)
