"""Makes the ranks of a run watch over each other; see `Watch`."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from toolkit import ranks
from toolkit.errors import is_lost_peer
from toolkit.supervise.rank_status import FOLDER
from toolkit.supervise.watchdog import STALL_FILE, Watch
from toolkit.training.extensions.heartbeat import RECORD_BYTES, Heartbeat, mark_watched, read_heartbeat
from toolkit.training.phase import Phase

PREFIX = "finetune-toolkit-"
"""The prefix of the folders with records, in the folder for temporary files of each host."""

ABANDONED_SECONDS = 24 * 3600.0
"""Records of killed runs are removed if nobody has watched over them for this long."""

LONGEST_INTERVAL, SHORTEST_INTERVAL = 5.0, 0.2
"""Seconds between two looks: a twentieth of the limit, inside these bounds."""


def _keep_looking(watch: Watch, done: threading.Event) -> None:
    while not done.is_set():
        watch.look(time.monotonic())
        done.wait(watch.interval)


@contextmanager
def watched(output_dir: Path, stall_minutes: float | None) -> Iterator[Heartbeat]:
    """Watches over this rank and the others inside the `with` block. Yields the heartbeat of this rank.

    Collective at the start. A run that stalls ends with exit code 4 on all ranks.

    Args:
        output_dir: the output folder, which all ranks see.
        stall_minutes: how long a rank may make no progress. None means no limit.
    """
    limit = 60 * stall_minutes if stall_minutes is not None else float("inf")
    interval = min(LONGEST_INTERVAL, max(SHORTEST_INTERVAL, limit / 20))
    shared = output_dir / FOLDER
    token = ranks.on_first_rank(lambda: _recreate_shared(shared, output_dir / STALL_FILE))
    # On a disk of the host: memory mapped from a network file system can crash the process when the network fails.
    temporary = Path(tempfile.gettempdir())
    clear_abandoned(temporary, time.monotonic())
    local = temporary / f"{PREFIX}{token}"
    local.mkdir(mode=0o700, exist_ok=True)
    record = local / f"rank_{ranks.rank():05d}"
    memory = _map_record(record)
    beats = Heartbeat(memory)
    beats.enter_phase(Phase.START)
    mark_watched(memory, time.monotonic_ns(), os.getpid())
    ranks.gather_objects(None)  # now every rank's record exists
    watch = Watch(memory, ranks.rank(), local, shared, limit, interval, threading.get_ident())
    done = threading.Event()
    thread = threading.Thread(target=_keep_looking, args=(watch, done), name="watch", daemon=True)
    thread.start()
    try:
        yield beats
    except Exception as error:
        if is_lost_peer(error):
            for place in watch.dead_ranks():
                error.add_note(f"rank {place.rank} (process {place.pid}) has ended without an error of its own")
        raise
    finally:
        done.set()
        thread.join()
        record.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the last one out removes it
            local.rmdir()
        if ranks.rank() == 0:
            shutil.rmtree(shared, ignore_errors=True)


def _recreate_shared(shared: Path, stall_file: Path) -> str:
    """Recreates the shared folder. Returns a unique token for the folders on the hosts."""
    shutil.rmtree(shared, ignore_errors=True)
    stall_file.unlink(missing_ok=True)
    shared.mkdir()
    return uuid.uuid4().hex


def clear_abandoned(temporary: Path, now: float) -> None:
    """Removes the records of runs that were killed. `now` is in monotonic seconds."""
    for folder in temporary.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            beats = [read_heartbeat(path.read_bytes()) for path in folder.glob("rank_*")]
            if beats and all(beat and now - beat.watched_ns / 1e9 > ABANDONED_SECONDS for beat in beats):
                shutil.rmtree(folder, ignore_errors=True)


def _map_record(path: Path) -> mmap.mmap:
    # Write the bytes, do not only extend the file: touching an unallocated page on a full disk crashes the process.
    path.write_bytes(bytes(RECORD_BYTES))
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), RECORD_BYTES)
