"""Ends a rank whose launcher is gone. Nobody else would, and a restart would run at the same time."""

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
"""The time to save a checkpoint, so that a rank ends within a minute after its launcher."""


@contextmanager
def ended_with_launcher() -> Iterator[None]:
    """Stops this process once torch's launcher is gone, inside the `with` block: first by SIGTERM, then by force.

    Does nothing without torch's launcher: such a process may outlive its parent, as under `nohup`.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_stop_without_launcher, args=(os.getppid(), ended), name="launcher", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _stop_without_launcher(launcher: int, ended: threading.Event) -> None:
    while not ended.wait(LOOK_SECONDS):
        if os.getppid() != launcher:
            with contextlib.suppress(OSError, ValueError):  # whatever reads the output may be gone too
                Terminal().warn(f"the launcher (process {launcher}) is gone; its ranks save their state and end")
            # As a batch system would ask: the training loop saves and ends, anything else ends at once.
            os.kill(os.getpid(), signal.SIGTERM)
            if not ended.wait(GRACE_SECONDS):
                os._exit(1)
            return
