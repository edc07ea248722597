"""Finds rows of embeddings that transformers sets to zero at every load, so that no export can keep their values.

A type's `_init_weights` zeroes the row of the padding token in embeddings that it draws. Youtu's does so in loaded
ones, too, as it writes to `weight.data`, which does not say that it was loaded.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from toolkit.errors import BadInputError


def require_lasting_rows(model: PreTrainedModel, field: str, where: str) -> None:
    """Checks that transformers does not set the row of the padding token to zero when it loads an export.

    Args:
        field: the field of the recipe that names the model.
        where: the place of its configuration.

    Raises:
        BadInputError: if it would.
    """
    indices = {m.padding_idx for m in model.modules() if isinstance(m, nn.Embedding) and m.padding_idx is not None}
    for index in sorted(indices):
        if not _is_kept(model, index):
            raise BadInputError(
                f"{field}: transformers sets row {index}, of the padding token, in the embeddings of "
                f"{type(model).__name__} to zero whenever it loads one, so the export would have other logits than the "
                f"trained model; set pad_token_id to null in {where}, as rows are padded by the tokenizer's own"
            )


@torch.no_grad()
def _is_kept(model: PreTrainedModel, index: int) -> bool:
    """Tells whether the type keeps a row of embeddings that are marked as loaded."""
    # Made of values, as nothing is to be drawn for it.
    loaded = nn.Embedding.from_pretrained(torch.ones(index + 1, 1), padding_idx=index)  # type: ignore[no-untyped-call]
    loaded.weight._is_hf_initialized = True
    model._init_weights(loaded)
    return bool(loaded.weight.all())
