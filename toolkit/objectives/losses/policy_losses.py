"""Group-relative policy gradients: advantages of sampled completions, and the loss of each of their tokens.

A group is the G completions sampled for one prompt. The completions are fresh: the weights that are trained have
sampled them. So the importance ratio of a token is 1, and only its gradient matters: exp(l - stop_gradient(l)), for
the token's log-probability l (nats).
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch

Floats = np.ndarray[Any, np.dtype[np.float64]]

LEAST_SPREAD = 1e-4
"""Added to the standard deviation by which advantages are divided, as in TRL's GRPOTrainer."""


def advantages_of(rewards: Floats, group_size: int, scale: Literal["group", "batch", "none"]) -> Floats:
    """Returns how much better each completion is than the mean of its group (arXiv 2402.03300, section 4.1.2).

    Args:
        rewards: (N,), float64; the completions of a group are neighbours. NaN leaves a completion out of its group.
        scale: what differences are divided by: the standard deviation of the group, that of all N rewards, or nothing
            (arXiv 2503.20783); with Bessel's correction.

    Returns:
        (N,), float64; 0 in a group whose rewards are all equal, and NaN where the reward is.
    """
    groups = rewards.reshape(-1, group_size)
    if np.isnan(rewards).any():
        groups = np.ma.masked_invalid(groups)
    above: Floats = groups - groups.mean(axis=1, keepdims=True)
    # The mean of equal numbers may be one bit off, and 1e-17 / 1e-4 is no advantage.
    above[np.ma.filled(groups.min(axis=1) == groups.max(axis=1), False)] = 0.0
    if scale == "group":
        above = above / (groups.std(axis=1, ddof=1, keepdims=True) + LEAST_SPREAD)
    if scale == "batch":
        above = above / (groups.reshape(-1).std(ddof=1) + LEAST_SPREAD)
    return np.where(np.isnan(rewards), np.nan, np.ma.filled(above, 0.0).reshape(-1))


def token_weights(loss: str, lengths: torch.Tensor, max_new_tokens: int) -> torch.Tensor:
    """Returns the weight of each token of a completion in the step's sum, (R,), float32.

    The sum is divided by the step's learned tokens (dapo, arXiv 2503.14476, eq. 8), or by its completions (grpo,
    whose tokens' losses are averaged in each completion; dr_grpo, arXiv 2503.20783, whose sums are divided by one
    constant).

    Args:
        lengths: learned tokens of each of R completions, (R,).
        max_new_tokens: the most tokens of a completion, dr_grpo's constant.
    """
    if loss == "grpo":
        return 1.0 / lengths.clamp_min(1).float()
    return torch.full_like(lengths, 1.0 / max_new_tokens if loss == "dr_grpo" else 1.0, dtype=torch.float32)


def policy_losses(
    log_probabilities: torch.Tensor, advantages: torch.Tensor, reference: torch.Tensor | None, beta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the loss of each token and its estimate of KL(policy || reference) (nats), both (N,), float32.

    -ratio * A + beta * ratio * k3 with k3 = exp(d) - d - 1, d = log ref - log pi. The estimate is multiplied by the
    ratio, without which its gradient is not that of the KL (arXiv 2512.02556, section 3.1).

    Args:
        log_probabilities: log pi of the tokens (nats), (N,), with a graph.
        advantages: of the tokens' completions, (N,).
        reference: log ref of the tokens (nats), (N,), or None if `beta` is 0.
    """
    ratios = (log_probabilities - log_probabilities.detach()).exp()
    losses = -ratios * advantages
    if reference is None:
        return losses, torch.zeros_like(losses)
    difference = reference - log_probabilities
    estimates = difference.exp() - difference - 1
    return losses + beta * ratios * estimates, estimates.detach()
