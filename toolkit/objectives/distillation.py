"""Distillation: a student learns the next-token probabilities of a teacher with the same tokens."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from toolkit.data.samples.samples import Batch
from toolkit.errors import BadInputError
from toolkit.model.structure.without_dropout import without_dropout
from toolkit.objectives.causal_lm import HEAD_LOSS_TOLERANCE, CausalLM, rows_of
from toolkit.objectives.losses.divergence import ENTRIES, Divergence, summed_divergence
from toolkit.objectives.losses.fused_linear_cross_entropy import AfterHead, chunk_tokens
from toolkit.objectives.objective import Ingredients, Objective
from toolkit.objectives.teacher import Teacher, require_head_loss


class Distillation(Objective):
    """`Divergence` of a student from its teacher, summed over the tokens that causal LM would learn.

    Args:
        packed: whether documents share samples.
    """

    def __init__(self, model: nn.Module, packed: bool, teacher: nn.Module, divergence: Divergence) -> None:
        self.divergence = divergence
        self._causal = CausalLM(model, packed)
        self._head_loss = require_head_loss(self._causal, "model")
        self.teacher: Teacher = Teacher(teacher, packed)

    @classmethod
    def build(cls, of: Ingredients) -> Objective:
        section = of.section
        assert of.teacher is not None, "a distillation has a teacher"
        kind, ratio = section.divergence or "forward_kl", section.kd_ratio or 0.5
        divergence = Divergence(kind, section.beta or 0.5, section.temperature or 1.0, ratio)
        return cls(of.model, of.packed, of.teacher, divergence)

    @property
    def figures(self) -> tuple[str, ...]:
        return ("divergence", "cross_entropy")

    def count_targets(self, batch: Batch) -> int:
        return self._causal.count_targets(batch)

    def on_host(self, batch: Batch) -> dict[str, Any]:
        """Adds what `CausalLM.on_host` adds."""
        return self._causal.on_host(batch)

    def logits(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns the student's logits (B, T, V)."""
        return self._causal.logits(model, batch)

    def training_sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        targets, counted = self._causal.targets(batch), batch.get("counted")
        # Before the student's forward, when only N hidden states of the teacher have to be kept.
        hidden = self.teacher.hidden(batch, targets, counted)
        found: list[torch.Tensor] = []

        def compare(
            rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, chosen: torch.Tensor, after: AfterHead
        ) -> torch.Tensor:
            with self.teacher.side(hidden) as side:
                loss, sums = summed_divergence(rows, weight, bias, chosen, side, self.divergence, after)
            found.append(sums)
            return loss

        with rows_of(batch):
            loss = self._head_loss.run(compare, model, self._causal.inputs(batch), targets, counted)[0].squeeze()
        return loss, found[0].flip(0)

    @torch.no_grad()
    def check_head_loss(self, model: nn.Module, device: torch.device, in_16_bits: bool) -> str:
        """Compares the loss of a few tokens with that of full logits. Every rank calls this.

        Returns:
            A description of how the loss is computed, for the run summary.

        Raises:
            BadInputError: if the two losses differ.
        """
        batch = self._causal.few_tokens(min(self._head_loss.vocabulary, self.teacher.head_loss.vocabulary), device)
        both = ((self._causal, model), (self.teacher.causal, self.teacher.model))
        with without_dropout(model):
            found = self.loss_sum(model, batch).item()
            z, y = (causal.logits(of, batch).flatten(0, 1).float() for causal, of in both)
        sums = self.divergence.compare(z.clone(), y[:, : z.shape[1]].clone(), self._causal.targets(batch).clamp_min(0))
        counts = self._causal.targets(batch) >= 0
        whole = self.divergence.loss(*(each[counts].sum() for each in sums)).item()
        if math.isfinite(whole) and not abs(found - whole) <= HEAD_LOSS_TOLERANCE[in_16_bits] * max(1.0, abs(whole)):
            raise BadInputError(
                f"objective.kind distillation: on a few tokens the heads' inputs give a loss of {found:.6g}, and whole "
                f"logits {whole:.6g}: the model or the teacher makes its logits in a way that is not known; name others"
            )
        tokens = chunk_tokens(self._head_loss.vocabulary, ENTRIES)
        return f"from the heads' inputs, logits of {tokens:,} tokens at a time"

    def evaluation_sums(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns the loss, the number of target tokens, and `figures`, (4,), float64."""
        loss, figures = self.training_sums(model, batch)
        return torch.cat([torch.stack([loss, (self._causal.targets(batch) >= 0).sum()]), figures]).double()

    def evaluation_record(self, sums: list[float]) -> dict[str, Any]:
        """Returns the means of loss, divergence and the labels' cross-entropy, and the perplexity of the latter."""
        tokens = max(1.0, sums[1])
        divergence, cross_entropy = (value / tokens for value in sums[2:])
        record = self._causal.evaluation_record([sums[3], sums[1]])
        return {**record, "loss": sums[0] / tokens, "divergence": divergence, "cross_entropy": cross_entropy}
