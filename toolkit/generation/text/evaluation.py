"""Counts right answers of a model: completions that are compared or scored."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NoReturn, Protocol

from toolkit.errors import BadInputError, counted
from toolkit.generation.text.complete import Completion
from toolkit.generation.text.rows import LENGTH_SHOWN, PromptRow
from toolkit.generation.text.scorer import load_scorer

MISMATCHES_SHOWN = 5
"""Number of wrong answers that are printed."""

MINUS = "\u2212"
"""The minus of mathematics, which models and data write beside the hyphen."""

NUMBER = re.compile(
    r"(?:(?<![A-Za-z0-9_.)\]%])-)?"  # behind a word or a number it is a dash: 3-5
    r"(?:(?:\d{1,3}(?:,\d{4})+(?!\d)|\d+(?:,\d{3}(?!\d))*)(?:\.\d+)?|(?<![A-Za-z0-9_.])\.\d+)"
    r"(?:[eE][+-]?\d{1,3}(?![A-Za-z0-9_]))?"
)
"""A number as people write it, with or without commas at the thousands (or, as in East Asia, ten thousands)."""


@dataclass(frozen=True)
class Comparison:
    """Compares a completion with answers.

    Attributes:
        strict: compare texts as they are; otherwise case, and whitespace except between words, do not count.
        extract: compare its last match, or the first group of that if it has one; None compares the whole text.
        numeric: compare the last number.
        structured: compare as JSON; the order of keys, whitespace, and the format of numbers do not count.
    """

    strict: bool = False
    extract: re.Pattern[str] | None = None
    numeric: bool = False
    structured: bool = False

    def of_completion(self, text: str) -> Any:
        """Returns the value of a completion that is compared; None, which equals no answer, if it has none."""
        part = text if self.extract is None else _last_match(self.extract, text)
        return None if part is None else self._value(part)

    def of_answer(self, text: str) -> Any:
        """Returns the value of an answer of a file, which may be bare or stand in a text as in a completion."""
        part = text if self.extract is None else _last_match(self.extract, text)
        return self._value(text if part is None else part)

    def score(self, completion: str, row: PromptRow) -> float:
        """Returns 1 if a completion equals one of the row's answers, else 0."""
        found = self.of_completion(completion)
        return float(found is not None and found in [self.of_answer(answer) for answer in row.answers])

    def _value(self, text: str) -> Any:
        if self.numeric:
            found = NUMBER.findall(text.replace(MINUS, "-"))
            return Decimal(found[-1].replace(",", "")) if found else None
        if self.structured:
            return _comparable_json(text)
        return text if self.strict else normalised(text)


COMPARES = ("strict", "extract", "numeric", "structured", "score")
"""Settings of comparison and scores."""


class Scoring(Protocol):
    """Scores completions: a comparison with answers, or a user's function."""

    def score(self, completion: str, row: PromptRow) -> float: ...


class Compares(Protocol):
    """Settings of a comparison: options of the command, or fields of a recipe."""

    @property
    def strict(self) -> bool: ...
    @property
    def extract(self) -> str | None: ...
    @property
    def numeric(self) -> bool: ...
    @property
    def structured(self) -> bool: ...
    @property
    def score(self) -> str | None: ...


def scoring_of(rows: list[PromptRow], how: Compares, prefix: str = "--") -> Scoring:
    """Returns the scoring that the settings ask for. Imports a user's function, which runs code of its module.

    Args:
        prefix: prefix of the settings' names in errors.

    Raises:
        BadInputError: if answers lack the number or the JSON that the settings compare, or the function cannot be
            imported.
    """
    if how.score is not None:
        return load_scorer(how.score, f"{prefix}score")
    pattern = re.compile(how.extract) if how.extract else None
    comparison = Comparison(how.strict, pattern, how.numeric, how.structured)
    lacking = [row.place for row in rows if None in map(comparison.of_answer, row.answers)]
    if lacking:
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        name, lacks = ("numeric", "holds no number") if how.numeric else ("structured", "is not JSON")
        raise BadInputError(f"{prefix}{name}: the answer of {lacking[0]}{more} {lacks}; leave {prefix}{name} out")
    return comparison


