"""Finds whether a model takes positions, its first position, and their number."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from toolkit.errors import BadInputError
from toolkit.model.adapters.adapters import base_of
from toolkit.recipe.schema import DataSection

BY_LENGTH = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies depend on the longest position of a forward."""


def takes_positions(model: nn.Module) -> bool:
    """Tells whether a forward takes positions that restart; otherwise documents in a packed row see each other."""
    return "position_ids" in inspect.signature(base_of(model).forward).parameters


def first_position(model: nn.Module) -> int:
    """Returns the position of a text's first token: 0, or padding_idx + 1 in RoBERTa's family, as in fairseq.

    transformers uses it if it is given no positions, and takes given ones as they are.
    """
    for module in model.modules():
        padding = getattr(module, "padding_idx", None)
        if hasattr(type(module), "create_position_ids_from_input_ids") and isinstance(padding, int):
            return padding + 1
    return 0


def num_positions(model: nn.Module) -> int | None:
    """Returns the longest row that the model's configuration allows (tokens); None without a limit."""
    config: Any = base_of(model).config
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None or positions < 1:
        return None  # XLNet says -1: any length
    return int(positions) - first_position(model)  # RoBERTa's family leaves the first ones unused


def rotary_limit(model: nn.Module) -> tuple[str, int] | None:
    """Returns the kind of rotary embeddings that change if a row is longer than a length (tokens), and that length.

    One row beyond it changes the frequencies of all rows of its forward. None if nothing does.
    """
    config: Any = base_of(model).config.get_text_config()
    rotary = getattr(config, "rope_parameters", None) or {}
    names = ("original_max_position_embeddings", "max_position_embeddings")
    # One for all layers, or one for each kind of them.
    for each in (rotary, *(value for value in rotary.values() if isinstance(value, Mapping))):
        limits = [limit for limit in (each.get(names[0]), *(getattr(config, name, None) for name in names)) if limit]
        if each.get("rope_type") in BY_LENGTH and limits:
            return each["rope_type"], int(limits[0])
    return None


def require_positions(model: nn.Module, data: DataSection, documents: int = 1, longest: int = 0) -> None:
    """Checks that samples fit the model's positions.

    Args:
        documents: documents of a row, positions of which restart with each.
        longest: tokens of the longest document, where it is known.

    Raises:
        BadInputError: if they are longer.
    """
    positions = num_positions(model)
    if positions is None:
        return
    for key in ("max_length", "max_target_length"):
        length, most = getattr(data, key), positions * documents
        if length is not None and length > most:
            each = f" for each of the {documents} documents of a row" if documents > 1 else ""
            raise BadInputError(
                f"data.{key}: {length} is more than the model's {positions} positions (max_position_embeddings){each}; "
                f"lower it to {most} or less"
            )
    if longest > positions:
        raise BadInputError(
            f"data.train: one side of a row has {longest} tokens, more than the model's {positions} positions "
            f"(max_position_embeddings); leave such rows out, or set data.max_length={positions}, the limit of "
            "whole rows"
        )
