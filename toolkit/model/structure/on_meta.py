"""Builds models without memory for their parameters; computed buffers have their values.

accelerate's `init_empty_weights` moves a parameter to the meta device only after it was made on the host. There a stack
of experts of DeepSeek V3 or Llama 4 takes 28 GiB.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from accelerate import init_empty_weights
from torch import nn
from torch.overrides import TorchFunctionMode

Built = TypeVar("Built", bound=nn.Module)

LARGE = 2**22
"""Parameters with at least so many elements are never made on the host."""

MAKERS = (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn)
"""Functions with which models make parameters."""


def build_on_meta(build: Callable[[], Built]) -> Built:
    """Calls `build` so that it makes parameters on the meta device, and buffers on the host."""
    with _OnMeta(_large_shapes(build)), init_empty_weights(include_buffers=False):
        return build()


def _large_shapes(build: Callable[[], nn.Module]) -> set[tuple[int, ...]]:
    """Returns shapes of the large parameters; none if the model's code needs values while it is built."""
    try:
        with torch.device("meta"):
            model = build()
    except Exception:  # the code of a model may do anything; the second attempt tells what is wrong with it
        return set()
    return {tuple(parameter.shape) for parameter in model.parameters() if parameter.numel() >= LARGE}


class _OnMeta(TorchFunctionMode):
    """Makes tensors of these shapes on the meta device."""

    def __init__(self, shapes: set[tuple[int, ...]]) -> None:
        super().__init__()
        self._shapes = shapes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._shapes and func in MAKERS and _size(args, kwargs) in self._shapes:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def _size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Returns the size that one of `MAKERS` is called with, as numbers or as one sequence."""
    size = kwargs.get("size", args[0] if args and isinstance(args[0], Sequence) else args)
    # Inkling's width is a tensor of one number.
    return tuple(int(number) for number in size if isinstance(number, int | torch.Tensor))
