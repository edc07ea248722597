"""The toolkit's exceptions.

Exit codes: 1 failed, 2 bad input, 3 stopped on request, 4 a rank stalled (`ToolkitError.exit_code`).
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable


class ToolkitError(Exception):
    """Something a person can act on; the message says what was found and how to mend it."""

    exit_code = 1


class BadInputError(ToolkitError):
    """What the user gave cannot be used: a recipe, a file, a folder, a launch configuration."""

    exit_code = 2


class RecipeError(BadInputError):
    """A recipe with one or more wrong fields, all of them reported together.

    `problems` holds one line per wrong field, each beginning with the field's dotted path.
    """

    def __init__(self, origin: str, problems: list[str]) -> None:
        self.origin = origin
        self.problems = problems
        lines = "\n".join(f"  - {problem}" for problem in problems)
        super().__init__(f"{origin}: {counted(len(problems), 'problem')}\n{lines}")

    def __reduce__(self) -> tuple[type[RecipeError], tuple[str, list[str]]]:
        return RecipeError, (self.origin, self.problems)


class DataError(BadInputError):
    """A data set that cannot be read or holds nothing to train on."""


class StoreError(ToolkitError):
    """A store (`checkpoint.to`) that cannot be reached, refuses, or has not kept what was written."""


class HubError(ToolkitError):
    """An export that could not be pushed to the hub; it is whole on disk."""


class UnitError(BadInputError):
    """No FSDP units can be planned for this model, or an override matches nothing."""


class UnplannableError(ToolkitError):
    """A model that does not run on tensors without values, so that nothing can be foretold of it."""


class TrainingError(ToolkitError):
    """Training cannot go on, for example after too many non-finite losses in a row."""


class RankError(TrainingError):
    """One rank alone cannot go on, and the others know nothing of it."""


class RankLostError(ToolkitError):
    """A signal ended a rank, as the kernel does where memory runs out."""


class StoppedError(ToolkitError):
    """The run was asked to end, by a signal or its time limit, and its state is saved."""

    exit_code = 3


class StalledError(ToolkitError):
    """A rank made no progress for longer than `training.stall_minutes`."""

    exit_code = 4


class ExportError(ToolkitError):
    """The exported folder does not give the trained model's outputs back."""


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, with the next where it ends in a colon; its class where it has none.

    Without a full stop, as it becomes part of a sentence.
    """
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return (" ".join(lines[:2]) if lines[0].endswith(":") else lines[0]).rstrip(".")


def in_words(error: BaseException) -> str:
    """Why a library failed, with the class of the exception, as the words alone may be a bare key."""
    return f"{type(error).__name__}: {first_line(error)}"


SECRET_NAMES = re.compile(r"SECRET|TOKEN|PASSWORD|CREDENTIAL|ACCESS_KEY")


def without_secrets(text: str) -> str:
    """Text without the values of environment variables that hold secrets."""
    for name, value in os.environ.items():
        if len(value) > 3 and SECRET_NAMES.search(name):
            text = text.replace(value, "***")
    return text


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of an error's sentence that names the closest of the known words; empty where none is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def is_lost_peer(error: Exception) -> bool:
    """Whether a collective failed because another rank is gone."""
    names = {kind.__name__ for kind in type(error).__mro__}
    lost = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed")
    return "DistError" in names or any(text in str(error) for text in lost)


def counted(count: int, noun: str) -> str:
    """1 row, 2 rows, 1,000 rows."""
    return f"{count:,} {noun if count == 1 else noun + 's'}"
