"""Ends a rank whose launcher is gone. Nobody else would, and it would hold the output folder against a restart."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

PR_SET_PDEATHSIG = 1
"""Of Linux: the signal that this process gets when its parent ends (prctl(2)); processes that it starts do not."""


@contextmanager
def ended_with_launcher() -> Iterator[None]:
    """Has this process get SIGTERM once torch's launcher is gone, inside the `with` block, as from a batch system.

    The training loop saves and ends then, anything else ends at once. Does nothing without torch's launcher: such a
    process may outlive its parent, as under `nohup`.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or sys.platform != "linux":
        yield
        return
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        yield
    finally:
        prctl(PR_SET_PDEATHSIG, 0)
