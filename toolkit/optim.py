"""Parameter groups, optimizer and learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from toolkit.recipe import OptimizerSection, ScheduleSection

DEFAULT_DECAY_FRACTION = 0.1
"""Share of the steps that decay under warmup_stable_decay (MiniCPM, arXiv 2404.06395)."""


def build_optimizer(model: nn.Module, section: OptimizerSection) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101) over the trainable parameters, fused: foreach is 4 times slower on CPU."""
    return torch.optim.AdamW(
        parameter_groups(model, section.weight_decay),
        lr=section.learning_rate,
        betas=(section.beta1, section.beta2),
        eps=section.eps,
        fused=True,
    )


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Matrices, which decay, and vectors (biases and norms), which don't; empty groups are left out."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, object]] = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_schedule(optimizer: torch.optim.Optimizer, section: ScheduleSection, num_steps: int) -> LambdaLR:
    """A scheduler to be stepped once per optimizer step, whatever the number of ranks."""
    return LambdaLR(optimizer, learning_rate_factor(section, num_steps))


def learning_rate_factor(section: ScheduleSection, num_steps: int) -> Callable[[int], float]:
    """Step (from 0) -> factor of the peak learning rate.

    Linear warm-up ((step + 1) / (warm-up + 1), so that the first step moves), then the section's shape,
    which reaches `min_factor` at the last step of `num_steps`.
    """
    warmup = warmup_steps(section, num_steps)
    decay_start = warmup
    if section.kind == "warmup_stable_decay":
        fraction = DEFAULT_DECAY_FRACTION if section.decay_fraction is None else section.decay_fraction
        decay_start = max(warmup, num_steps - round(fraction * num_steps))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if section.kind == "constant":
            return 1.0
        progress = (step - decay_start) / max(1, num_steps - 1 - decay_start)
        progress = min(max(progress, 0.0), 1.0)
        shape = 0.5 * (1 + math.cos(math.pi * progress)) if section.kind == "cosine" else 1 - progress
        return section.min_factor + (1 - section.min_factor) * shape

    return factor


def warmup_steps(section: ScheduleSection, num_steps: int) -> int:
    """Length of the warm-up in optimizer steps."""
    if section.warmup_steps is not None:
        return section.warmup_steps
    return round((section.warmup_fraction or 0.0) * num_steps)
