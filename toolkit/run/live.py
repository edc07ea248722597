"""The report of a run that goes on: written again and again, and last when the run ends before its time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit import ranks
from toolkit.errors import StoppedError, first_line
from toolkit.pages.run_page import RunSummary, write_report
from toolkit.pages.status import Status

EVERY_SECONDS = 30.0
"""Least time between two writings."""

COST_SHARE = 0.01
"""Of a run's time that writings take at most: a report of many curves takes half a second."""


class LiveReport:
    """Writes `report.html` of a run that goes on; does nothing on ranks other than 0.

    Args:
        summary_of: the summary of the records so far.
        num_steps: of the whole run; asked anew, since a resumed run finds out late.
    """

    def __init__(
        self, path: Path, summary_of: Callable[[list[dict[str, Any]]], RunSummary], num_steps: Callable[[], int]
    ) -> None:
        self._path = path
        self._summary_of = summary_of
        self._num_steps = num_steps
        self._records: list[dict[str, Any]] = []
        self._due = -math.inf
        self._every = EVERY_SECONDS

    def record(self, records: list[dict[str, Any]], seconds_left: float | None) -> None:
        """Takes the records so far, and writes the report where it is due."""
        self._records = records
        if ranks.rank() != 0 or time.monotonic() < self._due:
            return
        started = time.monotonic()
        self._write("running", seconds_left=seconds_left)
        taken = time.monotonic() - started
        self._every = max(EVERY_SECONDS, taken / COST_SHARE)
        self._due = started + self._every

    def end(self, state: str, problem: str) -> None:
        """Writes what there is, and why the run has ended before its time."""
        if ranks.rank() == 0:
            self._write(state, problem=problem)

    def _write(self, state: str, seconds_left: float | None = None, problem: str = "") -> None:
        step = max((record["step"] for record in self._records), default=0)
        status = Status(
            state,
            step,
            self._num_steps(),
            seconds_left,
            time.strftime("%Y-%m-%d %H:%M:%S %Z"),
            math.ceil(self._every),
            problem,
        )
        # A full disk costs this page, not the run: what must be written, as checkpoints, tells of it.
        with suppress(OSError):
            write_report(self._path, replace(self._summary_of(self._records), status=status))


@contextmanager
def ended_in(report: LiveReport) -> Iterator[None]:
    """Says in the report why the run ended, where it ends by an error."""
    try:
        yield
    except (StoppedError, KeyboardInterrupt) as error:
        report.end("stopped", first_line(error))
        raise
    except BaseException as error:
        report.end("failed", f"{type(error).__name__}: {first_line(error)}")
        raise
