"""Prints tables and errors in the same way for all commands."""

from __future__ import annotations

import atexit
import gc
import json
import logging
import os
import platform
import re
import resource
import sys
import time
import traceback
import warnings
from typing import Any

from rich.table import Table

from toolkit.cli.shared.signals import INTERRUPTED
from toolkit.errors import BadInputError, OwnCodeError, RankError, StoppedError, ToolkitError, first_line, is_lost_peer
from toolkit.terminal import Terminal

PATIENCE_SECONDS = 20.0
"""How long other ranks stay alive after an error, so that rank 0 gets to print it before a launcher ends it."""

MORE_MEMORY = (
    "lower training.micro_batch_size or data.max_length, set sharding.activation_checkpointing=1, or see what fits "
    "with `toolkit plan`"
)

ONE_TYPE = "if the model does not compute in 16 bits, set training.mixed_precision=no"

_TWO_TYPES = re.compile(r"expected scalar type|(have|has) the same dtype")
"""torch's message about a product of two dtypes."""

WORD = 45
"""Columns of a word; a longer text than the longest key of a recipe is a path or a list, and may be folded."""

PATIENCE_WHEN_STOPPED = 2.0
"""The same if all ranks end for one reason at one time."""


NOISY = ("torchao", "torch.utils._pytree", "torch.utils.cpp_extension", "bitsandbytes.backends.cpu.ops")
"""Loggers whose warnings say nothing to who runs a command: transformers and peft import torchao and bitsandbytes where
they are installed, which tell of each kernel that does not suit this machine, and torch that there is no GPU. The
toolkit uses none of them, and says itself where it runs."""


MANY_OBJECTS = 200_000
"""What the imports of torch and transformers make is never garbage: looking through it at every 700 objects took 0.8 of
the 5.6 s of an import, at every 50,000 still 0.3 s, and once more at the process's end 1.3 s."""


def prepare_process() -> None:
    """Before torch is imported: warnings of `NOISY` are left out, but not errors, and garbage is sought rarely."""
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing. is deprecated.*")  # by peft
    gc.set_threshold(MANY_OBJECTS)
    atexit.register(_leave_garbage)


FEWEST_FILES, ENOUGH_FILES = 64, 4096
"""That a process may have open. With 22 gloo ends a rank of two from C++, and with 12 an export cannot be read back."""


def require_files() -> None:
    """Raises the number of files that may be open as far as the system allows.

    Raises:
        BadInputError: if it stays too small.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    if soft != resource.RLIM_INFINITY and soft < FEWEST_FILES:
        raise BadInputError(
            f"this process may have {soft} files open, and needs {FEWEST_FILES}; raise the limit, for example by "
            f"`ulimit -n {ENOUGH_FILES}`"
        )


def _leave_garbage() -> None:
    """Disables the garbage collection at the end of the process; Triton, if installed, would print 60 lines then."""
    if "triton" not in sys.modules:
        gc.freeze()


def print_error(error: ToolkitError) -> int:
    """Prints the error once for all ranks; returns the exit code."""
    if int(os.environ.get("RANK", "0")) == 0 or isinstance(error, RankError):
        terminal = Terminal()
        tell = terminal.print if isinstance(error, StoppedError) else terminal.fail
        tell(str(error))
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
        time.sleep(PATIENCE_WHEN_STOPPED if isinstance(error, StoppedError) else PATIENCE_SECONDS)
        if isinstance(error, OwnCodeError):  # if it had failed on rank 0 too, the launcher would have ended this rank
            Terminal().fail(f"rank {os.environ['RANK']}: {error}")
    return error.exit_code


def print_interrupt() -> int:
    """Prints, once for all ranks, that Ctrl-C ended the command; returns the exit code."""
    if os.environ.get("RANK", "0") == "0":
        Terminal().print("stopped by Ctrl-C")
    return INTERRUPTED


def print_failure(error: BaseException) -> int:
    """Prints, at once and on the rank that failed, an error that nobody has foreseen; returns the exit code."""
    if is_lost_peer(error):
        time.sleep(PATIENCE_SECONDS)  # the rank that was lost has an error of its own, and the launcher ends this one
    rank, world_size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    where = f"rank {rank} of {world_size} on {platform.node()}" if world_size != "1" else "the run"
    when = "".join(f", {note}" for note in getattr(error, "__notes__", []))
    console = Terminal()
    if is_lost_peer(error) and (ended := list(getattr(error, "__notes__", []))):
        console.fail(f"{where} lost its connection: {', '.join(ended)}; look at what that rank ran last")
        return 1
    if _is_out_of_memory(error):
        what = f"ran out of memory{when}: {first_line(error)}; {MORE_MEMORY}"
    else:
        console.print("".join(traceback.format_exception(error)), markup=False, end="")
        mend = f"; {ONE_TYPE}" if _TWO_TYPES.search(str(error)) else ""
        what = f"failed{when}: {type(error).__name__}: {first_line(error)}{mend}"
    console.fail(f"{where} {what}")
    return 1


def _is_out_of_memory(error: BaseException) -> bool:
    """Tells whether device (torch.OutOfMemoryError) or host, for which torch raises RuntimeError, lack memory."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool({"OutOfMemoryError", "MemoryError"} & names) or "can't allocate memory" in str(error)


def print_rows(rows: list[dict[str, Any]], columns: dict[str, str], as_json: bool) -> None:
    """Prints rows as a table with these headings, by key of the rows, or all of them as JSON."""
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        print_table(list(columns.values()), [[str(row[key]) for key in columns] for row in rows])


def print_table(columns: list[str], rows: list[list[str]]) -> None:
    """Prints rows without cutting a key or a number: a line for each in pipes, and blocks in narrow terminals."""
    console = Terminal(stderr=False, soft_wrap=False)
    cells = list(zip(columns, *rows, strict=True))
    if not console.is_terminal:
        widths = [max(map(len, column)) for column in cells]
        for row in [columns, *rows]:
            console.print("  ".join(map(str.ljust, row, widths)).rstrip(), soft_wrap=True)
        return
    least = [min(WORD, max(len(word) for cell in column for word in cell.split() or [""])) for column in cells]
    if sum(least) + 2 * len(least) > console.width:
        for row in rows:
            for column, cell in zip(columns, row, strict=True):
                console.print(f"{column}: {cell}")
            console.print()
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column, width in zip(columns, least, strict=True):
        table.add_column(column, overflow="fold", min_width=width)
    for row in rows:
        table.add_row(*row)
    console.print(table)
