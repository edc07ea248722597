"""Faults that a run may meet, each done to an attempt of it that is under way."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from support.stand_in import NUM_RANKS, Attempt, attempt
from support.two_hosts import Host
from toolkit.checkpoint import list_checkpoints
from toolkit.checkpoint.manifest import look_at
from toolkit.run.folder.finished import is_finished
from toolkit.supervise.lock import LOCK

LIMIT_SECONDS = 120.0
"""Within which whatever a fault ends has ended. A launcher that is gone takes a minute, by promise."""

DISK_MIB = 48

CLOCKS = (-4e7, -3600.0, 3600.0, 4e7, 4e8)
"""Seconds by which a clock is wrong."""


@dataclass
class Site:
    """Where a fault happens.

    Attributes:
        folder: the run's output folder.
        has_disk: whether that is a small file system of its own.
        damaged: names of checkpoints that were damaged, and whether the run's next start has to set them aside: not if
            the run was done, nor if the mark is gone or empty, as an interrupted save leaves it, which is cleared away.
        excused: exit codes of a rank that the faults of this attempt may lead to, though it could have gone on.
    """

    attempt: Attempt
    arguments: list[str]
    folder: Path
    log: Path
    clock: Path
    hosts: list[Host]
    has_disk: bool
    chance: random.Random
    damaged: dict[str, bool] = field(default_factory=dict)
    excused: set[int] = field(default_factory=set)

    def end(self) -> str:
        """Waits until all is over, and says how the ranks ended."""
        if not self.attempt.wait(LIMIT_SECONDS):
            self.attempt.tell_where()
            raise AssertionError(f"ranks are left after {LIMIT_SECONDS:.0f} s")
        return " ".join(map(str, self.attempt.codes)) or "ended"

    def is_training(self) -> bool:
        """Whether this attempt has done a step."""
        file = self.folder / "metrics.jsonl"
        return file.exists() and (self.folder / ".beats").exists() and self._is_new(file)

    def is_watched(self) -> bool:
        """Whether every host watches over its ranks, and tells the others."""
        found = sum(map(self._is_new, (self.folder / ".beats").glob("host_*.json")))
        return found == len(self.attempt.launchers)

    def _is_new(self, file: Path) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return time.time() - file.stat().st_mtime < time.monotonic() - self.attempt.started
        return False

    def until(self, condition: Callable[[], bool]) -> bool:
        """Waits for it; whether it came before the attempt was over."""
        while not condition():
            if self.attempt.wait(0.01):
                return False
        return True

    def kill_a_rank(self) -> int:
        victim = self.chance.randrange(NUM_RANKS)
        if self.until(lambda: bool(self.attempt.ranks)):
            _send(self.attempt.ranks[victim], signal.SIGKILL)
        return victim


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def rank_killed(site: Site) -> str:
    site.kill_a_rank()
    return site.end()


def launcher_killed(site: Site) -> str:
    for launcher in site.attempt.launchers:
        launcher.kill()
    return site.end()


def asked_to_stop(site: Site) -> str:
    if not site.until(lambda: bool(site.attempt.ranks)):
        return site.end()
    for launcher in site.attempt.launchers:
        _send(launcher.pid, signal.SIGTERM)
    return site.end()


def rank_stopped(site: Site) -> str:
    if not site.until(site.is_watched):
        return site.end()
    victim = site.chance.randrange(NUM_RANKS)
    _send(site.attempt.ranks[victim], signal.SIGSTOP)
    return site.end()


def rank_stopped_for_a_while(site: Site) -> str | None:
    if site.until(site.is_watched):
        victim = site.attempt.ranks[site.chance.randrange(NUM_RANKS)]
        _send(victim, signal.SIGSTOP)
        time.sleep(site.chance.uniform(0.1, 2.0))
        _send(victim, signal.SIGCONT)
    return None


def disk_full_for_a_while(site: Site) -> str | None:
    with full(site):
        time.sleep(site.chance.uniform(0.2, 3.0))
    return None


def disk_full_and_rank_killed(site: Site) -> str:
    with full(site):
        time.sleep(site.chance.uniform(0.0, 1.5))
        site.kill_a_rank()
        return site.end()


def disk_read_only_for_a_while(site: Site) -> str | None:
    # Refused while a file is open for writing.
    while subprocess.run(["mount", "-o", "remount,ro", site.folder], capture_output=True).returncode:
        if site.attempt.wait(0.005):
            return site.end()
    try:
        site.excused |= {1, 2}
        time.sleep(site.chance.uniform(0.2, 3.0))
    finally:
        subprocess.run(["mount", "-o", "remount,rw", site.folder], check=True, capture_output=True)
    return None


def network_cut(site: Site) -> str:
    if site.until(site.is_training):
        site.hosts[0].cable("down")
    try:
        return site.end()
    finally:
        site.hosts[0].cable("up")


def network_cut_for_a_while(site: Site) -> str | None:
    site.hosts[1].cable("down")
    time.sleep(site.chance.uniform(0.1, 1.5))
    site.hosts[1].cable("up")
    return None


def clock_moved(site: Site) -> str:
    moved = site.chance.choice(CLOCKS)
    with site.clock.open("r+b") as file:  # its length stays, as the ranks have mapped it
        file.write(struct.pack("d", moved))
    site.attempt.wait(site.chance.uniform(0.0, 1.0))
    return rank_killed(site)


def newest_checkpoint_damaged(site: Site) -> str:
    ended = rank_killed(site)
    whole = [found.folder for found in list_checkpoints(site.folder) if found.problem is None]
    if len(whole) < 2:
        return f"{ended}, too early"
    damage(whole[-1], site.chance)
    # Rank 0 may have said that the run is done just before another rank was killed.
    site.damaged[whole[-1].name] = not is_finished(site.folder) and not look_at(whole[-1]).unfinished
    return ended


def started_twice(site: Site) -> str | None:
    if not site.until(lambda: (site.folder / LOCK).exists()):
        return site.end()
    with attempt(site.arguments, site.log, site.hosts, site.clock) as second:
        assert second.wait(LIMIT_SECONDS), "the second start hangs"
        # 0: the first had just done its last step. The launcher ends a rank that is slower to say no.
        codes = set(second.codes)
        assert codes == {0} or (2 in codes and codes <= {2, -signal.SIGTERM}), f"a second start ended with {codes}"
    return None


KINDS: dict[str, tuple[Callable[[Site], str | None], int]] = {
    "rank killed": (rank_killed, 10),
    "launcher killed": (launcher_killed, 3),
    "SIGTERM": (asked_to_stop, 4),
    "rank stopped": (rank_stopped, 4),
    "rank stopped for a while": (rank_stopped_for_a_while, 2),
    "disk full for a while": (disk_full_for_a_while, 4),
    "disk full, rank killed": (disk_full_and_rank_killed, 4),
    "disk read-only for a while": (disk_read_only_for_a_while, 2),
    "network cut": (network_cut, 8),
    "network cut for a while": (network_cut_for_a_while, 4),
    "clock moved, rank killed": (clock_moved, 4),
    "newest checkpoint damaged": (newest_checkpoint_damaged, 5),
    "started twice": (started_twice, 3),
}
"""What is done, and how often beside the others. What returns None leaves the attempt under way."""


def possible(site: Site) -> dict[str, int]:
    """Weights of the kinds that can happen there."""
    left_out = set() if site.has_disk else {kind for kind in KINDS if kind.startswith("disk")}
    left_out |= set() if site.hosts else {kind for kind in KINDS if kind.startswith("network")}
    return {kind: weight for kind, (_, weight) in KINDS.items() if kind not in left_out}


@contextmanager
def full(site: Site) -> Iterator[None]:
    """Nothing more can be written to the run's file system."""
    site.excused |= {1, 2}
    ballast = site.folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (2**20, 2**12, 1):
            with contextlib.suppress(OSError):  # it is full
                while file.write(bytes(size)) == size:
                    pass
    try:
        yield
    finally:
        ballast.unlink()


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A small file system in that folder; False where the system does not mount one."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def damage(checkpoint: Path, chance: random.Random) -> None:
    """Flips a byte of one of its files, cuts it off, or removes it."""
    file = chance.choice(sorted(path for path in checkpoint.iterdir() if path.is_file()))
    content = bytearray(file.read_bytes())
    kind = chance.choice(["flip", "cut", "remove"])
    if kind == "remove" or not content:
        file.unlink()
    elif kind == "cut":
        file.write_bytes(content[: chance.randrange(len(content))])
    else:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        file.write_bytes(content)
