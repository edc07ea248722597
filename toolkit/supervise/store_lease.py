"""Allows one run at a time in a store, by a lease like that of the output folder. Stores have no links or file times.

Rank 0 writes a small object and rewrites it every `BEAT_SECONDS` with a growing number. The lease is over if its
process is seen to be gone, or if the number has not changed for `STALE_SECONDS`. The store's clock is never used. If
two runs write at the same time, the last one wins: each reads the object again after `SETTLE_SECONDS`.
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
    """Holds a store until the `with` block ends. Does nothing without a store. Collective.

    Raises:
        BadInputError: on every rank, if another run holds it.
        StoreError: on every rank, if it cannot be read or written.
    """
    if store is None:
        yield
        return
    holder = ranks.alone_on_first_rank(lambda: _LeaseKeeper(store / LEASE, acquire(store / LEASE)))
    try:
        yield
    finally:
        if holder is not None:
            holder.release()


def acquire(path: StorePath) -> Lease:
    """Writes the lease, replacing one that is over. Waits up to `STALE_SECONDS` if it is not clear whether it is.

    Raises:
        BadInputError: if another run holds the store.
        StoreError: if the store cannot be read or written.
    """
    mine, seen, until = Lease(), None, 0.0
    while (found := _read_object(path)) is not None:
        over = found[0].is_over()
        if over is None and seen is None:
            seen, until = found, time.monotonic() + STALE_SECONDS
            Terminal().print(f"the store is held by {found[0]}; waiting to see whether it is alive")
        if over is False or (over is None and found != seen):
            raise _held_error(path, found[0])
        if over or time.monotonic() > until:
            break
        time.sleep(min(LOOK_SECONDS, STALE_SECONDS / 10))
    _write_object(path, mine, 0)
    time.sleep(SETTLE_SECONDS)
    found = _read_object(path)
    if found is None or found[0] != mine:
        raise _held_error(path, found[0] if found is not None else None)
    return mine


def _held_error(path: StorePath, found: Lease | None) -> BadInputError:
    return BadInputError(
        f"checkpoint.to: another run is writing to {str(path.parent)!r}: {found or 'unknown'}; wait until it is done, "
        f"end it, or choose another checkpoint.to. A run that is gone lets go within {STALE_SECONDS:.0f} s"
    )


def _read_object(path: StorePath) -> tuple[Lease, int] | None:
    """Returns the lease and its number of heartbeats, or None if there is none or it is not readable."""
    try:
        values = json.loads(path.read_bytes())
        return Lease(**values["lease"]), int(values["beats"])
    except (FileNotFoundError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _write_object(path: StorePath, lease: Lease, beats: int) -> None:
    path.write_bytes(json.dumps({"lease": asdict(lease), "beats": beats}).encode())


class _LeaseKeeper:
    """Rewrites the lease while the run goes on, in a thread."""

    def __init__(self, path: StorePath, lease: Lease) -> None:
        self._path = path
        self._lease = lease
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_alive, name="store-lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Ends the thread and removes the lease."""
        self._ended.set()
        # With a limit: a store that hangs must not keep the process.
        self._thread.join(BEAT_SECONDS)
        with contextlib.suppress(StoreError):
            found = _read_object(self._path)
            if found is not None and found[0] == self._lease:
                self._path.unlink()

    def _keep_alive(self) -> None:
        beats = 0
        while not self._ended.wait(BEAT_SECONDS):
            beats += 1
            with contextlib.suppress(StoreError):  # the uploads report it
                found = _read_object(self._path)
                if found is not None and found[0] != self._lease:
                    # This process stood still for so long that another run took it for dead: both would write there.
                    Terminal().fail(f"{str(self._path.parent)!r} was taken over by {found[0]}; this run ends")
                    os._exit(1)
                _write_object(self._path, self._lease, beats)
