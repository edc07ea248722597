"""Ends a rank whose launcher is gone: nobody would end it otherwise, and a restart would run beside it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from toolkit.terminal import Terminal

LOOK_SECONDS = 5.0
GRACE_SECONDS = 45.0
"""For saving the state, so that a rank is gone a minute after its launcher."""


@contextmanager
def ended_with_launcher() -> Iterator[None]:
    """While entered, this process is asked to stop, and then made to, once torch's launcher is gone.

    A process that was started otherwise may outlive its parent, as under `nohup`.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_watch, args=(os.getppid(), ended), name="launcher", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _watch(launcher: int, ended: threading.Event) -> None:
    while not ended.wait(LOOK_SECONDS):
        if os.getppid() != launcher:
            with contextlib.suppress(OSError, ValueError):  # what reads it may be gone, too
                Terminal().warn(f"the launcher (process {launcher}) is gone; its ranks save their state and end")
            # As a batch system would ask: the training loop saves and ends, anything else ends at once.
            os.kill(os.getpid(), signal.SIGTERM)
            if not ended.wait(GRACE_SECONDS):
                os._exit(1)
            return
