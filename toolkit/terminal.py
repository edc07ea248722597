"""Prints to the terminal without interpreting text from outside.

Folder names, data rows and generated text may contain brackets, which rich would take for markup and can fail on. They
may also contain codes that move the cursor or change colours. Here none of them has an effect.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, ClassVar

from rich.console import Console
from rich.text import Text

PASS_SECONDS = 5.0
"""Seconds of silence before a long action says what it is and how far it is."""

HARMLESS = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"},  # images of control codes
    0x7F: 0x2421,
    **dict.fromkeys([*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)], 0xFFFD),
}
"""Maps codes that would move the cursor, change colours or reverse text to what is shown instead."""


def one_line(text: str) -> str:
    """Returns text with a space at each place where `str.splitlines`, YAML or a shell may begin a new line."""
    return " ".join(text.splitlines())


def harmless(text: str) -> str:
    """Returns text without codes that would have an effect on the terminal."""
    return text.replace("\r\n", "\n").translate(HARMLESS)


@contextlib.contextmanager
def stdout_on_stderr() -> Iterator[None]:
    """While entered, what writes to stdout (file descriptor 1), such as a child process, writes to stderr.

    stdout is for the JSON of a command alone.
    """
    _flush_stdout()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        _flush_stdout()
        os.dup2(stdout, 1)
        os.close(stdout)


def _flush_stdout() -> None:
    for stream in (sys.stdout, sys.__stdout__):
        if stream is not None and not stream.closed:
            stream.flush()


def in_notebook() -> bool:
    """Returns whether this process runs in a notebook."""
    return Console(quiet=True).is_jupyter


class Terminal(Console):
    """A console without markup; colours come from `style`. In a notebook it prints plain text to stdout.

    Args:
        stderr: whether to print to stderr instead of stdout.
        quiet: whether to print nothing, as on ranks other than 0.
        soft_wrap: whether to leave the wrapping of long lines to the terminal.

    Attributes:
        with_bar: the console of the bar below what this process prints to stderr, or None without a bar. All others
            print by it: their lines would begin after the bar's last word.
        on_warning: gets each warning that is shown, or None.
    """

    with_bar: ClassVar[Console | None] = None
    on_warning: ClassVar[Callable[[str], None] | None] = None

    def __init__(self, stderr: bool = True, quiet: bool = False, soft_wrap: bool = True) -> None:
        # rich would make a cell output for every line. In a forked rank it would be a message that never arrives:
        # except for stdout and stderr, ipykernel's messages come only from the process that it started ("attempted to
        # send message from fork").
        place: dict[str, Any] = {"stderr": stderr}
        if in_notebook():
            place = {"file": sys.stdout, "force_jupyter": False, "force_terminal": False, "color_system": None}
        super().__init__(**place, quiet=quiet, soft_wrap=soft_wrap, highlight=False, markup=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """Renders text after `harmless`."""
        return super().render_str(harmless(text), **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Prints as rich does, but ignores errors of the output, such as a full disk."""
        # The output may be a file on a full disk: a line that cannot be printed must not end a run.
        shown_by = Terminal.with_bar
        with contextlib.suppress(OSError):
            if shown_by in (None, self) or self.quiet or not self.stderr:
                super().print(*objects, **options)
            else:
                shown_by.print(*objects, **options)

    def on_broken_pipe(self) -> None:
        """Ends a command's output if nobody reads it any more. A run, which prints to stderr, goes on silently."""
        if not self.stderr:
            super().on_broken_pipe()
        self.quiet = True

    def warn(self, message: str) -> None:
        """Prints a warning."""
        if Terminal.on_warning is not None and not self.quiet:
            Terminal.on_warning(message)
        self.print(Text.assemble(("warning:", "yellow"), " ", harmless(message)), soft_wrap=True)

    def fail(self, message: str) -> None:
        """Prints an error."""
        self.print(Text.assemble(("error:", "bold red"), " ", harmless(message)), soft_wrap=True)


@contextlib.contextmanager
def warnings_heard(hear: Callable[[str], None]) -> Iterator[None]:
    """While entered, `hear` gets each warning that this process shows."""
    before, Terminal.on_warning = Terminal.on_warning, hear
    try:
        yield
    finally:
        Terminal.on_warning = before


def clock(seconds: float) -> str:
    """Formats a duration in seconds as 1:02:03 (hours, minutes, seconds) or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_time(seconds: float) -> str:
    """Formats a time in seconds since 1970 in UTC, as on all pages and consoles."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def three_digits(value: float) -> str:
    """Formats in fixed point, unlike `.3g`, which writes 999.7 as 1e+03 and 30.0 as 30."""
    decimals = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:,.{decimals}f}"


def format_bytes(value: float) -> str:
    """Formats a number of bytes with three digits and the unit, such as 1.50 GiB."""
    for scale, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= scale:
            return f"{three_digits(value / scale)} {unit}"
    return f"{value:,.0f} B"


class LongAction:
    """Prints the progress of a long action: first after five seconds, then less and less often.

    Call it with the number of items done and the total. As a context manager it also prints if nothing calls it, for
    example during a single library call.

    Args:
        console: prints the lines. Quiet on ranks other than 0.
        what: describes the action.
    """

    def __init__(self, console: Console, what: str) -> None:
        self._console = console
        self._what = what
        self._over = threading.Event()
        self._restart_clock()

    def _restart_clock(self) -> None:
        self._started = time.monotonic()
        self._due = PASS_SECONDS

    def __call__(self, done: int, total: int) -> None:
        taken = time.monotonic() - self._started
        if taken >= self._due and done < total:
            self._print_progress(f"{done}/{total}  {clock(taken / done * (total - done))} left", taken)
        if done == total:
            self._restart_clock()

    def _print_progress(self, how_far: str, taken: float) -> None:
        self._due = taken + min(taken, 12 * PASS_SECONDS)
        self._console.print(f"{self._what}: {how_far}")

    def __enter__(self) -> LongAction:
        self._over.clear()
        self._restart_clock()
        if not self._console.quiet:
            threading.Thread(target=self._print_elapsed, name="pass", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()

    def _print_elapsed(self) -> None:
        """Prints the elapsed time while nothing calls this object. Runs in a thread that touches no device."""
        # Half a second later than a loop would print, because the loop knows how far it is.
        while not self._over.wait(max(0.0, self._started + self._due - time.monotonic()) + PASS_SECONDS / 10):
            taken = time.monotonic() - self._started
            if taken >= self._due:
                self._print_progress(f"under way for {clock(taken)}", taken)
