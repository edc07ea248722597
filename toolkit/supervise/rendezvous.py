"""Limits the time for process-group initialisation."""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from toolkit.errors import StalledError

SHORTEST_SECONDS = 60.0
"""The shortest time limit, even if `stall_minutes` is less: hosts need not start their ranks at the same time."""


@contextmanager
def timed_rendezvous(stall_minutes: float | None) -> Iterator[None]:
    """Limits how long this rank waits for the others inside the `with` block. Then it ends with exit code 4.

    torch would wait half an hour for a rank that ended before the rendezvous was complete.
    """
    if stall_minutes is None or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    seconds = max(60 * stall_minutes, SHORTEST_SECONDS)
    timer = threading.Timer(seconds, _give_up, [seconds])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _give_up(seconds: float) -> None:
    rank, num_ranks = os.environ.get("RANK", "0"), os.environ["WORLD_SIZE"]
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    print(
        f"error: rank {rank} on {platform.node()} has waited {seconds:.0f} s for all {num_ranks} ranks to meet at "
        f"{place} (training.stall_minutes, and a minute at least). A rank ended or did not start, or this host does "
        "not reach that address. Nothing has been done yet: start all hosts again",
        file=sys.stderr,
        flush=True,
    )
    os._exit(StalledError.exit_code)
