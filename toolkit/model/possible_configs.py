"""Refuses configurations of which no model can be made, or none that learns or keeps what it learns."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from toolkit.errors import BadInputError

MOST_DROPOUT, MOST_EPS = 0.5, 0.1
"""Highest values in a configuration; those in transformers are at most 0.3 and 0.001. More spoils a model."""

SIZES = ("hidden_size", "num_hidden_layers", "vocab_size")
"""Sizes of a configuration; no model can be made if one of them is below one."""


def require_possible(config: PretrainedConfig, field: str, name: str, where: str) -> None:
    """Checks that a model with this configuration can be made and learn.

    Args:
        field: the field of the recipe that names the model.
        name: the model's name.
        where: the place of the configuration.

    Raises:
        BadInputError: if a size is impossible, or transformers computes the model wrong.
    """
    if config.model_type == "prophetnet":
        # get_predict_relative_pos_embeddings gives each token the numbers of other ones, later ones among them.
        raise BadInputError(
            f"{field}: {name!r} is a ProphetNet, whose relative positions transformers mixes up: a token's logits "
            "depend on later tokens and on the length of its row; name another model, such as BART or T5"
        )
    text = config.get_text_config()
    if not isinstance(text, PretrainedConfig | dict):
        raise BadInputError(
            f"{field}: the text_config of {name!r} is {text!r}, and needs to be an object. Correct {where}"
        )
    named = config.architectures
    if named is not None and not (isinstance(named, list) and all(isinstance(each, str) for each in named)):
        raise BadInputError(
            f"{field}: the architectures of {name!r} are {named!r}, and need to be a list of names. Correct {where}"
        )
    wrong = [f"{key} is {size}" for key in SIZES if isinstance(size := _size(text, key), int) and size < 1]
    if wrong:
        raise BadInputError(
            f"{field}: no model can be built from {name!r}: {', '.join(wrong)}; needs at least 1. Correct {where}"
        )
    heads, groups = (_size(text, f"num_{kind}_heads") for kind in ("attention", "key_value"))
    if type(heads) is int and type(groups) is int and groups > 0 and heads % groups:
        raise BadInputError(
            f"{field}: {name!r} has {heads} heads of attention that share {groups} heads of keys and values, which do "
            f"not divide them. Correct {where}"
        )
    odd = _odd_numbers(text if isinstance(text, dict) else text.to_dict())
    if odd:
        raise BadInputError(f"{field}: {name!r} cannot be trained: {'; '.join(odd)}. Correct {where}")


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


def require_library(error: ImportError, model_type: str, field: str) -> None:
    """Raises BadInputError if a tower of this type needs a library that is not installed, as timm."""
    library = re.search(r"requires the (\w+) library", str(error))
    if library is not None:
        raise BadInputError(
            f"{field}: a model of type {model_type} needs the library {library[1]}, which is not installed; install it "
            f"(`pip install {library[1]}`), or name another model"
        ) from error


def _size(text: PretrainedConfig | dict[str, Any], key: str) -> Any:
    """Returns a number of a configuration, or None if it has none that holds for all layers (the heads of Dots 3)."""
    try:
        return getattr(text, key, None)
    except RuntimeError:  # transformers says that it varies from layer to layer
        return None


def _odd_numbers(values: dict[str, Any]) -> list[str]:
    """Returns numbers of a configuration that spoil the first step, but do not fail when the model is built."""
    needs: dict[tuple[str, ...], tuple[str, Callable[[float], bool]]] = {
        ("dropout", "pdrop", "dropout_prob"): (f"from 0 to {MOST_DROPOUT}", lambda value: 0 <= value <= MOST_DROPOUT),
        ("_eps", "_epsilon"): (f"from 0 to {MOST_EPS}", lambda value: 0 <= value <= MOST_EPS),
        ("rope_theta", "rope_factor"): ("above 0", lambda value: 0 < value < math.inf),
    }
    inner = values.get("rope_parameters")
    rope = inner if isinstance(inner, dict) else {}
    flat = {**values, **rope, "rope_factor": rope.get("factor")}
    return [
        f"{key} is {value}, and needs to be {what}"
        for endings, (what, holds) in needs.items()
        for key, value in flat.items()
        if key.endswith(endings) and type(value) in (int, float) and not holds(value)
    ]


@torch.no_grad()
def _is_kept(model: PreTrainedModel, index: int) -> bool:
    """Tells whether the type keeps a row of embeddings that are marked as loaded."""
    # Made of values, as nothing is to be drawn for it.
    loaded = nn.Embedding.from_pretrained(torch.ones(index + 1, 1), padding_idx=index)  # type: ignore[no-untyped-call]
    loaded.weight._is_hf_initialized = True
    model._init_weights(loaded)
    return bool(loaded.weight.all())
