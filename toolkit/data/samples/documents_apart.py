"""Puts documents that share rows into rows of their own, and cuts off padding, for models that mix up what is apart."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from toolkit.data.samples.image_samples import KINDS_OF_TOKENS
from toolkit.data.samples.samples import IGNORED, Batch

FILLING = {
    "input_ids": 0,
    "labels": IGNORED,
    "segments": -1,
    "drawn": 0.0,
    KINDS_OF_TOKENS: 0,
}
"""Values after a document, which no token of a causal model sees, by the names of tensors (B, T)."""


def documents_apart(batch: Batch) -> Batch:
    """Returns a micro-batch with a row for each of its D documents, (D, longest), in their order.

    Args:
        batch: on the host, with `segments` (B, T); tensors that are not of tokens stay as they are.
    """
    numbers: Any = _numbers_of_documents(batch).flatten()
    counts = torch.bincount(numbers[numbers >= 0])
    # The tokens of a document are neighbours in a row, and documents are numbered row by row.
    rows = {}
    for name, filling in FILLING.items():
        if name not in batch:
            continue
        documents = torch.split(batch[name].flatten()[numbers >= 0], counts.tolist())
        rows[name] = pad_sequence(list(documents), batch_first=True, padding_value=filling)
    positions = torch.arange(int(counts.max())).expand(len(counts), -1)
    return {**batch, **rows, "position_ids": positions, "lengths": counts}


def _numbers_of_documents(batch: Batch) -> torch.Tensor:
    """Returns the number of each token's document, (B, T); -1 for padding.

    They are the segments, and one more for the small image of a batch without any, which is after the first row.
    """
    segments, end = batch["segments"], int(batch["lengths"][0])
    if KINDS_OF_TOKENS not in batch or not batch[KINDS_OF_TOKENS][0, end:].any():
        return segments
    number = int(segments[0].max()) + 1
    numbers = torch.where(segments >= number, segments + 1, segments)
    numbers[0, end:] = number
    return numbers


OF_TARGETS = ("labels", "decoder_input_ids")
"""Tensors of a seq2seq batch, (B, T), that are as long as the targets; the others are as long as the sources."""


def without_padding(row: Batch) -> Batch:
    """Returns a micro-batch of one row, still on the host, without the padding after it."""
    width, length = row["input_ids"].shape[1], int(row["lengths"][0])
    sizes = {name: length for name, tensor in row.items() if tensor.dim() > 1 and tensor.shape[1] == width}
    if "target_lengths" in row:
        sizes |= {name: int(row["target_lengths"][0]) for name in OF_TARGETS if name in row}
    # At least one token: a row that only fills up a held-out batch has length 0.
    return row | {name: row[name][:, : max(1, size)] for name, size in sizes.items()}


def rows_without_padding(batch: Batch) -> list[Batch]:
    """Returns each row of a padded batch, still on the host, as a batch (1, T) of its own length."""
    numbers = range(len(batch["lengths"]))
    return [without_padding({name: each[number : number + 1] for name, each in batch.items()}) for number in numbers]
