"""What becomes of an input: runs a command in this process, as the shell would, and looks at what a user sees.

An input is refused well when the exit code is 2 and stderr holds one error that names what is wrong and how to fix it,
without a traceback and in time.
"""

from __future__ import annotations

import contextlib
import io
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from toolkit.cli.app import main
from toolkit.cli.ranks.finetune import finetune_command
from toolkit.sharding.plugin import reset_accelerate

SECONDS = 120
"""No input here takes ten on a quiet machine; one that takes so long stalls."""

MENDS = re.compile(
    r"allowed|did you mean|\b(set|name|give|choose|remove|lower|raise|use|install|leave|run|correct|add|rename|save|"
    r"needs?|needed|try|see|expected|must|quote|write|delete|lists?|decompress|free|make|Shipped|it has|requires|"
    r"download|excludes?|leave|print|make)\b",
    re.IGNORECASE,
)
"""Words by which an error says how to fix it."""


class StallError(Exception):
    """An input took more than `SECONDS`."""


@dataclass(frozen=True)
class Outcome:
    """What a user sees of a command.

    Attributes:
        code: exit code.
        told: stderr.
    """

    code: int
    told: str

    def problems(self, named: str) -> list[str]:
        """Why this is no good refusal; empty where it is one.

        Args:
            named: the field or the file, which the error has to name.
        """
        found = []
        if self.code != 2:
            found.append(f"exit code {self.code}, not 2")
        if "Traceback" in self.told:
            found.append("a traceback")
        if len(re.findall(r"(?:^|\n)error: |(?:^|\n).{2} Error ", self.told)) != 1:
            found.append("not one error")
        if named not in self.told:
            found.append(f"{named!r} is not named")
        if MENDS.search(self.told) is None:
            found.append("no word on how to fix it")
        return found


def unclear(outcomes: Iterable[tuple[object, Outcome, str]]) -> list[tuple[object, list[str], str]]:
    """Those of several inputs that are not refused well: the input, its problems and what stderr holds.

    Args:
        outcomes: input, its outcome, and what the error has to name.
    """
    return [(given, found, outcome.told) for given, outcome, named in outcomes if (found := outcome.problems(named))]


def toolkit(*arguments: str) -> Outcome:
    """`toolkit ARGUMENTS`."""

    def command() -> int:
        with patch.object(sys, "argv", ["toolkit", *arguments]):
            main()
        return 0

    return _outcome(command)


def finetune(*arguments: str) -> Outcome:
    """`recipes/finetune.py ARGUMENTS`."""
    try:
        return _outcome(lambda: finetune_command(list(arguments)))
    finally:
        # As the end of the process would.
        if dist.is_initialized():
            dist.destroy_process_group()
        reset_accelerate()


def _outcome(command: Any) -> Outcome:
    told, code = io.StringIO(), 0
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()), _in_time():
        try:
            code = command()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return Outcome(code, told.getvalue())


@contextlib.contextmanager
def _in_time() -> Iterator[None]:
    def fail(*_: Any) -> None:
        raise StallError(f"not done after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
