"""What the losses of a run that is done say against it, in words, with what to look at."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

from torch import nn

from toolkit.objectives.objective import Objective

FEWEST_STEPS = 10
"""A run of fewer steps is a trial: random weights are near the uniform guess for a while."""

NEAR = 0.98
"""Of the uniform guess: a loss that ends above this share of it has learned nothing to speak of."""

WORSE = 1.001
"""Times the held-out loss before the first step: less is the noise of rounding."""


@dataclass(frozen=True)
class Guess:
    """A guess that takes all answers for equally likely; its loss is the logarithm of their number (nats)."""

    num_answers: int
    what: str

    @property
    def loss(self) -> float:
        return math.log(self.num_answers)


def uniform_guess(objective: Objective, model: nn.Module, class_weights: object) -> Guess | None:
    """The uniform guess of an objective; None if it has none: pairs are compared with a reference."""
    found = objective.uniform_guess(model, class_weights)
    return None if found is None else Guess(*found)


def doubts_of(metrics: list[dict[str, Any]], guess: Guess | None) -> list[str]:
    """A sentence for each thing that speaks against the run; none for one that went well."""
    train = [_loss(record) for record in metrics if record["split"] == "train"]
    held_out = [_loss(record) for record in metrics if record["split"] == "eval"]
    return [doubt for doubt in (_at_the_guess(train, guess), _worse(held_out, train)) if doubt is not None]


def _loss(record: dict[str, Any]) -> float:
    """The loss; infinite where it is not finite, which is written as null."""
    return math.inf if record["loss"] is None else float(record["loss"])


def _ends(losses: list[float]) -> tuple[float, float]:
    """Medians of the first and of the last tenth, since single steps are noise."""
    width = max(1, len(losses) // 10)
    return statistics.median(losses[:width]), statistics.median(losses[-width:])


def _at_the_guess(train: list[float], guess: Guess | None) -> str | None:
    if guess is None or len(train) < FEWEST_STEPS:
        return None
    first, last = _ends(train)
    if min(last, statistics.median(train[-len(train) // 4 :])) < NEAR * guess.loss:
        return None
    return (
        f"the training loss ended at {last:.4g}, no better than a uniform guess over {guess.num_answers:,} "
        f"{guess.what} ({guess.loss:.4g}); it began at {first:.4g}: lower optimizer.learning_rate, lengthen "
        "schedule.warmup_steps, and see in data_report.html what is learned"
    )


def _worse(held_out: list[float], train: list[float]) -> str | None:
    if len(held_out) < 2 or not held_out[-1] > WORSE * held_out[0]:
        return None
    told = f"the held-out loss is {held_out[-1]:.4g} after the last step, worse than {held_out[0]:.4g} before the first"
    first, last = _ends(train) if train else (math.nan, math.nan)
    if last < first:
        return (
            f"{told}, while the training loss fell from {first:.4g} to {last:.4g}: train fewer steps or on more rows, "
            "lower optimizer.learning_rate, and see whether the held-out rows are of the same kind as the others"
        )
    return f"{told}: lower optimizer.learning_rate, lengthen schedule.warmup_steps, and look at the data of the run"