def _comparable_json(text: str) -> Any:
    """Returns a value that is equal for all texts of the same JSON; None if the text is not JSON."""
    try:
        found = json.loads(text, parse_int=Decimal, parse_float=Decimal, parse_constant=_refuse_constant)
        return _with_kind(found)
    except (ValueError, ArithmeticError, RecursionError):
        return None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _with_kind(value: Any) -> Any:
    """Adds the kind to a value: in Python true equals 1, and a list of pairs could be an object."""
    if isinstance(value, dict):
        return "object", {key: _with_kind(each) for key, each in value.items()}
    if isinstance(value, list):
        return "array", [_with_kind(each) for each in value]
    return type(value).__name__, value


def _last_match(pattern: re.Pattern[str], text: str) -> str | None:
    matches = list(pattern.finditer(text))
    return None if not matches else matches[-1][1 if pattern.groups else 0]


@dataclass(frozen=True)
class Mismatch:
    """A row whose completion equals none of its answers, or has a score below 1."""

    row: PromptRow
    completion: str
    score: float = 0.0


@dataclass(frozen=True)
class Evaluation:
    """Counts of rows that were answered right.

    Attributes:
        stopped: number of answers that a token ended; the others were cut.
        tokens: tokens of all answers, without those that ended them.
    """

    num_rows: int
    mismatches: list[Mismatch]
    stopped: int
    tokens: int

    @property
    def exact(self) -> int:
        return self.num_rows - len(self.mismatches)

    @property
    def accuracy(self) -> float:
        """Mean score of the rows, 0 to 1; for compared answers, the share of right ones."""
        return (self.exact + math.fsum(wrong.score for wrong in self.mismatches)) / self.num_rows

    def shares(self) -> dict[str, float]:
        """Returns the accuracy, the share of answers that stop, and their mean length."""
        return {
            "accuracy": self.accuracy,
            "stopped": self.stopped / self.num_rows,
            "mean_tokens": self.tokens / self.num_rows,
        }

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields of the command's JSON."""
        mismatches = [
            {"row": wrong.row.place, "prompt": wrong.row.given, "completion": wrong.completion}
            | {"answers": list(wrong.row.answers)}
            | ({"score": wrong.score} if wrong.score else {})
            for wrong in self.mismatches
        ]
        return {**self.shares(), "exact": self.exact, "rows": self.num_rows, "mismatches": mismatches}


def evaluate(rows: list[PromptRow], completions: Iterable[Completion], scoring: Scoring) -> Evaluation:
    """Scores each row's completion; `completions` are in the order of the rows.

    Raises:
        BadInputError: if a user's function fails on one.
    """
    wrong, stopped, tokens = [], 0, 0
    for row, completion in zip(rows, completions, strict=True):
        score = scoring.score(completion.text, row)
        if score < 1:
            wrong.append(Mismatch(row, completion.text, score))
        stopped += completion.stopped
        tokens += completion.num_tokens
    return Evaluation(len(rows), wrong, stopped, tokens)


def normalised(text: str) -> str:
    """Returns the text in lower case, with one space between words."""
    return " ".join(text.casefold().split())


def summary(found: Evaluation) -> str:
    """Returns lines with the accuracy and the first wrong answers."""
    shares = found.shares()
    lines = [
        f"accuracy: {found.accuracy:.1%} ({found.exact} of {counted(found.num_rows, 'row')} exact)",
        f"answers that stop: {shares['stopped']:.1%}; mean length: {shares['mean_tokens']:.1f} tokens",
    ]
    for wrong in found.mismatches[:MISMATCHES_SHOWN]:
        expected = " or ".join(_shortened(answer) for answer in wrong.row.answers)
        told = f" instead of {expected}" if expected else ""
        scored = f", scored {wrong.score:.2f}" if wrong.score or not expected else ""
        lines.append(f"  {wrong.row.place}: {_shortened(wrong.completion)}{told}{scored}")
    more = len(found.mismatches) - MISMATCHES_SHOWN
    return "\n".join([*lines, *([f"  and {more} more; --json has them all"] if more > 0 else [])])


def _shortened(text: str) -> str:
    return repr(text if len(text) <= LENGTH_SHOWN else f"{text[:LENGTH_SHOWN]}...")
