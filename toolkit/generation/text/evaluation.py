"""Counts right answers of a model: completions that are compared or scored."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Protocol

from toolkit.errors import BadInputError, counted
from toolkit.generation.text.complete import Completion
from toolkit.generation.text.reader import Reader, comparable_json
from toolkit.generation.text.rows import LENGTH_SHOWN, PromptRow
from toolkit.generation.text.scorer import Scorer
from toolkit.recipe.objectives.section import Comparison
from toolkit.user_function import load_function

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MISMATCHES_SHOWN = 5
"""Number of wrong answers that are printed."""

MINUS = "\u2212"
"""The minus of mathematics, which models and data write as well as the hyphen."""

NUMBER = re.compile(
    r"(?:(?<![A-Za-z0-9_.)\]%])-)?"  # after a word or a number it is a dash: 3-5
    r"(?:(?:\d{1,3}(?:,\d{4})+(?!\d)|\d+(?:,\d{3}(?!\d))*)(?:\.\d+)?|(?<![A-Za-z0-9_.])\.\d+)"
    r"(?:[eE][+-]?\d{1,3}(?![A-Za-z0-9_]))?"
)
"""A number as people write it, with or without commas at the thousands (or, as in East Asia, ten thousands)."""


class Scoring(Protocol):
    """Scores completions: a comparison with answers, or a user's function."""

    def score(self, completion: str, row: PromptRow) -> float: ...


@dataclass(frozen=True)
class Compared:
    """Compares completions with answers.

    Attributes:
        reader: reads completions as the tokenizer and its chat template write them; None for plain text.
    """

    comparison: Comparison
    reader: Reader | None = None

    def of_completion(self, text: str) -> Any:
        """Returns the value of a completion that is compared; None, which equals no answer, if it has none."""
        part = text if self.comparison.extract is None else _last_match(self.comparison.extract, text)
        return None if part is None else self._value(part)

    def of_answer(self, text: str) -> Any:
        """Returns the value of an answer of a file, which may be bare or stand in a text as in a completion."""
        part = None if self.comparison.extract is None else _last_match(self.comparison.extract, text)
        return self._value(text if part is None else part)

    def score(self, completion: str, row: PromptRow) -> float:
        """Returns 1 if a completion is one of the row's answers, else 0."""
        reader = self.reader if self.comparison.extract is None else None  # the whole text is searched
        answers = (text for answer in row.answers for text in (reader.readings(answer, True) if reader else [answer]))
        right = [*map(self.of_answer, answers)]
        found = map(self.of_completion, reader.readings(completion) if reader else [completion])
        if any(value is not None and value in right for value in found):
            return 1.0
        return float(reader is not None and any(reader.calls(completion, answer, row) for answer in row.answers))

    def _value(self, text: str) -> Any:
        if self.comparison.how == "numeric":
            found = NUMBER.findall(text.replace(MINUS, "-"))
            return Decimal(found[-1].replace(",", "")) if found else None
        if self.comparison.how == "structured":
            return comparable_json(text)
        return text if self.comparison.how == "strict" else normalised(text)


def has_function(compare: str | None) -> bool:
    """Tells whether a comparison is a user's function, which needs no answers."""
    return Comparison.of(compare).score is not None


LACKS = {"numeric": "holds no number", "structured": "is not JSON"}


def scoring_of(
    rows: list[PromptRow], compare: str | None, field: str, tokenizer: PreTrainedTokenizerBase | None = None
) -> Scoring:
    """Returns the scoring of a comparison. Imports a user's function, which runs code of its module.

    Args:
        compare: as in a recipe; see `Comparison`.
        field: the option or the field of the comparison, for errors.
        tokenizer: the model's; None for plain text, in which nothing is read but what stands there.

    Raises:
        BadInputError: if answers lack the number or the JSON that is compared, or the function cannot be imported.
    """
    comparison = Comparison.of(compare)
    if comparison.score is not None:
        return Scorer(load_function(comparison.score, field))
    compared = Compared(comparison, None if tokenizer is None else Reader(tokenizer))
    lacking = [row.place for row in rows if None in map(compared.of_answer, row.answers)]
    if lacking:
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise BadInputError(
            f"{field}: the answer of {lacking[0]}{more} {LACKS[comparison.how]}; compare by text, or correct it"
        )
    return compared


def _last_match(pattern: str, text: str) -> str | None:
    compiled = re.compile(pattern)
    matches = list(compiled.finditer(text))
    return None if not matches else matches[-1][1 if compiled.groups else 0]


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
