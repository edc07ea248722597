"""Models without memory for their parameters, whose computed buffers have their values.

accelerate's `init_empty_weights` takes a parameter to the meta device once it is there. Until then each exists on the
host: a stack of experts of DeepSeek V3 or Llama 4 is 28 GiB.
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
"""Elements from which on a parameter is never made on the host."""

MAKERS = (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn)
"""Functions by which models make parameters."""


def build_on_meta(build: Callable[[], Built]) -> Built:
    """Calls `build` so that parameters are made on the meta device, and buffers on the host."""
    with _OnMeta(_large_shapes(build)), init_empty_weights(include_buffers=False):
        return build()


def _large_shapes(build: Callable[[], nn.Module]) -> set[tuple[int, ...]]:
    """Shapes of the large parameters; none if the model's code needs values to be built."""
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
    """Of the tensor that one of `MAKERS` is asked for: given as numbers, or as one sequence of them."""
    size = kwargs.get("size", args[0] if args and isinstance(args[0], Sequence) else args)
    # Inkling's width is a tensor of one number.
    return tuple(int(number) for number in size if isinstance(number, int | torch.Tensor))
