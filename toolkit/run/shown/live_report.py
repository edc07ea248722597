"""Writes the report of a running run repeatedly, and last when the run ends early."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit import ranks
from toolkit.errors import StoppedError, first_line, is_lost_peer
from toolkit.pages.parts.run_metrics import last_step
from toolkit.pages.run_page import RunSummary, write_report
from toolkit.pages.status import State, Status, mark_ended, state_of
from toolkit.run.shown.notebook import NotebookOutput

FIRST_SECONDS = 3.0
"""Time before the first writing: a run that is over by then writes its report once."""

EVERY_SECONDS = 30.0
"""Shortest time between two writings."""

COST_SHARE = 0.01
"""The largest share of a run's time for writing: a report of many curves takes half a second."""


class LiveReport:
    """Writes `report.html` while a run goes on; does nothing on ranks other than 0.

    Args:
        summary_of: returns the summary of the records so far.
        num_steps: steps of the run.
        output: the output of the notebook's cell in which the run was started, which shows the same records.
    """

    def __init__(
        self,
        path: Path,
        summary_of: Callable[[list[dict[str, Any]]], RunSummary],
        num_steps: int,
        output: NotebookOutput | None = None,
    ) -> None:
        self.output = output
        self._path = path
        self._summary_of = summary_of
        self._num_steps = num_steps
        self._records: list[dict[str, Any]] = []
        self._every = EVERY_SECONDS
        self._recorded = time.monotonic()
        self._due = self._recorded + FIRST_SECONDS
        self._slowest = 0.0
        self._num_written = 0

    def record(self, records: list[dict[str, Any]], seconds_left: float | None) -> None:
        """Takes the records so far, and writes the report if it is due."""
        self._records = records
        if self.output is not None:
            self.output.record(records, seconds_left)
        started = time.monotonic()
        # Steps may take minutes each: the page is not late before the next step is.
        self._slowest = max(self._slowest, started - self._recorded)
        self._recorded = started
        # The page of the last step stays for as long as an export takes.
        is_last = self._num_written > 0 and last_step(self._records) >= self._num_steps
        if ranks.rank() != 0 or (started < self._due and not is_last):
            return
        self._write("running", seconds_left=seconds_left)
        # What the page has just promised; how long the writing took is for the promise of the next one.
        self._due = started + self._every
        self._num_written += 1
        if self._num_written > 1:  # the first one also imports what pages need, 1.6 s on a busy machine
            self._every = max(EVERY_SECONDS, (time.monotonic() - started) / COST_SHARE)

    def end(self, state: State, problem: str) -> None:
        """Writes the report with the reason why the run ended early."""
        if ranks.rank() == 0:
            self._write(state, problem=problem)

    def failed(self, error: BaseException) -> None:
        """Writes the report after an error; on other ranks only if rank 0 may not know of it."""
        problem = f"{type(error).__name__}: {first_line(error)}."
        is_lost = isinstance(error, Exception) and is_lost_peer(error)
        if is_lost:
            problem = f"Another rank is gone ({problem.rstrip('.')})."
        # The rank that failed first may have reported why, which says more than that its peers lost it.
        if ranks.rank() == 0 and not (is_lost and state_of(self._path) == "failed"):
            self._write("failed", problem=problem)
        elif ranks.fails_alone(error):
            mark_ended(self._path, "failed", problem if is_lost else f"Rank {ranks.rank()}: {problem}")

    def _write(self, state: State, seconds_left: float | None = None, problem: str = "") -> None:
        status = Status(
            state,
            last_step(self._records),
            self._num_steps,
            seconds_left,
            round(time.time(), 1),
            math.ceil(self._every),
            problem,
            self._slowest,
        )
        # A full disk costs this page, not the run: checkpoints, which must be written, report it.
        with suppress(OSError):
            write_report(self._path, replace(self._summary_of(self._records), status=status))


@contextmanager
def ended_in(report: LiveReport) -> Iterator[None]:
    """Writes into the report why the run ended, if an error ends it."""
    try:
        yield
    except StoppedError as error:
        report.end("stopped", f"{error.why}.")
        raise
    except KeyboardInterrupt:
        report.end("stopped", "Ctrl-C ended it at once; nothing was saved then.")
        raise
    except BaseException as error:
        report.failed(error)
        raise
