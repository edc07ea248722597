"""Runs the plain side's rows with images one by one, through transformers' own processor and model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from toolkit.data.build import TokenisedData
from toolkit.data.images.images import PREFIX
from toolkit.data.samples.image_samples import ImageSamples, image_samples_of
from toolkit.data.samples.samples import Batch, batch_of
from toolkit.verify.plain_losses import IGNORED, KINDS, OF_IMAGES, PlainLoss

ROWS = "rows"
"""The key of a batch that holds its rows, each with the inputs of the model."""


@dataclass(frozen=True)
class ImageRows(ImageSamples):
    """Samples whose batches also hold each row separately. A batch without images has one more row with an image."""

    def batch(self, numbers: Sequence[int], seen: Sequence[Sequence[Sequence[Any]]] | None = None) -> Batch:
        """Returns a text batch of these samples with the separate rows under `ROWS`; its tensors have shape (1, T)."""
        rows: Any = [row for number in numbers for row in self._rows_of_sample(number)]
        if not any(self.has_image(number) for number in numbers):
            image, ids = self.images.smallest
            rows.append(self._inputs_of(torch.tensor(ids), [False] * len(ids), [image]))
        of_text = batch_of([self.tokens(number) for number in numbers], self.max_length, self.packed, self.pad_id)
        return {**of_text, ROWS: rows}

    def _rows_of_sample(self, number: int) -> list[dict[str, Any]]:
        pieces = zip(self.tokens(number), self.seen(number), strict=True)
        return [
            self._inputs_of(torch.tensor(ids.tolist()), targets.tolist(), shown) for (ids, targets), shown in pieces
        ]

    def _inputs_of(self, ids: torch.Tensor, targets: list[bool], images: list[Any]) -> dict[str, Any]:
        made = self.images.tensors([images]) if images else {}
        labels = torch.where(torch.tensor(targets), ids, IGNORED)
        kinds = torch.isin(ids, torch.tensor(sorted(self.images.token_ids))).long()[None]
        more = {name.removeprefix(PREFIX): tensor for name, tensor in made.items()}
        return {"input_ids": ids[None], "labels": labels[None], KINDS: kinds, OF_IMAGES: more}


def row_by_row(data: TokenisedData) -> TokenisedData:
    """Returns the data with each row separate in its batches, if rows have images."""
    samples = image_samples_of(data.train)
    if samples is None:
        return data
    return replace(data, train=ImageRows(**{each.name: getattr(samples, each.name) for each in fields(samples)}))


class PlainImages:
    """A plain loss of each row by itself. Weights that only images reach have a gradient in every micro-batch.

    Args:
        of_rows: the loss.
    """

    def __init__(self, of_rows: PlainLoss) -> None:
        self._of_rows = of_rows

    def num_targets(self, batch: Batch) -> int:
        return self._of_rows.num_targets(batch)

    def forward(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return self._of_rows.forward(model, batch)

    def summed(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns the scalar sum of the losses over all target tokens."""
        rows: Any = batch[ROWS]
        return torch.stack([self._of_rows.summed(model, row) for row in rows]).sum()
