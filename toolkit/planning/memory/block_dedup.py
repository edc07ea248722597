"""Blocks that do the same work: what tells them from others, and the forward of one that stands aside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn


class Aside:
    """The forward of a block that stands aside: its first input, in the form of what the block it is like returned.

    Args:
        outputs: of units that ran, what they returned beside that: places among their inputs, and values.
        like: the unit that it is like.
    """

    def __init__(self, outputs: Mapping[int, Any], like: int) -> None:
        self._outputs, self._like = outputs, like

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else next(value for value in kwargs.values() if isinstance(value, torch.Tensor))
        # The hooks on outputs sit on tensors: passed on as it is, one tensor would have those of every block.
        hidden = hidden.view_as(hidden)  # another tensor, as a block's output is
        others = self._outputs.get(self._like)
        if others is None:
            return hidden
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        return (hidden, *(value if place is None else given[place] for place, value in others))


def signature(block: nn.Module) -> Any:
    """Equal for blocks that do the same work: their modules, settings and parameters, but for their number."""
    modules = tuple((name, type(module).__name__, *sorted(_settings(module))) for name, module in block.named_modules())
    parameters = tuple((name, tuple(p.shape), p.requires_grad) for name, p in block.named_parameters())
    return modules, parameters, getattr(block.__dict__.get("forward"), "__name__", "")


def _settings(module: nn.Module) -> Iterator[tuple[str, str]]:
    for name, value in module.__dict__.items():
        if isinstance(value, str | int | float) and not name.startswith("_") and name not in NUMBERS:
            yield name, str(value)


NUMBERS = ("layer_idx", "layer_id", "layer_number", "training")
"""Settings of a module in which blocks that do the same work differ."""
