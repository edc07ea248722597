"""What the two sides of `toolkit verify` give, and the rows that its report is made of."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

OK, FAILED, NOT_USED = "ok", "FAILED", "not used"

REHEARSED_DROPOUT = 0.1
"""Probability under which the replay of dropout is checked, where the model itself has none."""


@dataclass(frozen=True)
class Row:
    """One check. `found` and `tolerance` are numbers where the check has a measure, None elsewhere."""

    check: str
    found: float | None
    tolerance: float | None
    verdict: str
    note: str = ""


@dataclass(frozen=True)
class Report:
    """What `verify` found: facts about both runs, and a row per check."""

    facts: dict[str, str]
    rows: list[Row]

    @property
    def verdict(self) -> str:
        return FAILED if any(row.verdict == FAILED for row in self.rows) else OK

    def to_json(self) -> str:
        return json.dumps(finite({"verdict": self.verdict, **asdict(self)}), indent=2)


@dataclass(frozen=True)
class Outcome:
    """One way of running the steps.

    Attributes:
        losses: mean over the step's target tokens, per optimizer step.
        grad_norms: before clipping.
        weights: of every parameter after the last step, whole, by name.
        without_gradient: trainable parameters whose gradient was missing or zero in every step.
        sizes: of the mean gradient (AdamW's first moment) of each trained parameter, its Euclidean norm.
        loads: of each step and layer with experts, the share of choices of each expert.
        balance: of each step, the balance loss of a mixture of experts, without its coefficient.
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
    """The plain loop's outcome and what the comparison needs beside it.

    Attributes:
        trained: names of the parameters that are trained.
        steady: elements of each parameter whose gradient stayed well above rounding, see `_Steadiness`.
        reach: the farthest that AdamW can have moved a weight: the sum of the learning rates.
        packing: the row about documents that share a sample.
        padded: why rows are padded although `data.packing` is not set; None where that is not so.
        towers: names of the trained parameters that see; a tower may leave some out, as LLaVA does its last layer.
    """

    outcome: Outcome
    trained: set[str]
    steady: dict[str, torch.Tensor]
    reach: float
    packing: Row
    padded: str | None = None
    towers: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ShardedRun:
    """The ranks' outcome. `replay`: see `_replay`; None without activation checkpointing."""

    outcome: Outcome
    facts: dict[str, str]
    precision: str
    device: str
    replay: dict[str, float] | None


def finite(value: Any) -> Any:
    """JSON knows no infinity and no NaN: they become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list) else value


def measured(check: str, found: float, tolerance: float, note: str) -> Row:
    """A NaN is a failure."""
    return Row(check, found, tolerance, OK if found <= tolerance else FAILED, note)
