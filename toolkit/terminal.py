"""The terminal: text is printed as it is, whoever wrote it.

Names of folders, rows of data and what a model writes may hold brackets, which rich takes for markup and can fail at,
and codes that move the cursor or change colours. Here none of them works.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from rich.console import Console
from rich.text import Text

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
