"""The end of the job's allocation, before which a run saves and stops."""

from __future__ import annotations

from toolkit.run.parts.part import Loop, RunPart
from toolkit.training.extension import Extension
from toolkit.training.extensions.allocation import AllocationEnd, seconds_left


class Allocation(RunPart):
    def extension(self, loop: Loop) -> Extension | None:
        seconds = seconds_left()
        return None if seconds is None else AllocationEnd(seconds, loop.checkpoints.seconds_to_save)
