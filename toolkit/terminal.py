"""The terminal: text is printed as it is, whoever wrote it.

Names of folders, rows of data and what a model writes may hold brackets, which rich takes for markup and can fail at,
and codes that move the cursor or change colours. Here none of them works.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.text import Text

PASS_SECONDS = 5.0
"""Of silence, before what takes that long says what it is and how far."""

HARMLESS = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"},  # the pictures of control codes
    0x7F: 0x2421,
    **dict.fromkeys([*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)], 0xFFFD),
}
"""Codes that would move the cursor, change colours or reverse the text after them, and what is shown instead."""


def harmless(text: str) -> str:
    """Text without codes that would work on the terminal."""
    return text.replace("\r\n", "\n").translate(HARMLESS)


def in_notebook() -> bool:
    return Console(quiet=True).is_jupyter


class Terminal(Console):
    """A console without markup; colours come by `style`. In a notebook plain text on stdout.

    Args:
        quiet: prints nothing, as on ranks other than 0.
        soft_wrap: leaves the wrapping of long lines to the terminal.
    """

    def __init__(self, stderr: bool = True, quiet: bool = False, soft_wrap: bool = True) -> None:
        # rich would make an output of the cell for every line, and in a forked rank a message that never arrives: those
        # of ipykernel, but for stdout and stderr, are for the process that it started ("attempted to send message from
        # fork").
        place: dict[str, Any] = {"stderr": stderr}
        if in_notebook():
            place = {"file": sys.stdout, "force_jupyter": False, "force_terminal": False, "color_system": None}
        super().__init__(**place, quiet=quiet, soft_wrap=soft_wrap, highlight=False, markup=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(harmless(text), **options)

    def print(self, *objects: Any, **options: Any) -> None:
        # Where it goes to a file on a full disk: a line that cannot be told is no reason to end a run.
        with contextlib.suppress(OSError):
            super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        """Nobody reads any more: a command's output ends here, and a run goes on."""
        if not self.stderr:
            super().on_broken_pipe()
        self.quiet = True

    def warn(self, message: str) -> None:
        self.print(Text.assemble(("warning:", "yellow"), " ", harmless(message)), soft_wrap=True)

    def fail(self, message: str) -> None:
        self.print(Text.assemble(("error:", "bold red"), " ", harmless(message)), soft_wrap=True)


def clock(seconds: float) -> str:
    """Hours, minutes and seconds: 1:02:03, or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_time(seconds: float) -> str:
    """Seconds since 1970 as every page and console writes a time: in UTC, whoever reads it."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


class Pass:
    """Says what takes long, and how far it is: first after five seconds, then less and less often.

    It is called with what is done. Entered as a context it also speaks where nothing calls it, as in a single call of
    a library.

    Args:
        console: quiet on ranks other than 0.
        what: the thing in words.
    """

    def __init__(self, console: Console, what: str) -> None:
        self._console = console
        self._what = what
        self._over = threading.Event()
        self._begin()

    def _begin(self) -> None:
        self._started = time.monotonic()
        self._due = PASS_SECONDS

    def __call__(self, done: int, total: int) -> None:
        taken = time.monotonic() - self._started
        if taken >= self._due and done < total:
            self._tell(f"{done}/{total}  {clock(taken / done * (total - done))} left", taken)
        if done == total:
            self._begin()

    def _tell(self, how_far: str, taken: float) -> None:
        self._due = taken + min(taken, 12 * PASS_SECONDS)
        self._console.print(f"{self._what}: {how_far}")

    def __enter__(self) -> Pass:
        self._over.clear()
        self._begin()
        if not self._console.quiet:
            threading.Thread(target=self._remind, name="pass", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()

    def _remind(self) -> None:
        """Speaks for a call that does not; in a thread that touches no device."""
        # Half a second later than a loop would speak for itself, which knows how far it is.
        while not self._over.wait(max(0.0, self._started + self._due - time.monotonic()) + PASS_SECONDS / 10):
            taken = time.monotonic() - self._started
            if taken >= self._due:
                self._tell(f"under way for {clock(taken)}", taken)
