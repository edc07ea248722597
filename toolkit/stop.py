"""Requests to end a run early: Ctrl-C, SIGTERM, a time limit."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequests:
    """While entered, the first SIGTERM or SIGINT only asks for an end; a second one ends at once, as usual.

    Args:
        time_limit_minutes: of the run, from now on.

    Attributes:
        reason: why to end; None: go on.
    """

    def __init__(self, time_limit_minutes: float | None) -> None:
        self._signal: str | None = None
        self._until = None if time_limit_minutes is None else time.monotonic() + 60 * time_limit_minutes
        self._time_limit_minutes = time_limit_minutes
        self._handlers: dict[signal.Signals, Any] = {}

    @property
    def reason(self) -> str | None:
        if self._signal is None and self._until is not None and time.monotonic() > self._until:
            return f"checkpoint.time_limit_minutes ({self._time_limit_minutes:g}) is over"
        return self._signal

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}
