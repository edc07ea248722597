"""Refuses configurations of which no model can be made, or none that learns or keeps what it learns."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from toolkit.errors import BadInputError


def require_possible(config: PretrainedConfig, field: str, name: str) -> None:
    """Checks that transformers computes a model with this configuration right.

    Args:
        field: the field of the recipe that names the model.
        name: the model's name.

    Raises:
        BadInputError: if it does not.
    """
    if config.model_type == "prophetnet":
        # get_predict_relative_pos_embeddings gives each token the numbers of other ones, later ones among them.
        raise BadInputError(
            f"{field}: {name!r} is a ProphetNet, whose relative positions transformers mixes up: a token's logits "
            "depend on later tokens and on the length of its row; name another model, such as BART or T5"
        )


def require_lasting_rows(model: PreTrainedModel, field: str, where: str) -> None:
    """Checks that transformers does not set the row of the padding token to zero when it loads an export.

    No export could keep the values of such a row. A type's `_init_weights` zeroes it in embeddings that it draws.
    Youtu's does so in loaded ones, too, as it writes to `weight.data`, which does not say that it was loaded.

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
