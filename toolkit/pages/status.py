"""How it stands with a run that is not finished, on its page."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from toolkit.pages.page import escaped, format_seconds, write_page

STATE, HEAD_CHARACTERS = "run-state", 2000
"""Name of the field that only the report of an unfinished run has, near its beginning."""

LATE_WRITINGS, LATE_SECONDS = 4, 60
"""A running run's page is late after so many times its interval, and so many seconds more: steps take their time."""


@dataclass(frozen=True)
class Status:
    """How it stands with a run that is not finished.

    Attributes:
        state: running, stopped, failed, killed or stalled.
        seconds_left: of a running one, if it is known.
        written: when (seconds since 1970).
        every_seconds: how often the page of a running one is written, at most.
        pause_seconds: the longest time between two steps or evaluations of it, so far.
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
    """What a report says of its run: a `Status.state`; empty where the run is done; None where there is no report."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            head = file.read(HEAD_CHARACTERS)
    except OSError:
        return None
    found = re.search(f'<meta name="{STATE}" content="([^"]*)"', head)
    return found[1] if found else ""


def mark_ended(path: Path, state: str, problem: str) -> None:
    """Says in a report that its run has ended, where the report says that it runs; what else it shows stays.

    For who has seen the end that the run itself could not tell of. A page that cannot be read or written stays as it
    is.
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
            write_page(path, _HEAD.sub(lambda _: _state_head(status), text, count=1))


def status_head(status: Status | None) -> str:
    """What the head of the page has of it, which `state_of` looks for; nothing where it is finished."""
    return f"{_state_head(status)}\n" if status is not None else ""


def _state_head(status: Status) -> str:
    again = f'<meta http-equiv="refresh" content="{status.every_seconds}">' if status.state == "running" else ""
    return f'<meta name="{STATE}" content="{escaped(status.state)}">{again}'


def status_note(status: Status | None) -> str:
    """A box with what is done and what is left, or why the run ended; nothing where it is finished."""
    if status is None:
        return ""
    bar = f'<progress value="{status.step}" max="{max(1, status.num_steps)}"></progress>'
    where = f"step {status.step:,} of {status.num_steps:,}"
    written = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(status.written))
    if status.state != "running":
        lead, text = f"{status.state.capitalize()} after {where}.", f"{status.problem} Written {written}."
        kind = "stopped" if status.state == "stopped" else "failed"
        return _box(kind, "", lead, text, bar)
    left = "" if status.seconds_left is None else f", {format_seconds(status.seconds_left)} left"
    text = f"Written {written}, and again every {status.every_seconds} s while it runs; this page reloads itself."
    numbers = (("step", status.step), ("steps", status.num_steps), ("written", status.written))
    late = round(LATE_WRITINGS * max(status.every_seconds, status.pause_seconds) + LATE_SECONDS)
    data = "".join(f' data-{name}="{value}"' for name, value in (*numbers, ("late", late)))
    return _box("running", data, f"Running: {where}{left}.", text, f"{bar}<script>{SCRIPT}</script>")


def _box(kind: str, data: str, lead: str, text: str, rest: str) -> str:
    return (
        f'<section class="status {kind}" id="status"{data}><strong>{escaped(lead)}</strong> '
        f"<span>{escaped(text)}</span>{rest}</section>"
    )


_HEAD = re.compile(f'<meta name="{STATE}"[^\n]*')
_NOTE = re.compile(
    r'<section class="status running" id="status" data-step="(?P<step>\d+)" data-steps="(?P<num_steps>\d+)" '
    r'data-written="(?P<written>[\d.]+)".*?</section>',
    re.DOTALL,
)

SCRIPT = """
const note = document.getElementById("status");
function look() {
  const seconds = Date.now() / 1000 - note.dataset.written;
  if (seconds < note.dataset.late) return;
  const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60);
  const ago = hours ? hours + " h " + minutes % 60 + " min" : minutes + " min";
  note.className = "status failed";
  note.querySelector("strong").textContent = "Nothing heard for " + ago + ", since step " + note.dataset.step + ".";
  note.querySelector("span").textContent = "Written " + new Date(1000 * note.dataset.written).toLocaleString()
    + ". The run was killed, is stalled, or is in a long evaluation or save: toolkit status tells which.";
}
look();
setInterval(look, 10000);
"""
"""Says that a page is older than a run that goes on would leave it: a run that was killed cannot say so itself."""

POLICY = f"script-src 'sha256-{base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()}'"
"""Lets this script run, and no other."""

STYLE = """
.status { background: var(--tint); border: 1px solid var(--edge); border-left: 4px solid var(--chart-1); }
.status { border-radius: 12px; padding: 12px 16px; margin-top: 16px; font-size: 14px; overflow-wrap: anywhere; }
.status.failed { border-left-color: var(--bad); background: var(--bad-page); }
.status.stopped { border-left-color: var(--warn); background: var(--warn-page); }
.status progress { display: block; width: 100%; margin-top: 8px; accent-color: var(--chart-1); }
"""
