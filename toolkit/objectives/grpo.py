"""Completions that the model in training has sampled and that rewards have scored (GRPO and its kin)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from toolkit.data.samples.samples import IGNORED, Batch
from toolkit.data.samples.sequence_parts import predictions_of
from toolkit.errors import BadInputError
from toolkit.objectives.causal_lm import CausalLM
from toolkit.objectives.completions import OfCompletions
from toolkit.objectives.losses.policy_losses import policy_losses, token_weights
from toolkit.objectives.losses.preference_losses import summed_by_document
from toolkit.objectives.objective import OF_BASE, Ingredients, Objective, RunsWindows


class Reference:
    """A frozen copy of the model that training started from; see `FrozenModel`."""

    def __init__(self, model: nn.Module, packed: bool) -> None:
        self.model = model.eval().requires_grad_(False)
        self.causal = CausalLM(model, packed)
        self.gathering: Callable[[], AbstractContextManager[None]] = nullcontext


class Grpo(OfCompletions):
    """Group-relative policy gradient on fresh samples; the losses of `losses/policy_losses.py` on a causal model.

    A batch holds completions after their prompts: `segments` (B, T) number them, `advantages` (R,) are theirs, and
    `drawn` (B, T) is the log-probability (nats) with which each token was sampled. Labels are the learned tokens.

    Args:
        loss: how the losses of tokens are averaged; see `token_weights`.
        beta: weight of KL(policy || reference); the reference is the model with its adapters off, or `reference`.
        max_new_tokens: the most tokens of a completion.
        apart, continued: see `OfCompletions`.
        reference: the model that training started from, if every weight of `model` is trained.

    Raises:
        BadInputError: if there is a `beta`, and an adapter is trained further.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: str,
        beta: float,
        max_new_tokens: int,
        apart: bool = False,
        continued: bool = False,
        reference: nn.Module | None = None,
    ) -> None:
        super().__init__(model, apart, continued)
        self._reference = None if reference is None else Reference(reference, packed=not apart)
        self.teacher = self._reference
        self.unit = "targets" if loss == "dapo" else "rows"
        self._loss, self._beta, self._max_new_tokens = loss, beta, max_new_tokens
        if beta and self._adapted is None and reference is None:
            raise BadInputError(
                "objective.beta: the reference of grpo is the model under a new adapter, or the one that training of "
                "every weight starts from, and an adapter is trained further; remove adapter.start_from or "
                "objective.beta (null: no reference)"
            )

    @classmethod
    def build(cls, of: Ingredients) -> Objective:
        section = of.section
        assert section.max_new_tokens is not None, "the section checks it"
        apart = of.apart or not of.packed
        return cls(
            of.model, section.chosen_loss, section.beta or 0.0, section.max_new_tokens, apart, of.continued, of.teacher
        )

    @property
    def figures(self) -> tuple[str, ...]:
        return ("sampler_gap", "kl", "learned")

    def count_targets(self, batch: Batch) -> int:
        """Returns the learned tokens (dapo), or the completions without those that a reward leaves out."""
        if self.unit == "targets":
            return int((predictions_of(batch)[0] != IGNORED).sum())
        return int(batch["advantages"].isfinite().sum())

    def by_document(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns the log-probabilities of the completions' learned tokens, (R, 1)."""
        num_segments = int(batch["segments"].max()) + 1
        return self._causal.segment_log_probabilities(model, batch, num_segments)[0][:, None]

    def token_log_probabilities(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns the log-probability of each learned token (nats), (B * T,), float32; it is 0 elsewhere."""
        return -self._causal.losses_of_tokens(model, batch)

    def looked_at(self, model: nn.Module, batches: list[Batch], run: RunsWindows) -> list[Batch]:
        """Returns the batches with the base's log-probability of each token, (B * T,), if there is a `beta`."""
        if not self._beta or self._reference is not None:
            return batches
        return self._with_base(model, batches, run, self.token_log_probabilities)

    def _of_reference(self, model: nn.Module, batch: Batch) -> torch.Tensor | None:
        if not self._beta or OF_BASE in batch:
            return batch.get(OF_BASE)
        if self._reference is not None:
            with torch.no_grad():
                return -self._reference.causal.losses_of_tokens(self._reference.model, batch)
        with self._as_base(model):
            return self.token_log_probabilities(model, batch)

    def training_sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the summed loss, 0-dim, and sums over the learned tokens, (3,).

        These are |log-probability in training - log-probability at sampling|, the estimates of the KL, and their
        number.
        """
        reference = self._of_reference(model, batch)
        targets, owners = (tensor.flatten() for tensor in _with_owners(batch))
        learned = targets != IGNORED
        mine = self.token_log_probabilities(model, batch)
        num_segments, owner = len(batch["advantages"]), owners.clamp_min(0)
        _, lengths = summed_by_document(learned.float(), owners, num_segments)
        weights = token_weights(self._loss, lengths, self._max_new_tokens)
        losses, estimates = policy_losses(mine, batch["advantages"].nan_to_num()[owner], reference, self._beta)
        # The token at t is predicted at t - 1.
        drawn = batch["drawn"].roll(-1, dims=1).flatten()
        gaps = (drawn - mine.detach()).abs()
        figures = torch.stack([gaps, estimates, torch.ones_like(gaps)]).masked_fill(~learned, 0.0)
        # Filled, not multiplied by 0, which would let a NaN through.
        return (weights[owner] * losses).masked_fill(~learned, 0.0).sum(), figures.sum(dim=1)

    def training_record(self, means: list[float]) -> dict[str, Any]:
        gap, kl, learned = means
        per_token = max(learned, torch.finfo(torch.float32).tiny)
        found = {"sampler_gap": gap / per_token}
        return found | {"kl": kl / per_token} if self._beta else found

    def evaluation_sums(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        raise NotImplementedError("grpo has no held-out rows with a loss; its answers are what is evaluated")


def _with_owners(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    targets, owners = predictions_of(batch)
    assert owners is not None, "completions have segments"
    return targets, owners
