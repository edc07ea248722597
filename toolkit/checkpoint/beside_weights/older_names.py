"""Adds the names that transformers 4 reads to a configuration that transformers 5 wrote.

Only a model that the recipe describes itself (`model.config`) needs them: others have their base's names.
"""

from __future__ import annotations

import copy
from typing import Any

from transformers import PretrainedConfig

KNOWN = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
"""Kinds of rotary positions that transformers 4 has. Models with other ones are newer."""

THETA, SHARE = "rope_theta", "partial_rotary_factor"
OF_TYPE = {
    "gpt_neox": ("rotary_emb_base", "rotary_pct"),
    "modernbert": ("global_rope_theta", SHARE),
}
"""Names that a type has of its own for the base of the positions, and for the share of a head that is rotated."""

SLIDING = {
    "gemma3_text": "rope_local_base_freq",
    "gemma3n_text": "rope_local_base_freq",
    "modernbert": "local_rope_theta",
}
"""Names for the base of the positions in layers with a sliding window."""


def with_older_names(fields: dict[str, Any], config: PretrainedConfig) -> dict[str, Any]:
    """Returns the fields with `torch_dtype`, `rope_theta` and `rope_scaling` next to the new names.

    Args:
        fields: what config.json says.
        config: the configuration that they were written from. Names that would change it are left out.
    """
    found = _beside(copy.deepcopy(fields))
    again, before = type(config).from_dict(copy.deepcopy(found)).to_dict(), config.to_dict()
    return found if all(again.get(name) == value for name, value in before.items()) else fields


def _beside(fields: dict[str, Any]) -> dict[str, Any]:
    for value in list(fields.values()):
        if isinstance(value, dict) and "model_type" in value:
            _beside(value)
    if isinstance(fields.get("dtype"), str):
        fields.setdefault("torch_dtype", fields["dtype"])
    rope, kind = fields.get("rope_parameters"), str(fields.get("model_type"))
    if not isinstance(rope, dict):
        return fields
    of_layers = rope.get("full_attention", rope)
    if isinstance(of_layers, dict) and of_layers.get("rope_type") in KNOWN and of_layers.get(THETA) is not None:
        theta, share = OF_TYPE.get(kind, (THETA, SHARE))
        fields.setdefault(theta, of_layers[THETA])
        if SHARE in of_layers:
            fields.setdefault(share, of_layers[SHARE])
        scaling = {name: value for name, value in of_layers.items() if name not in (THETA, SHARE)}
        fields.setdefault("rope_scaling", None if scaling == {"rope_type": "default"} else scaling)
        if kind in SLIDING:
            fields.setdefault(SLIDING[kind], rope["sliding_attention"][THETA])
    return fields
