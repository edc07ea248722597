"""The toolkit's exceptions.

Exit codes: 1 failed, 2 bad input, 3 stopped on request, 4 a rank stalled (`ToolkitError.exit_code`).
"""

from __future__ import annotations

import difflib
import re
import signal
from collections.abc import Iterable, Mapping


class ToolkitError(Exception):
    """An error that a user can act on. The message says what was found and how to fix it.

    Attributes:
        is_shared: whether every rank has the error when one has it.
    """

    exit_code = 1
    is_shared = True


class BadInputError(ToolkitError):
    """The user's input cannot be used: a recipe, a file, a folder, a launch configuration."""

    exit_code = 2


class RecipeError(BadInputError):
    """A recipe has one or more wrong fields. All are reported together.

    Attributes:
        origin: where the recipe was read, for the message.
        problems: a line for each wrong field, which starts with the field's dotted path.
        lines: dotted path -> the line of the file where it is; for fields that the file has.
    """

    def __init__(self, origin: str, problems: list[str], lines: Mapping[str, int] | None = None) -> None:
        self.origin = origin
        self.problems = problems
        self.lines = lines or {}
        told = "\n".join(f"  - {self._place(problem)}{problem}" for problem in problems)
        super().__init__(f"{origin}: {counted(len(problems), 'problem')}\n{told}")

    def _place(self, problem: str) -> str:
        field = re.split(r"[: ]", problem, maxsplit=1)[0]
        return f"line {self.lines[field]}: " if field in self.lines else ""

    def __reduce__(self) -> tuple[type[RecipeError], tuple[str, list[str], Mapping[str, int]]]:
        return RecipeError, (self.origin, self.problems, self.lines)


class DataError(BadInputError):
    """A data set cannot be read or holds nothing to train on."""


class StoreError(ToolkitError):
    """A store (`checkpoint.to`) cannot be reached, refuses a request, or has not kept what was written."""


class HubError(ToolkitError):
    """The hub fails, or an export could not be pushed to it. The export is whole on disk."""


class UnitError(BadInputError):
    """No FSDP units can be planned for the model, or `unit_classes` match nothing."""


class UnplannableError(ToolkitError):
    """A model does not run on tensors without values, so that its memory and time cannot be planned."""


class TrainingError(ToolkitError):
    """Training cannot continue, for example after too many non-finite losses in a row."""


class RankError(TrainingError):
    """One rank cannot continue, and the others do not know it."""

    is_shared = False


class OwnCodeError(BadInputError):
    """Code of the user's fails while a run trains, perhaps on this rank alone."""

    is_shared = False


class RankLostError(ToolkitError):
    """A signal ended a rank, for example the kernel's when memory ran out."""


SAVED = "its state is saved"
"""What the reason of a `StoppedError`, which a report shows, says if it is true."""


class StoppedError(ToolkitError):
    """The run was asked to end, by a signal or its time limit. Its state is saved if it could be.

    Attributes:
        why: what asked, and whether the state is saved, for pages that name the step themselves.
    """

    exit_code = 3

    def __init__(self, message: str, why: str = "") -> None:
        super().__init__(message)
        self.why = why or message


class StalledError(ToolkitError):
    """A rank made no progress for longer than `training.stall_minutes`."""

    exit_code = 4


class ExportError(ToolkitError):
    """The exported folder does not reproduce the trained model's outputs."""


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's text, and the second if the first ends with a colon.

    Without text, returns its class name. Removes a full stop at the end, because the line becomes part of a sentence.
    """
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return (" ".join(lines[:2]) if lines[0].endswith(":") else lines[0]).rstrip(".")


def in_words(error: BaseException) -> str:
    """Returns an exception's class and first line. The line alone may be a bare key, as of KeyError."""
    return f"{type(error).__name__}: {first_line(error)}"


def closest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Returns the known word that is closest to a word, or None if none is close.

    Args:
        cutoff: how alike the two must be, from 0 to 1 (difflib).
    """
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns a remark in brackets that suggests the closest known word, for any place in a sentence; or nothing."""
    close = closest(word, known)
    return f" (did you mean {close!r}?)" if close is not None else ""


def is_lost_peer(error: BaseException) -> bool:
    """Returns whether a collective failed because another rank is gone."""
    names = {kind.__name__ for kind in type(error).__mro__}
    lost = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed")
    return "DistError" in names or any(text in str(error) for text in lost)


def signal_name(number: int) -> str:
    """Returns a signal's name. Most real-time signals (35 to 63 on Linux) have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def listed(names: Iterable[object], most: int = 5, count: int = 0) -> str:
    """Lists the first names, and how many more there are: a, b and 3 more. Empty without names.

    Args:
        most: the largest number of names that are listed.
        count: how many there are, if `names` has not all of them.
    """
    known = list(names)
    shown = [str(name) for name in known[:most]]
    more = max(count, len(known)) - len(shown)
    return ", ".join(shown) + (f" and {more:,} more" if more and shown else "")


def counted(count: int, noun: str) -> str:
    """Formats a count with its noun: 1 row, 2 rows, 1,000 rows."""
    return f"{count:,} {noun if count == 1 else noun + 's'}"
