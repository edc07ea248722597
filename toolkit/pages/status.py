"""The status of an unfinished run on its page."""

from __future__ import annotations

import html
import json
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from toolkit.pages.parts.number_text import format_seconds
from toolkit.pages.parts.page import render, script, write_page
from toolkit.terminal import format_time

STATE = "run-state"
"""Name of the field of the head that only the report of an unfinished run has: its `Status` as JSON."""

State = Literal["running", "stopped", "failed", "killed", "stalled"]

SCRIPT = "status.js"
"""Script that warns of a page older than a running run would leave it, because a killed run cannot say so itself."""

LATE_WRITINGS, LATE_SECONDS = 4, 60
"""A running run's page is late after this many times its interval plus this many seconds, because steps take time."""


@dataclass(frozen=True)
class Status:
    """The status of a run that is not finished.

    Attributes:
        seconds_left: remaining time of a running run, if it is known.
        written: time of the page (seconds since 1970).
        every_seconds: shortest interval at which the page of a running run is written.
        pause_seconds: the longest time between two of its steps or evaluations so far.
        problem: why it ended.
    """

    state: State
    step: int
    num_steps: int
    seconds_left: float | None
    written: float
    every_seconds: int
    problem: str = ""
    pause_seconds: float = 0.0


def state_of(path: Path) -> State | Literal[""] | None:
    """Returns the `Status.state` in a report, an empty text if it has none, or None without a report."""
    try:
        status = status_in(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return "" if status is None else status.state


def status_in(text: str) -> Status | None:
    """Returns the status of an unfinished run from its report's text.

    None for a finished run's, for another text, and for a report of an older version, whose head has no JSON.
    """
    head = text.partition("</head>")[0]
    value = head.partition(f'<meta name="{STATE}" content="')[2].partition('"')[0]
    try:
        return TypeAdapter(Status).validate_json(html.unescape(value))
    except ValidationError:
        return None


def mark_ended(path: Path, state: State, problem: str) -> None:
    """Changes the status in a report from running to ended; everything else stays.

    It is for processes that saw a run end that could not report it itself. A page that cannot be read or written stays
    as it is.
    """
    with suppress(OSError, ValueError):
        text = path.read_text(encoding="utf-8")
        status = status_in(text)
        if status is not None and status.state == "running":
            ended = replace(status, state=state, seconds_left=None, problem=problem)
            for element in (status_head, status_note):
                text = text.replace(element(status), element(ended), 1)
            write_page(path, text)


def status_head(status: Status) -> str:
    """Returns the elements of the page's head, of which `status_in` reads the first."""
    values = json.dumps(asdict(status), ensure_ascii=False)  # half of a surrogate pair would be no JSON for others
    return render("status_head.html.jinja", name=STATE, json=values, status=status).strip()


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
