"""Where the ranks of a run are, which of them is late, and who waits for whom."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

REPORT = "report.html"
"""Written while a run goes on, and once more at its end."""

FOLDER = ".beats"
"""In the output folder of a run that is under way: a file for each host, and stacks of ranks that are late."""

PATIENCE = {"start": 36.0, "restore": 6.0, "save": 3.0, "export": 6.0}
"""How many times longer than others these phases may take: they read, tokenise or write everything at once."""

FROZEN_SHARE = 0.5
"""A process whose watching thread has not run for this share of the limit is frozen."""

SILENT_PATIENCE = 3.0
"""How many times the limit a process may be silent in any phase. On another host nobody sees that it is stopped, or
that the host is gone; a call that lets no other thread run may keep the watching one from its turn."""

DEAD_SECONDS = 60.0
"""The others end then, if a launcher has not ended them: inside a collective they do not hear its SIGTERM."""

GONE_SECONDS = 60.0
"""A run whose watching threads have all been silent for so long is gone: each of them runs every few seconds."""

STATES = {"T": "stopped (SIGSTOP)", "t": "stopped by a debugger", "D": "waits for a disk", "Z": "dead", "X": "dead"}
"""Process states of Linux that say why a rank does not go on."""

COLUMNS = ("rank", "host", "pid", "phase", "step", "sequence", "seconds", "process")


@dataclass(frozen=True)
class RankStatus:
    """Where a rank is.

    Attributes:
        state: Linux's letter of the process state; empty if it is not known.
        step: the optimizer step under way; 0 before the first.
        sequence: of its last beat.
        seconds: since its last beat.
        silent_seconds: since its watching thread last ran.
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

    @property
    def is_stopped(self) -> bool:
        return self.state in ("T", "t")

    def aged(self, seconds: float) -> RankStatus:
        """The same, seen later."""
        return replace(self, seconds=self.seconds + seconds, silent_seconds=self.silent_seconds + seconds)

    def at_most(self, seconds: float) -> RankStatus:
        """The same for somebody who has looked on for this long only."""
        return replace(self, seconds=min(self.seconds, seconds), silent_seconds=min(self.silent_seconds, seconds))

    @property
    def is_dead(self) -> bool:
        return self.state in ("X", "Z")

    def is_frozen(self, limit: float) -> bool:
        return self.is_dead or self.silent_seconds > FROZEN_SHARE * limit

    def is_late(self, limit: float) -> bool:
        """Whether it stands still for longer than its phase may take, is stopped or silent for too long, or died."""
        if self.is_dead:
            return self.silent_seconds > min(limit, DEAD_SECONDS)
        if self.silent_seconds > SILENT_PATIENCE * limit:
            return True
        patience = PATIENCE.get(self.phase, 1.0)
        return self.seconds > patience * limit or (self.is_stopped and self.silent_seconds > limit)

    @property
    def where(self) -> str:
        return self.phase + (f" of step {self.step}" if self.step else "")

    @property
    def process(self) -> str:
        return STATES.get(self.state, "runs" if self.state else "")


def behind(places: Sequence[RankStatus], limit: float) -> list[RankStatus]:
    """The ranks that the others wait for: those that are frozen, or else those with the fewest beats.

    Empty where all are equally far.
    """
    frozen = [place for place in places if place.is_frozen(limit) and place.is_late(limit)]
    if frozen:
        return frozen
    fewest = min((place.sequence for place in places), default=0)
    last = [place for place in places if place.sequence == fewest]
    return last if len(last) < len(places) else []


def verdict(places: Sequence[RankStatus], limit: float) -> str:
    """Who waits for whom, in sentences."""
    held = behind(places, limit)
    if not held:
        return (
            "All ranks stand at the same place: none is behind. Look at the stacks, the network and the devices."
            if len(places) > 1
            else "The only rank stands still. Look at its stack."
        )
    lines = [
        f"Rank {place.rank} on {place.host} (pid {place.pid}) is behind: {place.where}, for {place.seconds:.0f} s"
        f"{_why(place, limit)}."
        for place in held
    ]
    waiting = [str(place.rank) for place in places if place not in held]
    if waiting:
        noun, verb = ("Rank", "waits") if len(waiting) == 1 else ("Ranks", "wait")
        lines.append(f"{noun} {', '.join(waiting)} {verb} for {'it' if len(held) == 1 else 'them'}.")
    return "\n".join(lines)


def _why(place: RankStatus, limit: float) -> str:
    if place.state in STATES:
        return f"; its process is {place.process}" if place.state != "D" else "; its process waits for a disk"
    return "; its process does not answer" if place.is_frozen(limit) else ""


def cells(places: Sequence[RankStatus]) -> list[list[str]]:
    """A row of `COLUMNS` for each rank."""
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
    """The table, who waits for whom, and the stacks of ranks that wrote one; plain text."""
    rows = [list(COLUMNS), *cells(places)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    parts = ["\n".join(table), verdict(places, limit)]
    for place in places:
        stack = stacks.get(place.rank)
        parts.append(f"Stack of rank {place.rank}" + (f":\n{stack.rstrip()}" if stack else ": none, it did not run."))
    return "\n\n".join(parts) + "\n"


def to_text(places: Sequence[RankStatus], count: int, written: float) -> str:
    """A host's file. `count` grows with every writing; `written` is in seconds since 1970."""
    return json.dumps({"count": count, "written": written, "ranks": [asdict(place) for place in places]})


def read_host(path: Path) -> tuple[int, float, list[RankStatus]] | None:
    """Count, time of writing and ranks of a host's file; None if it cannot be read."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return int(found["count"]), float(found["written"]), [RankStatus(**place) for place in found["ranks"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def host_files(folder: Path) -> list[Path]:
    """The files of all hosts in this folder; none where it cannot be listed, as when a run that ends removes it."""
    try:
        return sorted(folder.glob("host_*.json"))
    except OSError:
        return []


def read_statuses(run: Path, now: float) -> list[RankStatus]:
    """Where the ranks of a run are that is under way, by rank; `now` is in seconds since 1970. Empty: none is."""
    found = []
    for path in host_files(run / FOLDER):
        host = read_host(path)
        if host is not None:
            _, written, places = host
            found += [place.aged(max(0.0, now - written)) for place in places]
    return sorted(found, key=lambda place: place.rank)
