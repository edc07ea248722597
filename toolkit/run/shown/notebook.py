"""Runs from a notebook: updates one output of the cell, and returns the result of ranks that it starts.

Only the notebook's process can send to the browser, so rank 0 sends its outputs and its result to that process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any, NamedTuple

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

LAST_SECONDS = 10.0
"""Time limit for the last message of ranks that have ended."""

connection: Connection | None = None
"""In rank 0 of `finetune_on`, the connection to the process that started it."""

shows = False
"""Whether that process is a notebook's."""


class Job(NamedTuple):
    """What a rank does, as a file that the notebook's process writes for it.

    Attributes:
        recipe: the recipe to train.
        address: host and port at which the notebook's process takes outputs and the result of rank 0.
        key: what both prove to know.
        in_notebook: whether there is a notebook, which shows the outputs; otherwise ranks print as usual.
    """

    recipe: Recipe
    address: tuple[str, int]
    key: bytes
    in_notebook: bool


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
    """Returns the output of the cell that this run was started in; None if there is none, and on ranks other than 0."""
    if ranks.rank() != 0:
        return None
    if shows:
        return NotebookOutput(send, num_steps, told_of)
    if not in_notebook():
        return None
    if multiprocessing.parent_process() is not None:  # a `notebook_launcher` in a cell has forked this process
        return None
    handle = _display(progress_output([], num_steps, None, None))
    return NotebookOutput(lambda output: handle.update(output, raw=True), num_steps, told_of)


def _display(output: Output) -> Any:
    from IPython.display import display

    return display(output, raw=True, display_id=True)  # type: ignore[no-untyped-call]


def send(message: Any) -> None:
    """Sends an output or a result to the notebook's process; a run goes on if that process is gone."""
    assert connection is not None
    with contextlib.suppress(OSError):
        connection.send(message)


def finetune_on(recipe: Recipe, num_processes: int) -> FinetuneResult:
    """Runs a recipe on ranks that are interpreters of their own, and returns what rank 0 returned.

    They are not forked, as those of `accelerate.notebook_launcher`: in a fork of a process that has trained, or used
    CUDA, torch can do neither.

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
    with _receiving() as (address, key, results), tempfile.TemporaryDirectory() as folder:
        job = Path(folder, "job")
        job.write_bytes(pickle.dumps(Job(recipe, address, key, in_notebook())))
        try:
            launch_ranks("toolkit.run.notebook_rank", job, num_processes, _environment())
        except SignalException as error:
            raise StoppedError(
                f"stopped by {error.sigval.name}; if the run had begun to train, its state is saved, and the same call "
                "goes on from there"
            ) from None
    if not results:
        raise ToolkitError("the ranks ended with code 0 before the run was done: look at the last lines above")
    return results[0]


def _environment() -> dict[str, str]:
    """Returns the variables that Accelerate's launcher sets for ranks."""
    found = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}
    if not check_cuda_p2p_ib_support():
        found |= {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
    return found


@contextlib.contextmanager
def _receiving() -> Iterator[tuple[tuple[str, int], bytes, list[FinetuneResult]]]:
    """Receives from rank 0 inside the block: shows its outputs, and fills the yielded list with its result.

    Also yields the address at which it listens, and the key that rank 0 has to know.
    """
    key = os.urandom(32)
    results: list[FinetuneResult] = []
    ended = threading.Event()
    with Listener(("127.0.0.1", 0), authkey=key) as listener:
        address: Any = listener.address
        thread = threading.Thread(target=_receive, args=(listener, results, ended), name="notebook", daemon=True)
        thread.start()
        try:
            yield address, key, results
        finally:
            ended.set()
            with contextlib.suppress(OSError):
                socket.create_connection(address).close()  # the thread may wait for a connection
            thread.join(LAST_SECONDS)


def _receive(listener: Listener, results: list[FinetuneResult], ended: threading.Event) -> None:
    handle = None
    while not ended.is_set():
        with contextlib.suppress(EOFError, OSError, AuthenticationError), listener.accept() as receiver:
            while True:
                message = receiver.recv()
                if isinstance(message, FinetuneResult):
                    results.append(message)
                elif handle is None:
                    handle = _display(message)
                else:
                    handle.update(message, raw=True)
