"""Finds blocks that do the same work, and replaces the forward of those that need not run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn


class Aside:
    """The forward of a skipped block: returns its first input in the output structure of the block it duplicates.

    Args:
        outputs: for units that ran, their further outputs, each as the place of an input or as a value.
        like: the unit that it duplicates.
    """

    def __init__(self, outputs: Mapping[int, Any], like: int) -> None:
        self._outputs, self._like = outputs, like

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else next(value for value in kwargs.values() if isinstance(value, torch.Tensor))
        # Hooks on outputs sit on tensors: if the input were returned itself, it would have every block's hooks.
        hidden = hidden.view_as(hidden)  # a new tensor, like a block's output
        others = self._outputs.get(self._like)
        if others is None:
            return hidden
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        return (hidden, *(value if place is None else given[place] for place, value in others))


def signature(block: nn.Module) -> Any:
    """Returns a key that is equal for blocks that do the same work: modules, settings and parameters, no numbers."""
    modules = tuple((name, type(module).__name__, *sorted(_settings(module))) for name, module in block.named_modules())
    parameters = tuple((name, tuple(p.shape), p.requires_grad) for name, p in block.named_parameters())
    return modules, parameters, getattr(block.__dict__.get("forward"), "__name__", "")


def _settings(module: nn.Module) -> Iterator[tuple[str, str]]:
    for name, value in module.__dict__.items():
        if isinstance(value, str | int | float) and not name.startswith("_") and name not in NUMBERS:
            yield name, str(value)


NUMBERS = ("layer_idx", "layer_id", "layer_number", "training")
"""Settings of a module that may differ between blocks that do the same work."""
