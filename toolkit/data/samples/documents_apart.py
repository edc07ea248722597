"""Puts documents that share rows into rows of their own, for models that cannot keep them apart."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from toolkit.data.samples.samples import IGNORED, Batch

FILLING = {"input_ids": 0, "labels": IGNORED, "position_ids": 0, "segments": -1, "drawn": 0.0}
"""Values behind a document, which no token of a causal model sees, by the names of tensors (B, T)."""


def documents_apart(batch: Batch) -> Batch:
    """Returns a micro-batch with a row for each of its D documents, (D, longest), in the order of `segments`.

    Args:
        batch: on the host, with `segments` (B, T); tensors that are not of tokens stay as they are.
    """
    segments: Any = batch["segments"].flatten()
    counts = torch.bincount(segments[segments >= 0])
    # The tokens of a document are neighbours in a row, and documents are numbered row by row.
    rows = {}
    for name, filling in FILLING.items():
        if name not in batch:
            continue
        documents = torch.split(batch[name].flatten()[segments >= 0], counts.tolist())
        rows[name] = pad_sequence(list(documents), batch_first=True, padding_value=filling)
    return {**batch, **rows, "lengths": counts}
