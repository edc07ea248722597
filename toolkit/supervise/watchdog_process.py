"""Runs a guard process that watches over the ranks of its host. Only it can end a stopped rank that is alone there.

The launcher waits forever for a stopped rank. The ranks of other hosts can name it, but cannot end it.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from toolkit.supervise.watchdog import GUARD, Watch


@contextmanager
def guarded(local: Path, shared: Path, limit: float, interval: float) -> Iterator[None]:
    """Runs the guard process inside the `with` block. See `Watch` for the arguments."""
    package = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    arguments = [str(os.getpid()), str(local), str(shared), str(limit), str(interval)]
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", "toolkit.supervise.watchdog_process", *arguments],
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
    )
    try:
        yield
    finally:
        process.kill()
        process.communicate()


def guard(parent: int, local: Path, shared: Path, limit: float, interval: float) -> None:
    """Watches until the rank that started this process ends, which closes this process's standard input."""
    # These signals are for the ranks, which may save a checkpoint first.
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"):
        if hasattr(signal, name):  # Windows lacks the last two
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    watch = Watch(None, GUARD, local, shared, limit, interval, None)
    # Children of the rank may also hold the other end of the pipe, and outlive it.
    while os.getppid() == parent and not select.select([sys.stdin], [], [], interval)[0]:
        watch.look(time.monotonic())


if __name__ == "__main__":
    parent, local, shared, limit, interval = sys.argv[1:]
    guard(int(parent), Path(local), Path(shared), float(limit), float(interval))
