"""Signals that reach a command or a rank before a run has handlers of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT
"""Exit code after Ctrl-C if there is no state to save, as shells have it."""


def is_forked() -> bool:
    """Tells whether this process was forked from one that has imported what a run needs, as `toolkit train` does."""
    return multiprocessing.parent_process() is not None


LEAVE_SECONDS = 2.0


def leave_launcher() -> None:
    """Ends a forked rank that is done by `LEAVE_SECONDS` from now, also if its launcher does not let it go.

    Such a rank hands a value to torch's launcher, and waits for its leave. A launcher that a signal has asked to end
    waits for the ranks instead, for `SECONDS_TO_SAVE`. torch ends a rank with exit code 0 at a KeyboardInterrupt.
    """
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, LEAVE_SECONDS)


def ignore_save_requests() -> None:
    """Makes a request for a checkpoint (SIGUSR1) not end a process that still starts up. A run has its own handler."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def end_at_interrupts() -> None:
    """Makes Ctrl-C end the process at once during an import, and raise KeyboardInterrupt otherwise.

    An exception inside an import may come out as another one, or count as a missing package: transformers tries
    imports, and goes on. A run that trains has its own handler, which saves the state.
    """
    # Not if it is ignored, as under `nohup`.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_interrupt)


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_globals.get("__name__") == "importlib._bootstrap":
            if os.environ.get("RANK", "0") == "0":
                os.write(2, b"stopped by Ctrl-C\n")
            os._exit(INTERRUPTED)  # nothing is open yet that would have to be closed
        frame = frame.f_back
    signal.default_int_handler(number, frame)
