"""The status of an unfinished run on its page."""

from __future__ import annotations

import html
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from toolkit.pages.parts.number_text import format_seconds
from toolkit.pages.parts.page import render, script, write_page
from toolkit.terminal import format_time

STATE, HEAD_CHARACTERS = "run-state", 2000
"""Name of the field that only the report of an unfinished run has, near its beginning."""

ENDINGS = ("stopped", "failed", "killed", "stalled")
"""The states of a run that ended early."""

SCRIPT = "status.js"
"""Script that warns of a page older than a running run would leave it, because a killed run cannot say so itself."""

LATE_WRITINGS, LATE_SECONDS = 4, 60
"""A running run's page is late after this many times its interval plus this many seconds, because steps take time."""


@dataclass(frozen=True)
class Status:
    """The status of a run that is not finished.

    Attributes:
        state: running, stopped, failed, killed or stalled.
        seconds_left: remaining time of a running run, if it is known.
        written: time of the page (seconds since 1970).
        every_seconds: shortest interval at which the page of a running run is written.
        pause_seconds: the longest time between two of its steps or evaluations so far.
        problem: why it ended.
    """

    state: str
    step: int
    num_steps: int
    seconds_left: float | None
    written: float
    every_seconds: int
    problem: str = ""
    pause_seconds: float = 0.0


def state_of(path: Path) -> str | None:
    """Returns the `Status.state` in a report, an empty text if the run is finished, or None without a report."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return state_in(file.read(HEAD_CHARACTERS))
    except OSError:
        return None


def state_in(text: str) -> str:
    """Returns the `Status.state` in a report's text, or an empty text if the run is finished."""
    found = re.search(f'<meta name="{STATE}" content="([^"]*)"', text[:HEAD_CHARACTERS])
    return found[1] if found else ""


def status_in(text: str) -> Status | None:
    """Returns the status of an unfinished run from its report's text; None for a finished run's, or another text.

    The report of a run that ended early has neither the time of writing nor the time left.
    """
    found, state = _TOLD.search(text), state_in(text)
    if found is None or (state not in ENDINGS and state != "running"):
        return None
    step, num_steps = (int(found[name].replace(",", "")) for name in ("step", "num_steps"))
    left = _LEFT.search(found["attributes"])
    problem = html.unescape(found["problem"] or "").strip()
    return Status(state, step, num_steps, float(left[1]) if left else None, 0.0, 0, problem)


def mark_ended(path: Path, state: str, problem: str) -> None:
    """Changes the status in a report from running to ended; everything else stays.

    It is for processes that saw a run end that could not report it itself. A page that cannot be read or written stays
    as it is.
    """
    if state_of(path) != "running":
        return
    with suppress(OSError, ValueError):
        text = path.read_text(encoding="utf-8")
        found = _NOTE.search(text)
        if found is not None:
            step, num_steps, written = int(found["step"]), int(found["num_steps"]), float(found["written"])
            status = Status(state, step, num_steps, None, written, 0, problem)
            text = _NOTE.sub(lambda _: status_note(status), text, count=1)
            write_page(path, _HEAD.sub(lambda _: status_head(status), text, count=1))


def status_head(status: Status) -> str:
    """Returns the elements of the page's head that `state_of` looks for."""
    return render("status_head.html.jinja", name=STATE, status=status).strip()


def status_note(status: Status) -> str:
    """Returns a box with the progress and the time left, or why the run ended."""
    left = "" if status.seconds_left is None else format_seconds(status.seconds_left)
    late = round(LATE_WRITINGS * max(status.every_seconds, status.pause_seconds) + LATE_SECONDS)
    return render(
        "status.html.jinja",
        status=status,
        left=left,
        late=late,
        written=format_time(status.written),
        script=script(SCRIPT),
    ).strip()


_TOLD = re.compile(
    r'<section class="status (?P<attributes>[^>]*)>\s*'
    r"<strong>[^<]*step (?P<step>\d[\d,]{0,20}) of (?P<num_steps>\d[\d,]{0,20})[^<]*</strong>"
    r"(?: <span>(?P<problem>[^<]*)Written )?"
)
_LEFT = re.compile(r'data-left="(\d{1,15}(?:\.\d{1,15})?)"')
_HEAD = re.compile(f'<meta name="{STATE}"[^\n]*')
_NOTE = re.compile(
    r'<section class="status running" id="status" data-step="(?P<step>\d+)" data-steps="(?P<num_steps>\d+)" '
    r'data-written="(?P<written>[\d.]+)".*?</section>',
    re.DOTALL,
)
