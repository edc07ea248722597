"""One run at a time in a store: a lease as in the output folder, on stores that know neither links nor times of a file.

Rank 0 writes a small object and writes it anew every `BEAT_SECONDS`, with a number that grows. It is over when its
process is seen to be gone, or when that number stands still for `STALE_SECONDS`. No store's clock is asked. Of two that
write at the same time the last one stays: each looks again after `SETTLE_SECONDS`.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from toolkit import ranks
from toolkit.checkpoint.store import StorePath
from toolkit.errors import BadInputError, StoreError
from toolkit.supervise.lease import LEASE, STALE_SECONDS, Lease
from toolkit.terminal import Terminal

BEAT_SECONDS = 20.0
SETTLE_SECONDS = 2.0
LOOK_SECONDS = 5.0


@contextmanager
def owned_store(store: StorePath | None) -> Iterator[None]:
    """Holds a store until the block ends. Collective.

    Raises:
        BadInputError: on every rank, where another run holds it.
        StoreError: on every rank, where it cannot be read or written.
    """
    if store is None:
        yield
        return
    holder = ranks.alone_on_first_rank(lambda: _Holder(store / LEASE, acquire(store / LEASE)))
    try:
        yield
    finally:
        if holder is not None:
            holder.release()


def acquire(path: StorePath) -> Lease:
    """Writes the lease, in place of one that is over."""
    mine, seen, until = Lease(), None, 0.0
    while (found := _read(path)) is not None:
        over = found[0].is_over()
        if over is None and seen is None:
            seen, until = found, time.monotonic() + STALE_SECONDS
            Terminal().print(f"the store is held by {found[0]}; waiting to see whether it is alive")
        if over is False or (over is None and found != seen):
            raise _held(path, found[0])
        if over or time.monotonic() > until:
            break
        time.sleep(min(LOOK_SECONDS, STALE_SECONDS / 10))
    _write(path, mine, 0)
    time.sleep(SETTLE_SECONDS)
    found = _read(path)
    if found is None or found[0] != mine:
        raise _held(path, found[0] if found is not None else None)
    return mine


def _held(path: StorePath, found: Lease | None) -> BadInputError:
    return BadInputError(
        f"checkpoint.to: another run is writing to {str(path.parent)!r}: {found or 'unknown'}; wait until it is done, "
        f"end it, or choose another checkpoint.to. A run that is gone lets go within {STALE_SECONDS:.0f} s"
    )


def _read(path: StorePath) -> tuple[Lease, int] | None:
    """Who holds the store, and how often it has said so; None: nobody, or nothing that can be read."""
    try:
        values = json.loads(path.read_bytes())
        return Lease(**values["lease"]), int(values["beats"])
    except (FileNotFoundError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _write(path: StorePath, lease: Lease, beats: int) -> None:
    path.write_bytes(json.dumps({"lease": asdict(lease), "beats": beats}).encode())


class _Holder:
    """Writes the lease anew for as long as the run goes on."""

    def __init__(self, path: StorePath, lease: Lease) -> None:
        self._path = path
        self._lease = lease
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="store-lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        self._ended.set()
        # Not for ever: a store that hangs must not keep the process.
        self._thread.join(BEAT_SECONDS)
        with contextlib.suppress(StoreError):
            found = _read(self._path)
            if found is not None and found[0] == self._lease:
                self._path.unlink()

    def _beat(self) -> None:
        beats = 0
        while not self._ended.wait(BEAT_SECONDS):
            beats += 1
            with contextlib.suppress(StoreError):  # the copies tell of it
                found = _read(self._path)
                if found is not None and found[0] != self._lease:
                    # This process stood still for so long that the run was taken for dead: two would write there.
                    Terminal().fail(f"{str(self._path.parent)!r} was taken over by {found[0]}; this run ends")
                    os._exit(1)
                _write(self._path, self._lease, beats)
