"""Refuses configurations that must not reach transformers.

A configuration's own checks may look through all layers for each layer (lfm2), which does not end for a million, and
divide by a number of heads that is 0. An attention from the hub is code that the recipe does not name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from toolkit.errors import BadInputError

MAX_LAYERS = 10_000
"""Ten times as many layers as any model has. Each costs about 4 ms and 100 kB of Python, before it has weights."""

HEADS = ("num_attention_heads", "num_key_value_heads", "n_head", "num_heads")
"""Keys of configurations for the number of heads, by which sizes are divided."""

ATTENTION = "attn_implementation"
"""Ending of the keys under which transformers reads an attention from a configuration."""

KEYS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers")
"""Keys of configurations for the number of layers."""


def require_safe_values(values: Mapping[str, Any], field: str, where: str) -> None:
    """Checks a configuration, and those inside it, before transformers reads them.

    Args:
        field: field of the recipe, for errors.
        where: place of the configuration, for errors.

    Raises:
        BadInputError: if it asks for too many layers, no heads, or an attention that is code from the hub.
    """
    require_few_layers(values, field, where)
    _require_heads(values, field, where)
    _require_no_hub_kernel(values, field, where)


def require_few_layers(values: Mapping[str, Any], field: str, where: str) -> None:
    """Checks that a configuration, and those inside it, ask for at most `MAX_LAYERS`.

    Raises:
        BadInputError: if one asks for more.
    """
    for part in _parts(values):
        for key in KEYS:
            layers = part.get(key)
            if isinstance(layers, int) and layers > MAX_LAYERS:
                raise BadInputError(
                    f"{field}: {key} is {layers:,} in {where}; at most {MAX_LAYERS:,} layers are built. Correct it"
                )


def _require_heads(values: Mapping[str, Any], field: str, where: str) -> None:
    for part in _parts(values):
        for key in HEADS:
            if isinstance(heads := part.get(key), int) and heads < 1:
                raise BadInputError(f"{field}: {key} is {heads} in {where}; needs at least 1. Correct it")


def _parts(values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns a configuration and those inside it, as of a vision tower."""
    return [values, *(value for value in values.values() if isinstance(value, Mapping))]


def _require_no_hub_kernel(values: Any, field: str, where: str) -> None:
    """Raises BadInputError if an attention is a repository, whose code transformers would fetch and run."""
    for key, value in values.items() if isinstance(values, Mapping) else ():
        if str(key).endswith(ATTENTION) and "/" in str(value):
            raise BadInputError(
                f"{field}: {where} asks for code from the hub ({key}: {value!r}), which runs only if the recipe says "
                f"so; remove {key} there, and choose in model.attention"
            )
        _require_no_hub_kernel(value, field, where)


def require_safe_stored(name: str, revision: str | None, field: str) -> None:
    """Checks the config.json of a folder or repository, if it has one that can be read.

    Raises:
        BadInputError: if it asks for too many layers, no heads, or an attention that is code from the hub.
    """
    try:
        values, _ = PretrainedConfig.get_config_dict(name, revision=revision)
    except Exception:  # the next reader reports better what is wrong with it
        return
    if isinstance(values, dict):
        require_safe_values(values, field, f"config.json of {name!r}")
