"""Runs from a notebook: updates one output of the cell, and returns the result of ranks that it starts."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from accelerate.utils import check_cuda_p2p_ib_support

from toolkit import ranks
from toolkit.errors import BadInputError, StoppedError, ToolkitError
from toolkit.pages.notebook_output import Output, Told, curve_of, progress_output, result_output
from toolkit.pages.run_page import progress_of
from toolkit.recipe.recipe import Recipe
from toolkit.run.shown.outcome import FinetuneResult
from toolkit.supervise.launched_ranks import launch_ranks
from toolkit.terminal import Terminal, in_notebook

BAR_SECONDS = 0.5
"""Shortest time between two changes of the output: each is a message to the browser."""

CURVE_SHARE = 0.02
"""The largest share of a run's time for drawing curves: one takes a tenth of a second."""

RESULT = "result"
"""The file beside the job of `finetune_on` in which rank 0 leaves what it returns."""


class NotebookOutput:
    """The output of a run's cell.

    Args:
        update: replaces the output.
        num_steps: steps of the run.
        told_of: returns the last figures of records.
    """

    def __init__(self, update: Callable[[Output], None], num_steps: int, told_of: Told = progress_of) -> None:
        self._update, self._told_of = update, told_of
        self._num_steps = num_steps
        self._curve: Any = None
        self._summary = ""
        self._bar_due = self._curve_due = time.monotonic()

    @contextlib.contextmanager
    def holding(self, console: Terminal) -> Iterator[None]:
        """Captures what is printed inside, and adds it to the output."""
        with console.capture() as captured:
            yield
        self._summary = captured.get()
        self._update(progress_output([], self._num_steps, None, None, self._summary))

    def record(self, records: list[dict[str, Any]], seconds_left: float | None) -> None:
        """Shows the records so far, if an update is due."""
        now = time.monotonic()
        if now < self._bar_due:
            return
        self._bar_due = now + BAR_SECONDS
        if now >= self._curve_due:
            self._curve = curve_of(records)
            drawn = time.monotonic()
            self._curve_due = drawn + (drawn - now) / CURVE_SHARE
        told = (self._num_steps, seconds_left, self._curve, self._summary, self._told_of)
        self._update(progress_output(records, *told))

    def finish(self, result: FinetuneResult) -> None:
        """Shows the result of the run."""
        shown = result_output(result.metrics, result.output_dir, result.export_dir, result.doubts, self._summary)
        self._update(shown)


def notebook_output(num_steps: int, told_of: Told = progress_of) -> NotebookOutput | None:
    """Returns the output of the cell that this run was started in, or None if there is none."""
    # With a parent, a `notebook_launcher` in a cell has forked this process.
    if not in_notebook() or multiprocessing.parent_process() is not None:
        return None
    handle = _display(progress_output([], num_steps, None, None))
    return NotebookOutput(lambda output: handle.update(output, raw=True), num_steps, told_of)


def _display(output: Output) -> Any:
    from IPython.display import display

    return display(output, raw=True, display_id=True)  # type: ignore[no-untyped-call]


def finetune_on(recipe: Recipe, num_processes: int) -> FinetuneResult:
    """Runs a recipe on ranks that are interpreters of their own, and returns what rank 0 returned.

    Only the notebook's process can update an output of a cell, so the ranks print lines. They are not forked, as those
    of `accelerate.notebook_launcher`: in a fork of a process that has trained, or used CUDA, torch can do neither.

    Raises:
        BadInputError: if a rank found bad input.
        StoppedError: if the run was asked to end.
        ToolkitError: if a rank failed.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    if num_processes < 2:
        raise BadInputError(
            f"num_processes: {num_processes}, but it must be at least 2; omit it to train in this process"
        )
    if ranks.world_size() > 1:
        raise BadInputError("num_processes: this process is a rank already; leave it out")
    print(f"starting {num_processes} processes", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        job, result = Path(folder, "job"), Path(folder, RESULT)
        job.write_bytes(pickle.dumps(recipe))
        try:
            launch_ranks("toolkit.run.notebook_rank", job, num_processes, _environment())
        except SignalException as error:
            raise StoppedError(
                f"stopped by {error.sigval.name}; if the run had begun to train, its state is saved, and the same call "
                "goes on from there"
            ) from None
        if not result.is_file():
            raise ToolkitError("the ranks ended with code 0 before the run was done: look at the last lines above")
        found: FinetuneResult = pickle.loads(result.read_bytes())  # noqa: S301 (ours, in a folder of the user's)
        return found


def _environment() -> dict[str, str]:
    """Returns the variables that Accelerate's launcher sets for ranks."""
    found = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}
    if in_notebook():  # Jupyter sets it, and the bar of a terminal would fill the cell with its codes
        found["FORCE_COLOR"] = ""
    if not check_cuda_p2p_ib_support():
        found |= {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
    return found
