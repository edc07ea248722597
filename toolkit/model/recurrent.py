"""Layers that carry a state along a row (gated delta rules, state spaces, short convolutions), and their kernels.

Kernels of `fla`, `mamba_ssm` and `causal_conv1d` restart at each document if they are told where it begins.
transformers passes that on, and raises a ValueError if it uses its own slow functions instead.
"""

from __future__ import annotations

import inspect
import sys
from types import FunctionType
from typing import Any

from torch import nn

from toolkit.model.adapters import base_of

_MARK = "is_new_implementation"
"""transformers sets it in `use_kernel_func_from_hub_with_fallback` if a kernel has replaced the function."""


def kernels_take_documents(model: nn.Module) -> bool:
    """Tells whether a model has such layers, and a kernel for each of their functions."""
    files = {type(module).__module__ for module in base_of(model).modules()}
    marks = [mark for file in files for mark in _marks(sys.modules[file])]
    return bool(marks) and all(marks)


def _marks(file: Any) -> list[bool]:
    functions = [found for found in vars(file).values() if isinstance(found, FunctionType)]
    return [
        inspect.getclosurevars(function).nonlocals[_MARK]
        for function in functions
        if _MARK in function.__code__.co_freevars
    ]
