"""What all commands print the same way: tables and errors."""

from __future__ import annotations

import os
import time

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from toolkit.errors import StoppedError, ToolkitError

PATIENCE_SECONDS = 20.0
"""How long other ranks stay alive after an error, so that rank 0 gets to print it before a launcher ends it."""

PATIENCE_WHEN_STOPPED = 2.0
"""The same where all ranks end for one reason at one time."""


def print_error(error: ToolkitError) -> int:
    """Prints the error once for all ranks; returns the exit code."""
    if int(os.environ.get("RANK", "0")) == 0:
        word = "" if isinstance(error, StoppedError) else "[bold red]error:[/] "
        Console(stderr=True, highlight=False, soft_wrap=True).print(word + escape(str(error)))
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
        time.sleep(PATIENCE_WHEN_STOPPED if isinstance(error, StoppedError) else PATIENCE_SECONDS)
    return error.exit_code


def print_table(columns: list[str], rows: list[list[str]]) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    Console(highlight=False).print(table)
