"""Makes the ranks of a run watch over each other; see `Watch`."""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import shutil
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from toolkit import ranks
from toolkit.errors import StalledError, is_lost_peer
from toolkit.pages.status import mark_ended
from toolkit.paths import atomic_write
from toolkit.supervise.rank_status import (
    FOLDER,
    FROZEN_SHARE,
    REPORT,
    RankStatus,
    account,
    host_files,
    late_ranks,
    read_host,
    to_text,
    verdict,
)
from toolkit.terminal import harmless
from toolkit.training.extensions.heartbeat import RECORD_BYTES, Heartbeat, mark_watched, read_heartbeat
from toolkit.training.phase import Phase

PREFIX = "finetune-toolkit-"
"""The prefix of the folders with records, in the folder for temporary files of each host."""

LONGEST_INTERVAL, SHORTEST_INTERVAL = 5.0, 0.2

SECONDS_PER_HOST = 0.25
"""A rank reads at most four files of hosts a second, as N ranks read those of N hosts at each look."""


def interval_of(limit: float, num_hosts: int) -> float:
    """Returns the seconds between two looks: a twentieth of the limit, but 5 at most on up to twenty hosts."""
    longest = max(LONGEST_INTERVAL, SECONDS_PER_HOST * num_hosts)
    return min(longest, max(SHORTEST_INTERVAL, limit / 20))


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
    num_hosts = ranks.world_size() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    interval = interval_of(limit, num_hosts)
    shared = output_dir / FOLDER
    token = ranks.on_first_rank(lambda: _recreate_shared(shared, output_dir / STALL_FILE))
    # On a disk of the host: memory mapped from a network file system can crash the process when the network fails.
    local = Path(tempfile.gettempdir()) / f"{PREFIX}{token}"
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


def _map_record(path: Path) -> mmap.mmap:
    # Write the bytes, do not only extend the file: touching an unallocated page on a full disk crashes the process.
    path.write_bytes(bytes(RECORD_BYTES))
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), RECORD_BYTES)


# ---- Ends the run if a rank stalls, and reports which one ----

STALL_FILE = "stall.txt"

# Numbers of looks since a rank was first late. The first look writes stacks; these report, and end the remaining ranks.
LOOKS_BEFORE_TELLING = 3
LOOKS_BEFORE_LEAVING = 6


