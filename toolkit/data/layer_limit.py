"""A number of layers that no model has, told before transformers reads the configuration.

A configuration's own checks may look through all layers for each layer (lfm2), which does not end for a million.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from toolkit.errors import BadInputError

MAX_LAYERS = 10_000
"""Ten times as many as any model has. Each costs about 4 ms and 100 kB of Python, before it has weights."""

KEYS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers")
"""How configurations call it."""


def require_few_layers(values: Mapping[str, Any], field: str, where: str) -> None:
    """Raises BadInputError where a configuration, or one inside it, asks for more than `MAX_LAYERS`.

    Args:
        field: of the recipe, for errors.
        where: the configuration stands.
    """
    for part in (values, *(value for value in values.values() if isinstance(value, Mapping))):
        for key in KEYS:
            layers = part.get(key)
            if isinstance(layers, int) and layers > MAX_LAYERS:
                raise BadInputError(
                    f"{field}: {key} is {layers:,} in {where}; at most {MAX_LAYERS:,} layers are built. Correct it"
                )


def require_few_stored_layers(name: str, revision: str | None, field: str) -> None:
    """The same for the config.json of a folder or repository, if it has one that can be read."""
    try:
        values, _ = PretrainedConfig.get_config_dict(name, revision=revision)
    except Exception:  # who reads it next says better what is wrong with it
        return
    if isinstance(values, dict):
        require_few_layers(values, field, f"config.json of {name!r}")
