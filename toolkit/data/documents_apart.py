"""Documents that share rows, each in a row of its own, for models that cannot keep them apart."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from toolkit.data.samples import IGNORED, Batch

FILLING = {"input_ids": 0, "labels": IGNORED, "position_ids": 0, "segments": -1}
"""What stands behind a document, where no token of a causal model looks, by the names of tensors (B, T)."""


def documents_apart(batch: Batch) -> Batch:
    """A micro-batch with a row for each of its D documents, (D, longest), in the order of `segments`.

    Args:
        batch: still on the host, with `segments` (B, T); what is not of tokens stays as it is.
    """
    segments: Any = batch["segments"].flatten()
    counts = torch.bincount(segments[segments >= 0])
    # The tokens of a document are neighbours in a row, and documents are numbered row by row.
    rows = {}
    for name, filling in FILLING.items():
        documents = torch.split(batch[name].flatten()[segments >= 0], counts.tolist())
        rows[name] = pad_sequence(list(documents), batch_first=True, padding_value=filling)
    return {**batch, **rows, "lengths": counts}
