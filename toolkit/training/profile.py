"""A trace of some steps by torch's profiler, as Accelerate sets it up."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProfileKwargs

from toolkit.training.extension import Extension
from toolkit.training.loop_state import LoopState
from toolkit.training.step import Step

DATA, UPDATE = "toolkit.data", "toolkit.update"
"""Labels of the trainer's parts of a step in a trace."""

FOLDER = "profile"


class StepProfile(Extension):
    """Profiles the steps from `first` to `last`, on every rank.

    Args:
        run: the output folder; rank r's chrome trace becomes profile/rank_r.json in it.
    """

    def __init__(self, accelerator: Accelerator, first: int, last: int, run: Path) -> None:
        self._accelerator, self._first, self._last, self._folder = accelerator, first, last, run / FOLDER
        self._profiler: torch.profiler.profile | None = None

    def before_step(self, step: int) -> None:
        if step == self._first:
            self._profiler = ProfileKwargs().build()
            self._profiler.start()

    def between_steps(self, trainer: LoopState, step: Step) -> None:
        """Writes the trace after the last profiled step."""
        if trainer.global_step != self._last or self._profiler is None:
            return
        if self._accelerator.device.type == "cuda":
            # Kernels of the last step may still be queued, and would be missing.
            torch.cuda.synchronize()
        profiler = self._profiler
        self.close()
        self._folder.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(self._folder / f"rank_{self._accelerator.process_index}.json"))

    def close(self) -> None:
        """Ends profiling, if it is under way."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
