"""The loop that runs are compared with: torch's own optimizer on one process, without any of the toolkit's code."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Trained:
    """The loss of each step, the norm of its gradients before clipping, and the weights after the last step."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


def plain_loop(
    model: nn.Module,
    steps: Iterable[Any],
    loss_of: Callable[[Any], torch.Tensor],
    *,
    rates: float | Sequence[float] = 2e-3,
    decay: float = 0.0,
    eps: float = 1e-8,
    max_norm: float | None = 0.5,
    optimizer: Any = None,
    after_step: Callable[[int], None] = lambda step: None,
) -> Trained:
    """Trains the parameters that require gradients.

    Args:
        steps: what `loss_of` is given in each optimizer step.
        rates: the learning rate, or that of each step.
        decay: weight decay of the parameters that have more than one dimension.
        optimizer: one in place of AdamW, whose rates and decay are its own.
        after_step: called with the number of steps that were taken.
    """
    torch.set_num_threads(1)
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    by_hand = optimizer or adamw(named.values(), decay=decay, eps=eps)
    losses, norms = [], []
    for number, step in enumerate(steps):
        loss = loss_of(step)
        loss.backward()
        gradients = [parameter.grad for parameter in named.values() if parameter.grad is not None]
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
        if max_norm is not None and norm > max_norm:
            for gradient in gradients:
                gradient.mul_(max_norm / (norm + 1e-6))
        if optimizer is None:
            for group in by_hand.param_groups:
                group["lr"] = rates if isinstance(rates, float) else rates[number]
        by_hand.step()
        for parameter in named.values():
            parameter.grad = None
        losses.append(loss.item())
        norms.append(norm)
        after_step(number + 1)
    return Trained(losses, norms, {name: parameter.detach().clone() for name, parameter in model.named_parameters()})


def require_no_drift(differences: torch.Tensor, what: object) -> None:
    """Small errors of right runs have no direction: the mean (of any shape) is zero within five times its error."""
    error = float(differences.double().std()) / math.sqrt(differences.numel())
    assert abs(float(differences.double().mean())) <= 5 * error, f"{what}: all differ by {differences.mean():.1e}"


def adamw(parameters: Iterable[nn.Parameter], rate: float = 2e-3, decay: float = 0.0, eps: float = 1e-8) -> Any:
    """torch's AdamW, which decays matrices and leaves vectors alone."""
    held = list(parameters)
    groups = [
        {"params": [p for p in held if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in held if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, eps=eps, foreach=False)


def in_turn(rows: Sequence[Any], per_step: int, steps: int) -> list[list[Any]]:
    """The rows of each step, taken in turn, and from the first again after the last."""
    return [[rows[(step * per_step + i) % len(rows)] for i in range(per_step)] for step in range(steps)]
