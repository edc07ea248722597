"""Chosen completions over rejected ones: the losses of `losses/preference_losses.py` on a causal model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from toolkit.data.samples.samples import Batch
from toolkit.objectives.completions import OfCompletions, learned
from toolkit.objectives.losses.preference_losses import LOSSES, Loss, Pairs
from toolkit.objectives.objective import OF_BASE, Ingredients, Objective, RunsWindows

FIGURES = ("accuracy", "margin", "chosen_reward", "rejected_reward", "kl")
"""Metrics of preferences in steps and evaluations; the last one needs a reference."""


class Preference(OfCompletions):
    """Chosen completions over rejected ones; the loss of `preference_losses` summed over the pairs.

    The reference's log-probabilities come with the batch, or are those of the model with its adapters off.

    Args:
        apart: whether each completion has a row of its own; otherwise those of a pair share one.
        continued: whether the model's adapters were trained before, so that the model without them is not a reference.
    """

    unit = "pairs"

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        settings: Mapping[str, float | None],
        apart: bool = False,
        continued: bool = False,
    ) -> None:
        super().__init__(model, apart, continued)
        self.loss = loss
        self._settings = settings

    @classmethod
    def build(cls, of: Ingredients) -> Objective:
        given = {key: getattr(of.section, key) for key in ("beta", "label_smoothing", "gamma", "odds_weight")}
        return cls(of.model, LOSSES[of.section.chosen_loss], given, of.apart, of.continued)

    @property
    def needs_references(self) -> bool:
        """Whether the reference's log-probabilities must come with each batch."""
        return self.loss.needs_reference and self._adapted is None

    def count_targets(self, batch: Batch) -> int:
        """Returns the number of pairs with targets; rows that ranks share count on the rank with the first part."""
        return int(learned(batch, len(batch["reference"]), 2).sum())

    def log_probabilities(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns log-probabilities of each pair's chosen and rejected completion, (P, 2), and their tokens, (P, 2)."""
        num_segments = 2 * len(batch["reference"])
        sums, counts = self._causal.segment_log_probabilities(model, batch, num_segments)
        return sums.view(-1, 2), counts.view(-1, 2)

    def by_document(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns log-probabilities (P, 2)."""
        return self.log_probabilities(model, batch)[0]

    @property
    def figures(self) -> tuple[str, ...]:
        """Rewards, their margin and accuracy, and KL if there is a reference."""
        return FIGURES if self.loss.needs_reference else FIGURES[:-1]

    def training_sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        losses, figures, counted = self._losses_and_figures(model, batch)
        # Filled, not multiplied by 0, which would let a NaN through.
        sums = torch.stack([figures[name].masked_fill(~counted, 0.0).sum() for name in self.figures])
        return losses.masked_fill(~counted, 0.0).sum(), sums

    def _losses_and_figures(
        self, model: nn.Module, batch: Batch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
        """Returns the losses, the figures and which pairs count, each (P,)."""
        reference = self._reference(model, batch)
        sums, counts = self.log_probabilities(model, batch)
        of_reference = () if reference is None else (reference[:, 0], reference[:, 1])
        pairs = Pairs(sums[:, 0], sums[:, 1], counts[:, 0], counts[:, 1], *of_reference)
        losses, figures = self.loss(pairs, self._settings)
        # Ranks that share rows have the same sums, and the loss of a pair counts once.
        here = batch["part"] == 0 if "part" in batch else True
        return losses, figures, (counts > 0).all(dim=1) & here

    def _reference(self, model: nn.Module, batch: Batch) -> torch.Tensor | None:
        """Returns the reference's log-probabilities (P, 2), or None if the loss needs none."""
        if not self.loss.needs_reference:
            return None
        if self._adapted is None or OF_BASE in batch:
            return batch["reference" if self._adapted is None else OF_BASE]
        with self._as_base(model):
            return self.by_document(model, batch)

    def looked_at(self, model: nn.Module, batches: list[Batch], run: RunsWindows) -> list[Batch]:
        """Returns the batches with the log-probabilities of the base, (P, 2), if the loss needs them."""
        if not self.loss.needs_reference or self._adapted is None:
            return batches
        return self._with_base(model, batches, run, self.by_document)

    def evaluation_sums(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        losses, figures, counted = self._losses_and_figures(model, batch)
        kept = [losses, counted.float(), *(figures[name] for name in self.figures)]
        return torch.stack([values.double().masked_fill(~counted, 0.0).sum() for values in kept])
