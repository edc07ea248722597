"""Runs from a notebook: updates one output of the cell, and returns the result of forked ranks.

Accelerate's `notebook_launcher` forks the ranks. What a forked process sends to the browser is lost, so rank 0
sends its outputs and its result through a pipe to the notebook's process.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from toolkit import ranks
from toolkit.errors import BadInputError, ToolkitError, first_line
from toolkit.pages.notebook_output import Output, curve_of, progress_output, result_output
from toolkit.recipe.recipe import Recipe
from toolkit.run.outcome import FinetuneResult
from toolkit.supervise.launcher_logs import silence_launcher
from toolkit.terminal import Terminal, in_notebook

BAR_SECONDS = 0.5
"""Shortest time between two changes of the output: each is a message to the browser."""

CURVE_SHARE = 0.02
"""The largest share of a run's time for drawing curves: one takes a tenth of a second."""

LAST_SECONDS = 10.0
"""Time limit for the last message of ranks that have ended."""

_to_notebook: Connection | None = None
"""In a rank that `finetune_on` forked, the connection to the notebook's process. It is set before the fork."""


class NotebookOutput:
    """The output of a run's cell.

    Args:
        update: replaces the output.
        num_steps: steps of the whole run.
    """

    def __init__(self, update: Callable[[Output], None], num_steps: int) -> None:
        self._update = update
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
        self._update(progress_output(records, self._num_steps, seconds_left, self._curve, self._summary))

    def finish(self, result: FinetuneResult) -> None:
        """Shows the result of the run."""
        shown = result_output(result.metrics, result.output_dir, result.export_dir, result.doubts, self._summary)
        self._update(shown)


def notebook_output(num_steps: int) -> NotebookOutput | None:
    """Returns the output of the cell that this run was started in; None if there is none, and on ranks other than 0."""
    if ranks.rank() != 0:
        return None
    if not in_notebook():
        return None
    if _to_notebook is not None:
        return NotebookOutput(_send, num_steps)
    if multiprocessing.parent_process() is not None:  # a `notebook_launcher` in a cell has forked this process
        return None
    handle = _display(progress_output([], num_steps, None, None))
    return NotebookOutput(lambda output: handle.update(output, raw=True), num_steps)


def _display(output: Output) -> Any:
    from IPython.display import display

    return display(output, raw=True, display_id=True)  # type: ignore[no-untyped-call]


def _send(message: Any) -> None:
    """Sends an output or a result to the notebook's process; a run goes on if that process is gone."""
    assert _to_notebook is not None
    with contextlib.suppress(OSError):
        _to_notebook.send(message)


def finetune_on(recipe: Recipe, num_processes: int) -> FinetuneResult:
    """Runs a recipe on ranks that are forked from this process, and returns what rank 0 returned.

    Raises:
        BadInputError: if a rank found bad input, or ranks cannot be forked from here.
        ToolkitError: if a rank failed.
    """
    from accelerate import notebook_launcher
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if num_processes < 2:
        raise BadInputError(f"num_processes: {num_processes}, but ranks are started from 2 on; leave it out for one")
    if ranks.world_size() > 1:
        raise BadInputError("num_processes: this process is a rank already; leave it out")
    silence_launcher()
    print(f"starting {num_processes} processes", flush=True)
    stdout = sys.stdout

    def as_rank() -> None:
        from toolkit.run.run import finetune

        sys.stdout = stdout
        result = finetune(recipe)
        # The process group is gone by now, so only the launcher's variable tells ranks apart.
        if os.environ["RANK"] == "0":
            _send(result)

    with _receiving() as results:
        try:
            # The launcher prints that it uses CUDA devices even if there are none.
            with contextlib.redirect_stdout(io.StringIO()):
                notebook_launcher(as_rank, (), num_processes, use_port=str(ranks.free_port()))
        except ChildFailedError as error:
            raise _error_of_rank(*error.get_first_failure()) from None
        except (ValueError, RuntimeError) as error:
            raise BadInputError(f"num_processes: {first_line(error)}") from error
    return results[0]


@contextlib.contextmanager
def _receiving() -> Iterator[list[FinetuneResult]]:
    """Receives from forked ranks inside the block: shows their outputs, and fills the yielded list with results."""
    global _to_notebook
    receiver, _to_notebook = multiprocessing.Pipe(duplex=False)
    results: list[FinetuneResult] = []
    thread = threading.Thread(target=_receive, args=(receiver, results), name="notebook", daemon=True)
    thread.start()
    try:
        yield results
    finally:
        _to_notebook.close()  # the ranks have ended: no other process holds this end any more
        _to_notebook = None
        thread.join(LAST_SECONDS)
        receiver.close()


def _receive(receiver: Connection, results: list[FinetuneResult]) -> None:
    handle = None
    with contextlib.suppress(EOFError):
        while True:
            message = receiver.recv()
            if isinstance(message, FinetuneResult):
                results.append(message)
            elif handle is None:
                handle = _display(message)
            else:
                handle.update(message, raw=True)


def _error_of_rank(rank: int, failure: Any) -> ToolkitError:
    """Returns the message of the first rank that failed, as an error of its type."""
    said = failure.message["message"] if isinstance(failure.message, dict) else str(failure.message)
    kind, _, text = said.partition(": ")
    bad_input: set[type[ToolkitError]] = {BadInputError, *BadInputError.__subclasses__()}
    is_bad_input = kind in {each.__name__ for each in bad_input}
    return BadInputError(text) if is_bad_input else ToolkitError(f"rank {rank}: {said}")
