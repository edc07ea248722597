"""Losses on pairs of completions, one preferred over the other, as functions of log-probabilities, without a model.

A pair is a prompt with a chosen (w) and a rejected (l) completion. pi is the policy, that is the model in
training; ref the model it started from; log pi(y|x) the sum of a completion's log-probabilities (nats); |y| its
number of target tokens; sigma the logistic function. Each loss is that of one pair; the caller averages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

CHUNK = 1024
"""Number of positions whose logits are in float32 at the same time."""

Metrics = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Pairs:
    """P pairs, each tensor (P,).

    Attributes:
        chosen: log pi(y_w|x) (nats).
        rejected: log pi(y_l|x) (nats).
        chosen_tokens: |y_w|.
        rejected_tokens: |y_l|.
        reference_chosen: log ref(y_w|x) (nats), or None without a reference.
        reference_rejected: log ref(y_l|x) (nats), or None without a reference.
    """

    chosen: torch.Tensor
    rejected: torch.Tensor
    chosen_tokens: torch.Tensor
    rejected_tokens: torch.Tensor
    reference_chosen: torch.Tensor | None = None
    reference_rejected: torch.Tensor | None = None

    def log_ratios(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns log pi(y|x) - log ref(y|x) of chosen and rejected (nats), each (P,), float32.

        Raises:
            ValueError: if there is no reference.
        """
        if self.reference_chosen is None or self.reference_rejected is None:
            raise ValueError("these pairs have no log-probabilities of a reference model")
        return (
            self.chosen.float() - self.reference_chosen.float(),
            self.rejected.float() - self.reference_rejected.float(),
        )

    def means(self, chosen: torch.Tensor, rejected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Divides sums over the tokens of chosen and rejected, each (P,), by their target tokens; 0 without targets."""
        return chosen.float() / self.chosen_tokens.clamp_min(1), rejected.float() / self.rejected_tokens.clamp_min(1)


@dataclass(frozen=True)
class Terms:
    """The loss of P pairs and the rewards that it implies, each (P,) and float32."""

    losses: torch.Tensor
    chosen: torch.Tensor
    rejected: torch.Tensor


def dpo(pairs: Pairs, beta: float, label_smoothing: float) -> Terms:
    """Direct preference optimisation (arXiv 2305.18290, eq. 7), conservative with label smoothing (its authors' cDPO).

    -(1 - e) log sigma(h) - e log sigma(-h), h = beta (log pi/ref(y_w|x) - log pi/ref(y_l|x)); e is the label
    smoothing. Reward: beta log pi/ref(y|x).
    """
    chosen, rejected = pairs.log_ratios()
    margins = beta * (chosen - rejected)
    losses = -(1 - label_smoothing) * F.logsigmoid(margins) - label_smoothing * F.logsigmoid(-margins)
    return Terms(losses, beta * chosen, beta * rejected)


def ipo(pairs: Pairs, beta: float) -> Terms:
    """Identity preference optimisation (arXiv 2310.12036, eq. 17, whose tau is `beta`).

    (log pi/ref(y_w|x) / |y_w| - log pi/ref(y_l|x) / |y_l| - 1 / (2 beta))^2. The paper writes no division by the
    lengths, without which the same target would hold for completions of any length; TRL's DPOTrainer divides too,
    and notes that the paper's authors confirmed this form. Reward: beta log pi/ref(y|x), not divided.
    """
    chosen, rejected = pairs.log_ratios()
    chosen_mean, rejected_mean = pairs.means(chosen, rejected)
    return Terms((chosen_mean - rejected_mean - 1 / (2 * beta)) ** 2, beta * chosen, beta * rejected)


def simpo(pairs: Pairs, beta: float, gamma: float) -> Terms:
    """Simple preference optimisation (arXiv 2405.14734, eq. 6): no reference, but a margin to reach.

    -log sigma(beta log pi(y_w|x) / |y_w| - beta log pi(y_l|x) / |y_l| - gamma). Reward: beta log pi(y|x) / |y|
    (eq. 4).
    """
    chosen, rejected = pairs.means(pairs.chosen, pairs.rejected)
    return Terms(-F.logsigmoid(beta * (chosen - rejected) - gamma), beta * chosen, beta * rejected)


def orpo(pairs: Pairs, odds_weight: float) -> Terms:
    """Odds ratio preference optimisation (arXiv 2403.07691, eqs. 6 and 7): no reference, and learns the chosen.

    NLL + lambda OR, where NLL = -log pi(y_w|x) / |y_w|, OR = -log sigma(log odds(y_w|x) - log odds(y_l|x)), and
    odds(y|x) = p / (1 - p) of p = exp(log pi(y|x) / |y|) (eqs. 3 and 4); lambda is `odds_weight`. Reward:
    log odds(y|x), which the loss compares; the paper gives no other. It orders completions as p does.
    """
    means = pairs.means(pairs.chosen, pairs.rejected)
    chosen, rejected = (_log_odds(mean) for mean in means)
    return Terms(-means[0] - odds_weight * F.logsigmoid(chosen - rejected), chosen, rejected)


def _log_odds(log_probability: torch.Tensor) -> torch.Tensor:
    """Returns log(p / (1 - p)), (P,), of log p; p is clamped below 1, to float32's resolution, without a gradient."""
    below_zero = log_probability.clamp_max(-torch.finfo(log_probability.dtype).eps)
    return below_zero - torch.log(-torch.expm1(below_zero))


@dataclass(frozen=True)
class Loss:
    """A preference loss and what it takes.

    Attributes:
        name: its name in recipes.
        needs_reference: whether pairs must have a reference's log-probabilities.
        defaults: the settings that have an effect, and their default values.
        terms: computes the loss from pairs and these settings.
    """

    name: str
    needs_reference: bool
    defaults: Mapping[str, float]
    terms: Callable[..., Terms]

    def __call__(
        self, pairs: Pairs, settings: Mapping[str, float | None] | None = None
    ) -> tuple[torch.Tensor, Metrics]:
        """Returns losses (P,), float32, and metrics, each (P,), float32 and without a graph.

        Metrics:
            chosen_reward, rejected_reward: as the loss defines it.
            margin: the chosen's reward less the rejected's.
            accuracy: 1 if the margin is above 0, 0.5 if it is 0, else 0.
            kl: if the pairs have a reference, the mean over chosen and rejected of log pi(y|x) - log ref(y|x)
                (nats per completion). It would estimate KL(pi || ref) on completions drawn from the policy; on
                these it shows how far the policy has moved, and is below 0 if they became less likely.

        Raises:
            ValueError: if pairs lack the reference that the loss needs.
        """
        given = {name: value for name, value in (settings or {}).items() if value is not None}
        terms = self.terms(pairs, **{**self.defaults, **given})
        return terms.losses, _metrics(pairs, terms)


def share_won(margin: torch.Tensor) -> torch.Tensor:
    """Returns 1 for a margin above 0, 0.5 for a tie, else 0, float32, in the margin's shape."""
    return (margin > 0).float() + 0.5 * (margin == 0).float()


@torch.no_grad()
def _metrics(pairs: Pairs, terms: Terms) -> Metrics:
    chosen, rejected = terms.chosen.detach(), terms.rejected.detach()
    margin = chosen - rejected
    metrics = {
        "chosen_reward": chosen,
        "rejected_reward": rejected,
        "margin": margin,
        "accuracy": share_won(margin),
    }
    if pairs.reference_chosen is not None:
        metrics["kl"] = torch.stack(pairs.log_ratios()).mean(dim=0)
    return metrics


LOSSES: dict[str, Loss] = {
    loss.name: loss
    for loss in (
        Loss("dpo", True, {"beta": 0.1, "label_smoothing": 0.0}, dpo),
        Loss("ipo", True, {"beta": 0.1}, ipo),
        Loss("simpo", False, {"beta": 2.0, "gamma": 1.0}, simpo),
        Loss("orpo", False, {"odds_weight": 0.1}, orpo),
    )
}
"""Preference losses by their names in recipes."""


def log_probabilities_by_document(
    logits: torch.Tensor, targets: torch.Tensor, owners: torch.Tensor, num_segments: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the summed log-probabilities of the targets of each document, and their number.

    Only `CHUNK` positions have float32 logits at a time, computed again for the gradient; `logits` themselves are all
    that is kept from the forward to the backward pass.

    Args:
        logits: (B, T, V), of any floating type.
        targets: (B, T), and `owners`, (B, T), as `predicted` returns them.
        num_segments: S.

    Returns:
        Sums (S,), nats, float32, and counts (S,), int64; both are 0 for a document without targets.
    """
    rows, targets = logits.flatten(0, 1), targets.flatten().clamp_min(0)
    chunks = zip(torch.split(rows, CHUNK), torch.split(targets, CHUNK), strict=True)
    # Without gradient the checkpoint only calls the function.
    each = torch.cat(
        [checkpoint(_log_probabilities, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    )
    return summed_by_document(each, owners.flatten(), num_segments)


def summed_by_document(
    each: torch.Tensor, owners: torch.Tensor, num_segments: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns sums (S,) and counts (S,) of values (N,) by their owners (N,); -1 for no document."""
    # Compared and summed, not scattered: atomic additions on a GPU come in another order each time.
    mine = owners == torch.arange(num_segments, device=owners.device)[:, None]  # (S, N)
    return torch.where(mine, each, 0.0).sum(dim=1), mine.sum(dim=1)


def _log_probabilities(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns log-probabilities (N,), float32, of targets (N,) under logits (N, V)."""
    # Both terms use float32 logits: in bfloat16 the two parts of the gradient, p - 1, would cancel to 0 for p near 1.
    logits = logits.float()
    return logits.gather(1, targets[:, None]).squeeze(1) - logits.logsumexp(dim=1)
