"""Completions that are judged good or bad one by one (KTO, arXiv 2402.01306)."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from toolkit.data.samples.documents_apart import documents_apart
from toolkit.data.samples.image_samples import is_of_images
from toolkit.data.samples.samples import Batch
from toolkit.data.samples.sequence_parts import KL_PREFIX
from toolkit.model.structure.without_dropout import without_dropout
from toolkit.objectives.completions import OfCompletions, learned
from toolkit.objectives.losses.preference_losses import share_won
from toolkit.objectives.objective import OF_BASE, Ingredients, Objective, RunsWindows

SUMS = "window_sums"
"""Key of a batch's precomputed `Kto.window_sums`."""


def signed_distances(log_ratios: torch.Tensor, good: torch.Tensor, kl: torch.Tensor, beta: float) -> torch.Tensor:
    """Returns beta (r - z0) for good completions and beta (z0 - r) for bad ones, (R,).

    Args:
        log_ratios: r = log pi(y|x) - log ref(y|x) (nats), (R,).
        good: (R,), bool.
        kl: z0, the estimate of KL(pi || ref) (nats), 0-dim.
    """
    distances = beta * (log_ratios - kl)
    return torch.where(good, distances, -distances)


class Kto(OfCompletions):
    """The sum of w (1 - sigma(s)) over the rows, with s = `signed_distances` (arXiv 2402.01306, eq. 7).

    z0 is max(0, mean of log pi(y'|x) - log ref(y'|x)) over prompts x with completions y' of other rows, without a
    gradient. The mean is over the rows of the whole optimizer step, on all ranks, or of the whole evaluation.

    Args:
        desirable_weight: w of good completions.
        undesirable_weight: w of bad ones.
        apart: whether each completion has a row of its own; otherwise they share rows.
    """

    unit = "rows"
    needs_whole_steps = True

    def __init__(
        self,
        model: nn.Module,
        beta: float = 0.1,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        apart: bool = False,
        continued: bool = False,
    ) -> None:
        super().__init__(model, apart, continued)
        self._beta = beta
        self._weights = (desirable_weight, undesirable_weight)

    @classmethod
    def build(cls, of: Ingredients) -> Objective:
        section = of.section
        weights = section.desirable_weight or 1.0, section.undesirable_weight or 1.0
        return cls(of.model, section.beta or 0.1, *weights, of.apart, of.continued)

    @property
    def figures(self) -> tuple[str, ...]:
        return ("accuracy", "margin", "kl")

    @property
    def needs_references(self) -> bool:
        """Whether the reference's log-probabilities must come with each batch."""
        return self._adapted is None

    def count_targets(self, batch: Batch) -> int:
        """Returns the number of rows; those that fill up a held-out batch do not count, shared ones on one rank."""
        return int(learned(batch, len(batch["good"])).sum())

    def on_host(self, batch: Batch) -> dict[str, Any]:
        """Adds what `CausalLM.on_host` adds, for both completions, and the rows that are learned (`learned`, (R,))."""
        if "good" not in batch:  # prompts to continue
            return self._causal.on_host(batch)
        own, other = batch, _mismatched(batch)
        if self.apart:
            own, other = documents_apart(own), documents_apart(other)
        prepared = self._causal.on_host(other)
        of_other = {f"{KL_PREFIX}{name}": value for name, value in prepared.items() if not is_of_images(name)}
        return {**self._causal.on_host(own), **of_other, "learned": learned(batch, len(batch["good"]))}

    def looked_at(self, model: nn.Module, batches: list[Batch], run: RunsWindows) -> list[Batch]:
        """Returns the batches with the base's log-probabilities, (R, 2), and `window_sums`, (2,)."""
        if self._adapted is not None:
            batches = self._with_base(model, batches, run, lambda *of: self.log_probabilities(*of)[0])
        # For all micro-batches at once: dropout is switched off for the process, not for a thread.
        with without_dropout(model):
            found = run([functools.partial(self.window_sums, model, batch) for batch in batches])
        return [{**batch, SUMS: sums} for batch, sums in zip(batches, found, strict=True)]

    def log_probabilities(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns log-probabilities (R, 2) of each row's own and mismatched completion, and their tokens (R, 2)."""
        both = [
            self._causal.segment_log_probabilities(model, part, len(batch["good"]))
            for part in (batch, _mismatched(batch))
        ]
        sums, counts = (torch.stack(found, dim=1) for found in zip(*both, strict=True))
        return sums, counts

    def by_document(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns log-probabilities of the rows' own completions, (R, 1)."""
        return self._causal.segment_log_probabilities(model, batch, len(batch["good"]))[0][:, None]

    @torch.no_grad()
    def window_sums(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns the sum and the number of the log-ratios of prompts with mismatched completions, (2,)."""
        if SUMS in batch:
            return batch[SUMS]
        # The reference has no dropout either; with it the two would differ.
        with without_dropout(model):
            log_ratios = self._log_ratios(model, batch, is_other=True)
        counted = self._learned_rows(batch)
        return torch.stack([log_ratios.masked_fill(~counted, 0.0).sum(), counted.sum()])

    def _log_ratios(self, model: nn.Module, batch: Batch, is_other: bool = False) -> torch.Tensor:
        """Returns log pi(y|x) - log ref(y|x), (R,), float32, of each row or of its mismatched completion."""
        part = _mismatched(batch) if is_other else batch
        reference = batch[OF_BASE if OF_BASE in batch else "reference"][:, int(is_other)]
        if self._adapted is not None and OF_BASE not in batch:
            with self._as_base(model):
                reference, _ = self._causal.segment_log_probabilities(model, part, len(reference))
        return self._causal.segment_log_probabilities(model, part, len(reference))[0] - reference

    def training_sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        losses, _, figures = self._losses_rewards_figures(model, batch)
        return losses, figures

    def _losses_rewards_figures(
        self, model: nn.Module, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the summed loss, 0-dim, the rewards (R,) and the sums of `figures`, (3,)."""
        total, count = batch["window"] if "window" in batch else self.window_sums(model, batch)
        kl = (total / count.clamp_min(1)).clamp_min(0.0)
        log_ratios = self._log_ratios(model, batch)
        counted, good = self._learned_rows(batch), batch["good"]
        distances = signed_distances(log_ratios, good, kl, self._beta)
        losses = torch.where(good, *self._weights) * (1 - torch.sigmoid(distances))
        found = distances.detach()
        figures = torch.stack([share_won(found), found, kl.expand_as(found)])
        # Filled, not multiplied by 0, which would let a NaN through.
        sums = figures.masked_fill(~counted, 0.0).sum(dim=1)
        return losses.masked_fill(~counted, 0.0).sum(), self._beta * log_ratios.detach(), sums

    def _learned_rows(self, batch: Batch) -> torch.Tensor:
        return batch["learned"] if "learned" in batch else learned(batch, len(batch["good"]))

    def evaluation_sums(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns sums (9,), float64.

        These are the loss, the rows, `figures`, and the number and summed rewards of good and then of bad completions.
        """
        loss, rewards, figures = self._losses_rewards_figures(model, batch)
        counted = self._learned_rows(batch)
        sides = [counted & batch["good"], counted & ~batch["good"]]
        of_sides = [value for side in sides for value in (side.sum(), rewards.masked_fill(~side, 0.0).sum())]
        return torch.cat([torch.stack([loss, counted.sum()]), figures, torch.stack(of_sides)]).double()

    def evaluation_record(self, sums: list[float]) -> dict[str, Any]:
        """Returns means over rows: loss, share and distance of rewards on the right side of z0, z0, and rewards."""
        num_good, good, num_bad, bad = sums[5:]
        rewards = {"chosen_reward": good / max(1.0, num_good), "rejected_reward": bad / max(1.0, num_bad)}
        return super().evaluation_record(sums[:5]) | rewards


def _mismatched(batch: Batch) -> Batch:
    """Returns the batch of prompts with completions of other rows."""
    other = {name.removeprefix(KL_PREFIX): value for name, value in batch.items() if name.startswith(KL_PREFIX)}
    return {**{name: value for name, value in batch.items() if is_of_images(name)}, **other}
