"""Requests to end a run early (Ctrl-C, SIGTERM, a closed terminal, a time limit), or to save a checkpoint (SIGUSR1)."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from toolkit.errors import StoppedError
from toolkit.terminal import in_notebook
from toolkit.training.extension import Extension

SAVE_SIGNAL = signal.SIGUSR1
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# A launcher passes on what the ranks have had from the terminal or the batch system already.
SAME_REQUEST_SECONDS = 3.0


class StopRequests(Extension):
    """While entered, SIGTERM, SIGINT and SIGHUP only request an end; a SIGINT some seconds later ends at once.

    Before the first step there is nothing to save: SIGINT ends the run there at once.

    SIGHUP comes when the terminal is closed. A process that `nohup` started goes on, unless it is a rank of `torchrun`
    or `accelerate launch`, which end then and hand the signal on; `toolkit train` goes on.

    SIGUSR1 requests a checkpoint after the step.

    A signal that a terminal or a batch system sends to all processes reaches ranks twice: a launcher sends it on.

    Args:
        time_limit_minutes: limit of the run, from now on.
    """

    def __init__(self, time_limit_minutes: float | None) -> None:
        self._signal: str | None = None
        self._signalled = 0.0
        self._save = False
        self._until = None if time_limit_minutes is None else time.monotonic() + 60 * time_limit_minutes
        self._time_limit_minutes = time_limit_minutes
        self._handlers: dict[signal.Signals, Any] = {}
        self._has_begun = False

    def before_step(self, step: int) -> None:
        self._has_begun = True

    def reason_to_stop(self) -> str | None:
        if self._signal is None and self._until is not None and time.monotonic() > self._until:
            return f"checkpoint.time_limit_minutes ({self._time_limit_minutes:g}) is over"
        return self._signal

    def leaves_evaluation(self) -> str | None:
        return self.reason_to_stop()

    def wants_save(self) -> bool:
        """Tells whether a checkpoint was asked for since the last call."""
        asked, self._save = self._save, False
        return asked

    def __enter__(self) -> StopRequests:
        # Python lets no other thread set handlers.
        if threading.current_thread() is threading.main_thread():
            handled = [number for number in SIGNALS if number != signal.SIGHUP or not _goes_on_without_terminal()]
            self._handlers = {number: signal.signal(number, self._on_signal) for number in handled}
            self._handlers[SAVE_SIGNAL] = signal.signal(SAVE_SIGNAL, self._on_save)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            # A process that ends for SIGTERM still has to say so, whatever its launcher sends on.
            is_handed_on = number in (signal.SIGTERM, signal.SIGHUP)
            ends = is_handed_on and self._signal == number.name and isinstance(error, StoppedError)
            # The launcher's copy of the same Ctrl-C must not interrupt the report of it. A notebook sends none.
            is_interrupted = number == signal.SIGINT and isinstance(error, KeyboardInterrupt) and not in_notebook()
            signal.signal(number, self._on_signal if is_interrupted else signal.SIG_IGN if ends else handler)
        self._handlers = {}

    def _on_save(self, number: int, frame: FrameType | None) -> None:
        self._save = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_terminal()
        if self._signal is None:
            self._signal, self._signalled = signal.Signals(number).name, time.monotonic()
            if number == signal.SIGINT and not self._has_begun:
                raise KeyboardInterrupt
            _acknowledge(self._signal)
        elif number == signal.SIGINT and time.monotonic() - self._signalled > SAME_REQUEST_SECONDS:
            raise KeyboardInterrupt


def _acknowledge(name: str) -> None:
    """Prints, once for all ranks, what a signal does: the step under way comes first, and may take minutes."""
    if os.environ.get("RANK", "0") != "0":
        return
    again = "; Ctrl-C once more, some seconds later, stops at once without one" if name == "SIGINT" else ""
    with contextlib.suppress(OSError):  # a signal's handler writes past Python's streams, which it may have interrupted
        os.write(2, f"\n{name}: saving a checkpoint, then stopping{again}\n".encode())


def leave_terminal() -> None:
    """Discards what is printed from now on if it went to a terminal, which is closed: writing to it fails."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        # Of a terminal that is gone, `isatty` says no: it is asked for its kind of file.
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(stream).st_mode):
                os.dup2(nowhere, stream)
    os.close(nowhere)


def _goes_on_without_terminal() -> bool:
    """Tells whether `nohup` started this process, and its launcher, if any, goes on as well."""
    # What torch's launcher handles; it ends then.
    handled = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGHUP")
    ends = "TORCHELASTIC_RUN_ID" in os.environ and "SIGHUP" in handled
    return signal.getsignal(signal.SIGHUP) is signal.SIG_IGN and not ends


def reason_of_all(mine: str | None, ranks_that_want: list[bool]) -> str | None:
    """Returns why all ranks end after this step, or None if they go on."""
    if not any(ranks_that_want):
        return None
    return mine or f"rank {ranks_that_want.index(True)} was asked to"
