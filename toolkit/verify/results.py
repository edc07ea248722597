"""Defines the results of the two sides of `toolkit verify`, and the rows of its report."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from toolkit.generation.sampling.fresh import FreshSample

OK, FAILED, NOT_USED = "ok", "FAILED", "not used"


@dataclass(frozen=True)
class Row:
    """One check.

    Attributes:
        check: the name of the check.
        found: the measured difference, or None if the check measures nothing.
        tolerance: the largest difference that is allowed, or None.
        verdict: `OK`, `FAILED` or `NOT_USED`.
        note: what was measured, in words.
    """

    check: str
    found: float | None
    tolerance: float | None
    verdict: str
    note: str = ""


@dataclass(frozen=True)
class Report:
    """The report of `verify`: facts about both runs, and a row for each check."""

    facts: dict[str, str]
    rows: list[Row]

    @property
    def verdict(self) -> str:
        """Returns `FAILED` if a check failed, else `OK`."""
        return FAILED if any(row.verdict == FAILED for row in self.rows) else OK

    def to_json(self) -> str:
        """Returns the report as JSON."""
        return json.dumps(finite({"verdict": self.verdict, **asdict(self)}), indent=2)


@dataclass(frozen=True)
class Outcome:
    """The results of one side.

    Attributes:
        losses: the mean loss over the target tokens of each optimizer step.
        grad_norms: the gradient norm of each step, before clipping.
        weights: every whole parameter after the last step, by name.
        without_gradient: the trainable parameters whose gradient was missing or zero in every step.
        sizes: the 2-norm of each trained parameter's mean gradient (AdamW's first moment).
        loads: for each step and layer with experts, the share of choices of each expert.
        balance: the balance loss of each step of a mixture of experts, without its coefficient.
    """

    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, torch.Tensor]
    without_gradient: list[str]
    sizes: dict[str, float]
    loads: list[list[list[float]]] = field(default_factory=list)
    balance: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class PlainRun:
    """The results of the plain loop.

    Attributes:
        outcome: the results to compare.
        trained: the names of the trained parameters.
        steady: for each parameter a boolean tensor of its shape: whether an element's gradient stayed well above
            rounding, see `_Steadiness`.
        reach: the farthest that AdamW can have moved a weight: the sum of the learning rates.
        padded: why rows are padded although `data.packing` is not set, or None if they are not.
        towers: the names of trained parameters of vision towers. A tower may not use some, like LLaVA's last layer.
        drawn: the completions of each step of a model that samples itself, or None.
    """

    outcome: Outcome
    trained: set[str]
    steady: dict[str, torch.Tensor]
    reach: float
    padded: str | None = None
    towers: frozenset[str] = frozenset()
    drawn: list[list[FreshSample]] | None = None


@dataclass(frozen=True)
class ShardedRun:
    """The results of the ranks.

    Attributes:
        outcome: the results to compare.
        facts: what the report says about the run.
        precision: the mixed precision of the run.
        differ: completions of the first step that the ranks draw differently from the plain model; None without any.
    """

    outcome: Outcome
    facts: dict[str, str]
    precision: str
    differ: int | None = None


def finite(value: Any) -> Any:
    """Replaces infinity and NaN by text, because JSON has neither."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list) else value


def measured(check: str, found: float, tolerance: float, note: str) -> Row:
    """Returns the row of a measured difference. NaN fails."""
    return Row(check, found, tolerance, OK if found <= tolerance else FAILED, note)
