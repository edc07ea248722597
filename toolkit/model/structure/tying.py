"""Tells whether a model's head shares the weight of its embeddings, and whether its export still does."""

from __future__ import annotations

import copy
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel


def is_tied(model: PreTrainedModel) -> bool:
    """Tells whether the configuration ties the head to the input embeddings."""
    # Of Qwen's VL types the whole configuration says it, and not that of the language model.
    said_by = (model.config.get_text_config(), model.config)
    return bool(next((one.tie_word_embeddings for one in said_by if hasattr(one, "tie_word_embeddings")), False))


def has_own_head(model: PreTrainedModel) -> bool:
    """Tells whether the head of a tied model is trained whole (`modules_to_save`), as a weight of its own."""
    head: Any = model.get_output_embeddings()
    return is_tied(model) and getattr(head, "modules_to_save", None) is not None


def adapts_tied(model: PreTrainedModel) -> bool:
    """Tells whether an adapter is on one of two tied matrices, which have to be two once it is merged.

    Not in an encoder-decoder, whose outputs depend on the tie in some types.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    if not is_tied(model) or model.config.is_encoder_decoder:
        return False
    return any(
        isinstance(each, BaseTunerLayer) for each in (model.get_input_embeddings(), model.get_output_embeddings())
    )


def config_of_export(model: PreTrainedModel) -> PretrainedConfig:
    """Returns a copy of the configuration for the whole model's files: untied, where training has parted the two."""
    config = copy.deepcopy(model.config)
    if has_own_head(model) or adapts_tied(model):
        untie(config)
    return config


def untie(config: PretrainedConfig) -> None:
    """Says in a configuration that the head has a weight of its own."""
    for part in (config, config.get_text_config()):
        if hasattr(part, "tie_word_embeddings"):
            part.tie_word_embeddings = False
