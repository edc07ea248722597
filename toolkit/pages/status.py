"""How it stands with a run that is not finished, on its page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from toolkit.pages.page import escaped, format_seconds

STATE, HEAD_CHARACTERS = "run-state", 2000
"""Name of the field that only the report of an unfinished run has, near its beginning."""


@dataclass(frozen=True)
class Status:
    """How it stands with a run that is not finished.

    Attributes:
        state: running, stopped or failed.
        seconds_left: of a running one, if it is known.
        written: when, for people.
        every_seconds: how often the page of a running one is written.
        problem: why it ended.
    """

    state: str
    step: int
    num_steps: int
    seconds_left: float | None
    written: str
    every_seconds: int
    problem: str = ""


def is_finished(path: Path) -> bool:
    """Whether a report is there, and is that of a run that is done."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return f'<meta name="{STATE}"' not in file.read(HEAD_CHARACTERS)
    except OSError:
        return False


def status_head(status: Status | None) -> str:
    """What the head of the page has of it, which `is_finished` looks for; nothing where it is finished."""
    if status is None:
        return ""
    again = f'<meta http-equiv="refresh" content="{status.every_seconds}">' if status.state == "running" else ""
    return f'<meta name="{STATE}" content="{escaped(status.state)}">{again}\n'


def status_note(status: Status | None) -> str:
    """A box with what is done and what is left, or why the run ended; nothing where it is finished."""
    if status is None:
        return ""
    bar = f'<progress value="{status.step}" max="{max(1, status.num_steps)}"></progress>'
    where = f"step {status.step:,} of {status.num_steps:,}"
    if status.state != "running":
        lead, text = f"{status.state.capitalize()} after {where}.", f" {status.problem} Written {status.written}."
        return f'<section class="status {status.state}"><strong>{lead}</strong>{escaped(text)}{bar}</section>'
    left = "" if status.seconds_left is None else f", {format_seconds(status.seconds_left)} left"
    text = (
        f" Written {status.written}, and again every {status.every_seconds} s while it runs; this page reloads itself. "
        "Where that time is long past, the run was killed."
    )
    return f'<section class="status running"><strong>Running: {where}{left}.</strong>{escaped(text)}{bar}</section>'


STYLE = """
.status { background: var(--tint); border: 1px solid var(--edge); border-left: 4px solid var(--chart-1); }
.status { border-radius: 12px; padding: 12px 16px; margin-top: 16px; font-size: 14px; }
.status.failed { border-left-color: var(--bad); background: var(--bad-page); }
.status.stopped { border-left-color: var(--warn); background: var(--warn-page); }
.status progress { display: block; width: 100%; margin-top: 8px; accent-color: var(--chart-1); }
"""
