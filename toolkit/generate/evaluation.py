"""How many completions are exactly an answer of their row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from toolkit.generate.rows import LENGTH_SHOWN, PromptRow

MISMATCHES_SHOWN = 5
"""Wrong answers that are printed."""


@dataclass(frozen=True)
class Mismatch:
    """A row whose completion is none of its answers."""

    row: PromptRow
    completion: str


@dataclass(frozen=True)
class Evaluation:
    """How many completions are exactly an answer of their row."""

    num_rows: int
    mismatches: list[Mismatch]

    @property
    def exact(self) -> int:
        return self.num_rows - len(self.mismatches)

    @property
    def accuracy(self) -> float:
        """Share of the rows, 0 to 1."""
        return self.exact / self.num_rows

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        mismatches = [
            {"row": wrong.row.place, "prompt": wrong.row.given, "completion": wrong.completion}
            | {"answers": list(wrong.row.answers)}
            for wrong in self.mismatches
        ]
        return {"accuracy": self.accuracy, "exact": self.exact, "rows": self.num_rows, "mismatches": mismatches}


def evaluate(rows: list[PromptRow], texts: Iterable[str], strict: bool = False) -> Evaluation:
    """Compares each row's completion with its answers.

    Args:
        texts: completions in the order of the rows.
        strict: as they are; else without regard to case, and to whitespace but between words.
    """
    same = str if strict else normalised
    wrong = [
        Mismatch(row, text)
        for row, text in zip(rows, texts, strict=True)
        if same(text) not in [same(answer) for answer in row.answers]
    ]
    return Evaluation(len(rows), wrong)


def normalised(text: str) -> str:
    """Without case, and with one space for whitespace between words."""
    return " ".join(text.casefold().split())


def summary(found: Evaluation) -> str:
    """The accuracy and the first wrong answers, as lines."""
    lines = [f"accuracy: {found.accuracy:.1%} ({found.exact} of {found.num_rows} rows exact)"]
    for wrong in found.mismatches[:MISMATCHES_SHOWN]:
        expected = " or ".join(_shortened(answer) for answer in wrong.row.answers)
        lines.append(f"  {wrong.row.place}: {_shortened(wrong.completion)} instead of {expected}")
    more = len(found.mismatches) - MISMATCHES_SHOWN
    return "\n".join([*lines, *([f"  and {more} more; --json has them all"] if more > 0 else [])])


def _shortened(text: str) -> str:
    return repr(text if len(text) <= LENGTH_SHOWN else f"{text[:LENGTH_SHOWN]}...")