class Watch:
    """Checks all ranks at intervals, in a thread of each rank.

    Ranks of one host read each other's records in memory. Each rank writes what it read to a file in the output folder,
    which the other hosts read. So one running rank on each host is enough.

    Args:
        memory: the rank's own record.
        rank: the rank.
        local: a folder on this host, with a record for each of its ranks.
        shared: a folder that all ranks see.
        limit: the time limit in seconds; see `RankStatus.is_late`.
        interval: the seconds between looks.
        thread: the id of the training thread.
        leave: ends the process with an exit code.
    """

    def __init__(
        self,
        memory: bytearray | mmap.mmap,
        rank: int,
        local: Path,
        shared: Path,
        limit: float,
        interval: float,
        thread: int,
        leave: Callable[[int], None] = os._exit,
    ) -> None:
        self.interval = interval
        self._memory = memory
        self._rank = rank
        self._shared = shared
        self._limit = limit
        self._thread = thread
        self._leave = leave
        self._records = {int(path.name.removeprefix("rank_")): path for path in local.glob("rank_*")}
        self._host_file = shared / f"host_{min(self._records):05d}.json"
        self._others: dict[Path, tuple[int, float]] = {}
        self._looks = 0
        self._late_looks = 0
        self._looked: float | None = None
        self._awake_since: float | None = None

    def look(self, now: float) -> None:
        """Checks all ranks once, and ends the run if one is late. `now` is in monotonic seconds."""
        # If this process was suspended, the others' heartbeats look stale although they are fine.
        if self._looked is not None and now - self._looked > FROZEN_SHARE * self._limit:
            self._awake_since = now
        self._looked = now
        self._looks += 1
        mark_watched(self._memory, int(now * 1e9), os.getpid())
        here = self._local_ranks(now)
        with contextlib.suppress(OSError):  # a full disk must not end the run
            atomic_write(self._host_file, to_text(here, self._looks, time.time()))
        places = self._limit_to_awake_time(sorted([*here, *self._remote_ranks(now)], key=lambda place: place.rank), now)
        if not late_ranks(places, self._limit):
            if self._late_looks:
                with contextlib.suppress(OSError):
                    self._stack_of(self._rank).unlink(missing_ok=True)
            self._late_looks = 0
            return
        self._late_looks += 1
        if self._late_looks == 1:
            self._write_stack()
        running = [place for place in places if not place.is_frozen(self._limit)]
        tells = self._rank == min((place.rank for place in running), default=self._rank)
        if self._late_looks >= (LOOKS_BEFORE_TELLING if tells else LOOKS_BEFORE_LEAVING):
            if tells:
                self._report(places)
            self._end_ranks(here)

    def dead_ranks(self) -> list[RankStatus]:
        """Returns the ranks of this host whose processes have ended in the midst of the run."""
        return [place for place in self._local_ranks(time.monotonic()) if place.is_dead]

    def _limit_to_awake_time(self, places: list[RankStatus], now: float) -> list[RankStatus]:
        return places if self._awake_since is None else [place.at_most(now - self._awake_since) for place in places]

    def _local_ranks(self, now: float) -> list[RankStatus]:
        """Returns the ranks of this host. Those that have ended have no record any more."""
        found = []
        for rank, path in self._records.items():
            with contextlib.suppress(OSError):
                beat = read_heartbeat(path.read_bytes())
                if beat is not None:
                    seconds, silent = now - beat.at_ns / 1e9, now - beat.watched_ns / 1e9
                    process = (platform.node(), beat.pid, _state_of(beat.pid))
                    doing = (beat.phase.name.lower(), beat.step, beat.sequence)
                    found.append(RankStatus(rank, *process, *doing, seconds, silent))
        return found

    def _remote_ranks(self, now: float) -> list[RankStatus]:
        """Returns the ranks of other hosts. Measures their age by this host's clock: clocks of hosts may differ."""
        found = []
        for path in host_files(self._shared):
            host = read_host(path) if path != self._host_file else None
            if host is not None:
                count, _, places = host
                if self._others.get(path, (None, 0.0))[0] != count:
                    self._others[path] = (count, now)
                found += [place.aged(now - self._others[path][1]) for place in places]
        return found

    def _stack_of(self, rank: int) -> Path:
        return self._shared / f"rank_{rank:05d}.stack"

    def _write_stack(self) -> None:
        frame = sys._current_frames().get(self._thread)
        with contextlib.suppress(OSError):
            atomic_write(self._stack_of(self._rank), "".join(traceback.format_stack(frame)))

    def _report(self, places: list[RankStatus]) -> None:
        stacks = {}
        for place in places:
            with contextlib.suppress(OSError):
                stacks[place.rank] = self._stack_of(place.rank).read_text(encoding="utf-8")
        text = account(places, stacks, self._limit)
        with contextlib.suppress(OSError):
            atomic_write(self._shared.parent / STALL_FILE, text)
        behind = verdict(places, self._limit).replace("\n", " ")
        mark_ended(self._shared.parent / REPORT, "stalled", f"{behind} See {STALL_FILE}.")
        minutes = self._limit / 60
        print(
            f"error: the run is stalled (training.stall_minutes: {minutes:g}); nothing is saved, and "
            f"run the same command to resume from the last checkpoint\n\n{harmless(text)}",
            file=sys.stderr,
            flush=True,
        )

    def _end_ranks(self, here: list[RankStatus]) -> None:
        for place in here:
            if place.is_frozen(self._limit) and not place.is_dead and place.rank != self._rank:
                _kill_soon(place.pid)
        self._leave(StalledError.exit_code)


def _state_of(pid: int) -> str:
    """Returns Linux's letter of the process state, X if there is no such process, or empty if it is unknown."""
    try:
        # The process name, in brackets, may contain anything.
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X" if Path("/proc/self/stat").exists() else ""


def _kill_soon(pid: int) -> None:
    """Kills a process two seconds from now, when this one has ended.

    The launcher's exit code is that of the rank that ended first, and it waits half a minute for a stopped rank.
    """
    command = ["/bin/sh", "-c", f"sleep 2; kill -KILL {pid}"]
    with contextlib.suppress(OSError):
        os.posix_spawn(command[0], command, os.environ)
