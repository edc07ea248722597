"""Computes the learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from toolkit.errors import counted
from toolkit.recipe.schema import ScheduleSection

DEFAULT_DECAY_FRACTION = 0.1
"""Default share of the steps that decay under warmup_stable_decay (MiniCPM, arXiv 2404.06395)."""


def build_schedule(optimizer: torch.optim.Optimizer, section: ScheduleSection, num_steps: int) -> LambdaLR:
    """Returns a scheduler that is stepped once per optimizer step, whatever the number of ranks."""
    return LambdaLR(optimizer, learning_rate_factor(section, num_steps))


def learning_rate_factor(section: ScheduleSection, num_steps: int) -> Callable[[int], float]:
    """Returns the function from a step (from 0) to the factor on the peak learning rate.

    It has a linear warm-up, (step + 1) / (warm-up + 1), so that the first step moves, and then the section's shape,
    which reaches `min_factor` one step after the last of `num_steps`, as in transformers: with a factor of 0 the
    last step would cost time and change nothing.
    """
    warmup = warmup_steps(section, num_steps)
    decay_start = max(warmup, num_steps - _decay_steps(section, num_steps))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if section.kind == "constant":
            return 1.0
        progress = (step - decay_start) / max(1, num_steps - decay_start)
        progress = min(max(progress, 0.0), 1.0)
        shape = 0.5 * (1 + math.cos(math.pi * progress)) if section.kind == "cosine" else 1 - progress
        return section.min_factor + (1 - section.min_factor) * shape

    return factor


def changed_rate(schedule: LambdaLR, records: Sequence[dict[str, Any]]) -> str | None:
    """Returns a warning if a resumed run has another learning rate than where it was saved, else None.

    More steps stretch a schedule: where a rate had decayed to its floor, it is near its peak again.

    Args:
        schedule: that of this run, stepped to where it resumes.
        records: the records of the run up to there.
    """
    before = [record for record in records if record["split"] == "train"]
    if not before:
        return None
    step, was, of_extensions = before[-1]["step"], before[-1].get("learning_rate"), before[-1].get("rate_factor", 1.0)
    if not isinstance(was, float) or not of_extensions:  # of a version that did not record it; or an extension set 0
        return None
    was /= of_extensions
    peak, factor = schedule.base_lrs[0], schedule.lr_lambdas[0]
    # The last step of the records used the rate before the present one, or the present one if it was skipped.
    here = [peak * factor(max(0, position)) for position in (schedule.last_epoch - 1, schedule.last_epoch)]
    if any(math.isclose(was, rate, rel_tol=1e-6) for rate in here):
        return None
    return (
        f"the learning rate was {was:.6g} in step {step:,}, and is {here[1]:.6g} in the next: the steps, the schedule "
        f"or the rate of the recipe have changed since; to go on at the old rate, set 'schedule={{kind: constant}}' "
        f"and optimizer.learning_rate={was:.6g}"
    )


def warmup_steps(section: ScheduleSection, num_steps: int) -> int:
    """Returns the length of the warm-up in optimizer steps."""
    if section.warmup_steps is not None:
        return section.warmup_steps
    return round((section.warmup_fraction or 0.0) * num_steps)


def _decay_steps(section: ScheduleSection, num_steps: int) -> int:
    """Returns the length of the decay in optimizer steps, before it is clipped to what the warm-up leaves."""
    if section.kind != "warmup_stable_decay":
        return num_steps
    fraction = DEFAULT_DECAY_FRACTION if section.decay_fraction is None else section.decay_fraction
    return round(fraction * num_steps)


def schedule_fact(section: ScheduleSection, peak: float, num_steps: int) -> str:
    """Describes the learning rates of a run."""
    warmup = warmup_steps(section, num_steps)
    end, decay = f"{section.min_factor * peak:g}", counted(_decay_steps(section, num_steps), "step")
    shapes = {
        "constant": "constant",
        "linear": f"linear to {end}",
        "cosine": f"cosine to {end}",
        "warmup_stable_decay": f"constant, and linear to {end} over the last {decay}",
    }
    begin = f"{peak:g} after a linear warm-up over {counted(warmup, 'step')}, then " if warmup else f"{peak:g}, "
    return begin + shapes[section.kind]


def without_peak(section: ScheduleSection, peak: float, num_steps: int) -> str | None:
    """Returns a warning if the run ends in its warm-up, else None."""
    warmup = warmup_steps(section, num_steps)
    if warmup < num_steps:
        return None
    highest = peak * learning_rate_factor(section, num_steps)(num_steps - 1)
    return (
        f"this run of {counted(num_steps, 'step')} ends within its warm-up of {warmup:,}: its learning rate reaches "
        f"{highest:.3g} of {peak:g}; lower schedule.warmup_steps, or set schedule.warmup_fraction in its place"
    )
