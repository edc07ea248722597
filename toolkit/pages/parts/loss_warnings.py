"""Warnings about the losses of a finished run, and about rewards, with what to look at."""

from __future__ import annotations

import math
import statistics
from typing import Any

from toolkit.pages.parts.run_metrics import samples_itself

FEWEST_STEPS = 10
"""Runs of fewer steps get no warning, because random weights stay near the uniform guess for a while."""

NEAR = 0.98
"""Share of the uniform guess's loss above which a run has learned almost nothing."""

FALLS = 2
"""Evaluations in a row at which held-out answers get worse while the reward rises, before a warning."""

WORSE = 1.001
"""Factor on the held-out loss before the first step; a smaller increase is rounding noise."""


def doubts_of(metrics: list[dict[str, Any]], guess: tuple[int, str] | None) -> list[str]:
    """Returns a sentence for each reason to doubt the run; none if it went well.

    Args:
        guess: the number and name of the answers of a uniform guess, whose loss is the number's logarithm (nats).
    """
    if samples_itself(metrics):  # its loss says nothing
        return [told] if (told := gamed(metrics)) is not None else []
    train = [_loss(record) for record in metrics if record["split"] == "train"]
    held_out = [_loss(record) for record in metrics if record["split"] == "eval" and "loss" in record]
    return [
        doubt
        for doubt in (_at_the_uniform_guess(train, guess), _worse_than_before(held_out, train))
        if doubt is not None
    ]


def _loss(record: dict[str, Any]) -> float:
    """Returns the loss; it is infinite for null, which stands for a loss that is not finite."""
    return math.inf if record["loss"] is None else float(record["loss"])


def _first_and_last_medians(losses: list[float]) -> tuple[float, float]:
    """Returns the medians of the first and of the last tenth, because single steps are noisy."""
    width = max(1, len(losses) // 10)
    return statistics.median(losses[:width]), statistics.median(losses[-width:])


def _at_the_uniform_guess(train: list[float], guess: tuple[int, str] | None) -> str | None:
    if guess is None or len(train) < FEWEST_STEPS:
        return None
    number, what = guess
    first, last = _first_and_last_medians(train)
    if min(last, statistics.median(train[-len(train) // 4 :])) < NEAR * math.log(number):
        return None
    return (
        f"the training loss ended at {last:.4g}, no better than a uniform guess over {number:,} "
        f"{what} ({math.log(number):.4g}); it began at {first:.4g}: lower optimizer.learning_rate, lengthen "
        "schedule.warmup_steps, and see in data_report.html what is learned"
    )


def _worse_than_before(held_out: list[float], train: list[float]) -> str | None:
    if len(held_out) < 2 or not held_out[-1] > WORSE * held_out[0]:
        return None
    told = f"the held-out loss is {held_out[-1]:.4g} after the last step, worse than {held_out[0]:.4g} before the first"
    first, last = _first_and_last_medians(train) if train else (math.nan, math.nan)
    if last < first:
        return (
            f"{told}, while the training loss fell from {first:.4g} to {last:.4g}: train fewer steps or on more rows, "
            "lower optimizer.learning_rate, and see whether the held-out rows are of the same kind as the others"
        )
    return f"{told}: lower optimizer.learning_rate, lengthen schedule.warmup_steps, and look at the data of the run"


def gamed(metrics: list[dict[str, Any]]) -> str | None:
    """Returns a sentence if the reward rose while held-out answers got worse at two evaluations in a row, else None.

    Each of these evaluations is compared with the one before it, and so are the mean rewards of the steps up to them.
    """
    intervals: list[tuple[float, float]] = []  # the mean reward of the steps before an evaluation, and its answers
    rewards: list[float] = []
    falls = 0
    for record in metrics:
        if record["split"] == "train":
            rewards.append(record["reward"])
        elif "answer_accuracy" in record:
            # Before the first step there is no reward, and any is above that.
            intervals.append((statistics.fmean(rewards) if rewards else -math.inf, record["answer_accuracy"]))
            rewards = []
            is_fall = len(intervals) > 1 and intervals[-1][0] > intervals[-2][0] and intervals[-1][1] < intervals[-2][1]
            falls = falls + 1 if is_fall else 0
            if falls == FALLS:
                return _told_of_falls(intervals[-1 - FALLS :])
    return None


def _told_of_falls(intervals: list[tuple[float, float]]) -> str:
    (_, answers), *_, (reward, worse) = intervals
    return (
        f"held-out answers fell from {answers:.1%} to {worse:.1%} right over {FALLS} evaluations, while the reward "
        f"rose to {reward:.3g}: completions may earn it otherwise than by right answers; see the samples in "
        "report.html, change objective.rewards, or train fewer steps"
    )
