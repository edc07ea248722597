"""Runs the rows of a micro-batch one by one, without padding, for models in which padding changes a row."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from toolkit.data.samples.samples import Batch
from toolkit.objectives.losses.balance import ROWS
from toolkit.objectives.objective import Ingredients, Objective

OF_TARGETS = ("labels", "decoder_input_ids")
"""Tensors of a seq2seq batch, (B, T), that are as long as the targets; the others are as long as the sources."""


class RowsAlone(Objective):
    """Runs a padding objective on a model that must not see padding, with one forward for each row.

    Attributes:
        inner: the objective.
    """

    def __init__(self, inner: Objective) -> None:
        self.inner = inner
        self.unit = inner.unit

    @classmethod
    def build(cls, of: Ingredients) -> Objective:
        raise NotImplementedError("made around an objective that is there")

    @property
    def figures(self) -> tuple[str, ...]:
        return self.inner.figures

    def count_targets(self, batch: Batch) -> int:
        return self.inner.count_targets(batch)

    def on_host(self, batch: Batch) -> dict[str, Any]:
        """Adds the batch's rows, each prepared by the inner objective."""
        return {**batch, ROWS: [self.inner.on_host(row) for row in rows_without_padding(batch)]}

    def logits(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns logits (B, C) of rows, or (B, T, C) of tokens, with 0 after each row."""
        found = [self.inner.logits(model, row) for row in self._rows(batch)]
        if found[0].dim() == 2:
            return torch.cat(found)
        longest = max(logits.shape[1] for logits in found)
        return torch.cat([F.pad(logits, (0, 0, 0, longest - logits.shape[1])) for logits in found])

    def predictions(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        logits, labels = zip(*(self.inner.predictions(model, row) for row in self._rows(batch)), strict=True)
        return torch.cat(logits), torch.cat(labels)

    def training_sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        losses, figures = zip(*(self.inner.training_sums(model, row) for row in self._rows(batch)), strict=True)
        return torch.stack(losses).sum(), torch.stack(figures).sum(dim=0)

    def training_record(self, means: list[float]) -> dict[str, Any]:
        return self.inner.training_record(means)

    def evaluation_sums(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return torch.stack([self.inner.evaluation_sums(model, row) for row in self._rows(batch)]).sum(dim=0)

    def evaluation_record(self, sums: list[float]) -> dict[str, Any]:
        return self.inner.evaluation_record(sums)

    def decoder_inputs(self, labels: torch.Tensor) -> torch.Tensor:
        return self.inner.decoder_inputs(labels)

    def uniform_guess(self, model: nn.Module, class_weights: object) -> tuple[int, str] | None:
        return self.inner.uniform_guess(model, class_weights)

    def check_head_loss(self, model: nn.Module, device: torch.device, in_16_bits: bool) -> str | None:
        """Checks as the inner objective does; a few tokens are one row."""
        return self.inner.check_head_loss(model, device, in_16_bits)

    def _rows(self, batch: Any) -> list[Batch]:
        return batch[ROWS] if ROWS in batch else self.on_host(batch)[ROWS]  # type: ignore[no-any-return]


def rows_without_padding(batch: Batch) -> list[Batch]:
    """Returns each row of a padded batch, still on the host, as a batch (1, T) of its own length."""
    found = []
    # At least one token: a row that only fills up a held-out batch has length 0.
    for number, length in enumerate(batch["lengths"].clamp_min(1).tolist()):
        lengths = dict.fromkeys(batch, length)
        if "target_lengths" in batch:
            lengths |= dict.fromkeys(OF_TARGETS, max(1, int(batch["target_lengths"][number])))
        row = {name: tensor[number : number + 1] for name, tensor in batch.items()}
        found.append({name: t[:, : lengths[name]] if t.dim() > 1 else t for name, t in row.items()})
    return found
