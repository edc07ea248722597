"""Requests to end a run early: Ctrl-C, SIGTERM, a time limit. And to save a checkpoint now: SIGUSR1."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from toolkit.errors import StoppedError

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAVE_SIGNAL = signal.SIGUSR1
# A launcher passes on what the ranks have had from the terminal or the batch system already.
SAME_REQUEST_SECONDS = 3.0


class StopRequests:
    """While entered, SIGTERM and SIGINT only ask for an end; a SIGINT some seconds later ends at once, as usual.

    SIGUSR1 asks for a checkpoint after the step.

    What a terminal or a batch system sends to all processes, a launcher sends to its ranks once more.

    Args:
        time_limit_minutes: of the run, from now on.

    Attributes:
        reason: why to end; None: go on.
    """

    def __init__(self, time_limit_minutes: float | None) -> None:
        self._signal: str | None = None
        self._signalled = 0.0
        self._save = False
        self._until = None if time_limit_minutes is None else time.monotonic() + 60 * time_limit_minutes
        self._time_limit_minutes = time_limit_minutes
        self._handlers: dict[signal.Signals, Any] = {}

    @property
    def reason(self) -> str | None:
        if self._signal is None and self._until is not None and time.monotonic() > self._until:
            return f"checkpoint.time_limit_minutes ({self._time_limit_minutes:g}) is over"
        return self._signal

    def take_save(self) -> bool:
        """Whether a checkpoint was asked for since the last call."""
        asked, self._save = self._save, False
        return asked

    def __enter__(self) -> StopRequests:
        # Python lets no other thread set handlers.
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
            self._handlers[SAVE_SIGNAL] = signal.signal(SAVE_SIGNAL, self._on_save)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            # A process that ends for SIGTERM still has to say so, whatever its launcher sends on.
            ends = number == signal.SIGTERM and self._signal == number.name and isinstance(error, StoppedError)
            signal.signal(number, signal.SIG_IGN if ends else handler)
        self._handlers = {}

    def _on_save(self, number: int, frame: FrameType | None) -> None:
        self._save = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal is None:
            self._signal, self._signalled = signal.Signals(number).name, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._signalled > SAME_REQUEST_SECONDS:
            raise KeyboardInterrupt


def reason_of_all(mine: str | None, ranks_that_want: list[bool]) -> str | None:
    """Why all ranks end after this step; None: they don't."""
    if not any(ranks_that_want):
        return None
    return mine or f"rank {ranks_that_want.index(True)} was asked to"
