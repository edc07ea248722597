"""The Bradley-Terry objective: it scores chosen completions above rejected ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from toolkit.data.samples.documents_apart import documents_apart
from toolkit.data.samples.samples import Batch
from toolkit.errors import BadInputError
from toolkit.model.adapters.adapters import base_of
from toolkit.model.structure.fake_tensors import has_values
from toolkit.objectives.causal_lm import CausalLM
from toolkit.objectives.completions import learned
from toolkit.objectives.losses.preference_losses import share_won
from toolkit.objectives.losses.scores import any_places, at_places, places_of, scores_of_tokens
from toolkit.objectives.objective import Ingredients, Objective
from toolkit.sharding.fsdp2.fsdp import class_name


def bradley_terry(
    chosen: torch.Tensor, rejected: torch.Tensor, margin: torch.Tensor, center_rewards_coefficient: float = 0.0
) -> torch.Tensor:
    """Returns -log sigma(r_w - r_l - m) + c (r_w + r_l)^2 of P pairs, each tensor (P,).

    The first term is the negative log-likelihood of the Bradley-Terry model (arXiv 2203.02155, eq. 1) with the margin
    m of Llama 2 (arXiv 2307.09288, eq. 2); the second keeps rewards around 0 (arXiv 2312.09244, eq. 2).
    """
    return -F.logsigmoid(chosen - rejected - margin) + center_rewards_coefficient * (chosen + rejected) ** 2


class Reward(Objective):
    """The Bradley-Terry loss, summed over the pairs, on a decoder with a linear head of one score.

    A completion's reward is the score of its last token that is not padding, as in transformers' sequence classifiers.
    If texts are padded with the token that ends them, it is the token before that one.

    Args:
        apart: whether each completion has a row of its own; otherwise those of a pair share one.

    Raises:
        BadInputError: if the model is not a decoder with a linear head `score`.
    """

    unit = "pairs"
    needs_documents = True

    def __init__(self, model: nn.Module, center_rewards_coefficient: float = 0.0, apart: bool = False) -> None:
        base = base_of(model)
        if not hasattr(base, "score") or base.config.is_encoder_decoder:
            raise BadInputError(
                f"objective.kind: reward needs a decoder with a linear head called `score`, and {class_name(base)} has "
                "none; name a causal language model in model.name_or_path"
            )
        self._coefficient = center_rewards_coefficient
        pad_id = base.config.get_text_config().pad_token_id
        self._pad_id = -1 if pad_id is None else pad_id
        self.apart = apart
        self._causal = CausalLM(model, packed=not apart)

    @classmethod
    def build(cls, of: Ingredients) -> Objective:
        return cls(of.model, of.section.center_rewards_coefficient or 0.0, of.apart)

    @property
    def figures(self) -> tuple[str, ...]:
        return ("accuracy", "margin", "chosen_reward", "rejected_reward")

    def count_targets(self, batch: Batch) -> int:
        """Returns the number of pairs; those that fill up a held-out batch do not count, shared ones on one rank."""
        return int(learned(batch, len(batch["margin"]), 2).sum())

    def on_host(self, batch: Batch) -> dict[str, Any]:
        """Adds what `CausalLM.on_host` adds, and `_reward_places`."""
        if "margin" not in batch:  # completions to try the model on
            return self._causal.on_host(batch)
        batch = documents_apart(batch) if self.apart else batch
        known = {name: value for name, value in self._causal.on_host(batch).items() if name != "whole_ids"}
        return {**known, **self._reward_places(batch)}

    def logits(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns the score of every token, (B, T, 1)."""
        return scores_of_tokens(model, lambda: self._causal.logits(model, batch))

    def rewards(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns the rewards of the chosen and the rejected completion of each pair, (P, 2), float32."""
        return at_places(self.logits(model, batch), batch).view(-1, 2)

    def by_document(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns rewards (P, 2)."""
        return self.rewards(model, batch)

    def training_sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        if "ends" not in batch:
            batch = {**batch, **self._reward_places(batch)}
        chosen, rejected = self.rewards(model, batch).unbind(dim=1)
        losses = bradley_terry(chosen, rejected, batch["margin"], self._coefficient)
        # Filled, not multiplied by 0, which would let a NaN through.
        others = ~batch["learned"]
        figures = _figures(chosen.detach(), rejected.detach()).masked_fill(others, 0.0)
        return losses.masked_fill(others, 0.0).sum(), figures.sum(dim=1)

    def _reward_places(self, batch: Batch) -> Batch:
        """Returns where each completion's reward is, (2 P,), see `places_of`; and the learned pairs, (P,), bool."""
        segments, count = batch["segments"], 2 * len(batch["margin"])
        known = {"learned": learned(batch, len(batch["margin"]), 2)}
        if not has_values(segments):
            return {**any_places(count, batch), **known}
        ids, segments = batch.get("whole_ids", batch["input_ids"]).flatten(), segments.flatten()
        places = torch.arange(len(ids), device=ids.device)
        lasts = torch.full((count,), -1, device=ids.device)
        for chosen in (segments >= 0) & (ids != self._pad_id), segments >= 0:
            found = torch.full_like(lasts, -1).scatter_reduce(0, segments[chosen], places[chosen], "amax")
            lasts = torch.where(lasts < 0, found, lasts)  # the second time for completions of padding alone
        length = batch["segments"].shape[1]
        return {**places_of(lasts // length, lasts % length, batch), **known}

    def evaluation_sums(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns the loss, the number of pairs, and `figures`, (6,), float64."""
        loss, figures = self.training_sums(model, batch)
        return torch.cat([torch.stack([loss, batch["learned"].sum()]), figures]).double()

    def judged(self, logits: torch.Tensor, batch: Batch, names: Sequence[str]) -> list[dict[str, Any]]:
        rewards = at_places(logits, batch).view(-1, 2).tolist()
        return [{"chosen_reward": chosen, "rejected_reward": rejected} for chosen, rejected in rewards]


def _figures(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """Returns `Reward.figures` of each pair, (4, P)."""
    margins = chosen - rejected
    return torch.stack([share_won(margins), margins, chosen, rejected])
