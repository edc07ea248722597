"""Describes the status of each rank: its phase and step, whether it is late, and which ranks wait for which."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.paths import parse_json, read_foreign

REPORT = "report.html"
"""The report, written during a run and once more at its end."""

FOLDER = ".beats"
"""A folder in the output folder of a current run, with a file for each host and stacks of late ranks."""

WAIT = "wait"
"""The phase of a rank that waits for a disk or a store, and has seen it make progress."""

PATIENCE = {"start": 36.0, "restore": 6.0, "save": 3.0, "export": 6.0, "generate": 6.0, WAIT: 3.0}
"""How many times longer than others these phases may take, because they read, tokenise or write everything at once."""

FROZEN_SHARE = 0.5
"""A process counts as frozen if its watchdog thread has not run for this share of the limit."""

SILENT_PATIENCE = 3.0
"""How many times the limit a process may be silent in any phase. Other hosts cannot see that it is stopped, or that its
host is gone. And a call that holds the GIL may keep the watchdog thread from running."""

DEAD_SECONDS = 60.0
"""The time after which the other ranks end if a rank died and no launcher ended them. Inside a collective they do not
react to its SIGTERM."""

GONE_SECONDS = 60.0
"""A run counts as gone if all its watchdog threads have been silent for this long. Each runs every few seconds."""

STATES = {"T": "stopped (SIGSTOP)", "t": "stopped by a debugger", "D": "waits for a disk", "Z": "dead", "X": "dead"}
"""The Linux process states that explain why a rank makes no progress."""

COLUMNS = ("rank", "host", "pid", "phase", "step", "sequence", "seconds", "process")


@dataclass(frozen=True)
class RankStatus:
    """The status of a rank.

    Attributes:
        rank: the rank.
        host: the name of its host.
        pid: its process id.
        state: Linux's letter of the process state, or empty if it is not known.
        phase: the phase of the run that it is in.
        step: the current optimizer step. 0 before the first.
        sequence: the number of its last heartbeat.
        seconds: the seconds since its last heartbeat.
        silent_seconds: the seconds since its watchdog thread last ran.
    """

    rank: int
    host: str
    pid: int
    state: str
    phase: str
    step: int
    sequence: int
    seconds: float
    silent_seconds: float

    def aged(self, seconds: float) -> RankStatus:
        """Returns the same status, seen this many seconds later."""
        return replace(self, seconds=self.seconds + seconds, silent_seconds=self.silent_seconds + seconds)

    def at_most(self, seconds: float) -> RankStatus:
        """Returns the status as seen by an observer who has watched for only this long."""
        return replace(self, seconds=min(self.seconds, seconds), silent_seconds=min(self.silent_seconds, seconds))

    @property
    def is_dead(self) -> bool:
        """Returns whether the process has ended."""
        return self.state in ("X", "Z")

    def is_frozen(self, limit: float) -> bool:
        """Returns whether the process is dead, or its watchdog thread has been silent for too long."""
        return self.is_dead or self.silent_seconds > FROZEN_SHARE * limit

    def is_late(self, limit: float, is_excused: bool = False) -> bool:
        """Returns whether it died, is stopped or silent for too long, or takes longer than its phase may take.

        Args:
            limit: seconds.
            is_excused: whether a phase may take any time, because another rank waits for a disk.
        """
        if self.is_dead:
            return self.silent_seconds > min(limit, DEAD_SECONDS)
        if self.silent_seconds > SILENT_PATIENCE * limit:
            return True
        patience = PATIENCE.get(self.phase, 1.0)
        stands = self.seconds > patience * limit and not is_excused
        return stands or (self.state in ("T", "t") and self.silent_seconds > limit)

    @property
    def where(self) -> str:
        """Returns the phase and the step in words."""
        return self.phase + (f" of step {self.step}" if self.step else "")

    @property
    def process(self) -> str:
        """Returns the state of the process in words."""
        return STATES.get(self.state, "runs" if self.state else "")


def late_ranks(places: Sequence[RankStatus], limit: float) -> list[RankStatus]:
    """Returns the ranks that hold up the run. While one waits for a slow disk or store, the others may wait for it."""
    waits = any(place.phase == WAIT and not place.is_late(limit) and not place.is_frozen(limit) for place in places)
    return [place for place in places if place.is_late(limit, waits)]


def behind(places: Sequence[RankStatus], limit: float) -> list[RankStatus]:
    """Returns the ranks that the others wait for: the frozen ones, or else those with the fewest heartbeats.

    Returns an empty list if all are equally far.
    """
    frozen = [place for place in places if place.is_frozen(limit) and place.is_late(limit)]
    if frozen:
        return frozen
    fewest = min((place.sequence for place in places), default=0)
    last = [place for place in places if place.sequence == fewest]
    return last if len(last) < len(places) else []


def verdict(places: Sequence[RankStatus], limit: float) -> str:
    """Says in sentences which ranks wait for which."""
    held = behind(places, limit)
    if not held:
        return (
            "All ranks are at the same place: none is behind. Look at the stacks, the network and the devices."
            if len(places) > 1
            else "The only rank does not move. Look at its stack."
        )
    lines = [
        f"Rank {place.rank} on {place.host} (pid {place.pid}) is behind: {place.where}, for {place.seconds:.0f} s"
        f"{_process_problem(place, limit)}."
        for place in held
    ]
    waiting = [str(place.rank) for place in places if place not in held]
    if waiting:
        noun, verb = ("Rank", "waits") if len(waiting) == 1 else ("Ranks", "wait")
        lines.append(f"{noun} {', '.join(waiting)} {verb} for {'it' if len(held) == 1 else 'them'}.")
    return "\n".join(lines)


def _process_problem(place: RankStatus, limit: float) -> str:
    if place.state in STATES:
        return f"; its process is {place.process}" if place.state != "D" else "; its process waits for a disk"
    return "; its process does not answer" if place.is_frozen(limit) else ""


def cells(places: Sequence[RankStatus]) -> list[list[str]]:
    """Returns a row of `COLUMNS` for each rank."""
    return [
        [
            str(place.rank),
            place.host,
            str(place.pid),
            place.phase,
            str(place.step or ""),
            str(place.sequence),
            f"{place.seconds:.1f}",
            place.process,
        ]
        for place in places
    ]


def account(places: Sequence[RankStatus], stacks: dict[int, str], limit: float) -> str:
    """Returns plain text with the table of ranks, which ranks wait for which, and their stacks."""
    rows = [list(COLUMNS), *cells(places)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    parts = ["\n".join(table), verdict(places, limit)]
    for place in places:
        stack = stacks.get(place.rank)
        parts.append(f"Stack of rank {place.rank}" + (f":\n{stack.rstrip()}" if stack else ": none, it did not run."))
    return "\n\n".join(parts) + "\n"


def to_text(places: Sequence[RankStatus], count: int, written: float) -> str:
    """Returns the content of a host's file.

    Args:
        places: the status of the host's ranks.
        count: a number that grows with every write.
        written: the time of writing in seconds since 1970.
    """
    return json.dumps({"count": count, "written": written, "ranks": [asdict(place) for place in places]})


def read_host(path: Path) -> tuple[int, float, list[RankStatus]] | None:
    """Reads the count, the time of writing and the ranks from a host's file. Returns None if it cannot be read."""
    try:
        found: dict[str, Any] = parse_json(read_foreign(path))
        return found["count"], float(found["written"]), [RankStatus(**place) for place in found["ranks"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def host_files(folder: Path) -> list[Path]:
    """Returns the files of all hosts in this folder. Empty if it cannot be listed: a run that ends removes it."""
    try:
        return sorted(folder.glob("host_*.json"))
    except OSError:
        return []


def read_statuses(run: Path, now: float) -> list[RankStatus]:
    """Returns the status of each rank of a current run, in rank order, or an empty list if nothing runs.

    Args:
        run: the output folder.
        now: the time in seconds since 1970.
    """
    found = []
    for path in host_files(run / FOLDER):
        host = read_host(path)
        if host is not None:
            _, written, places = host
            found += [place.aged(max(0.0, now - written)) for place in places]
    return sorted(found, key=lambda place: place.rank)
