"""Whether a model takes positions, and where its own begin."""

from __future__ import annotations

import inspect

from torch import nn

from toolkit.model.adapters import base_of


def takes_positions(model: nn.Module) -> bool:
    """Whether a forward can be told that positions restart, without which rows that share a sample see each other."""
    return "position_ids" in inspect.signature(base_of(model).forward).parameters


def first_position(model: nn.Module) -> int:
    """The position of a text's first token: 0, but padding_idx + 1 in RoBERTa's family, as fairseq counts.

    transformers counts so itself where it is given no positions, and takes those that it is given as they are.
    """
    for module in model.modules():
        padding = getattr(module, "padding_idx", None)
        if hasattr(type(module), "create_position_ids_from_input_ids") and isinstance(padding, int):
            return padding + 1
    return 0
