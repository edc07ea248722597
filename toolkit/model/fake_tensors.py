"""Tensors without memory and without values, with which the planner runs a model. The names are torch's private ones.

tests/unit/planning/memory/test_planning_private_names.py says when one of them moves.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import transformers.integrations.moe as experts
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)

__all__ = [
    "DynamicOutputShapeException",
    "FakeTensorMode",
    "grouped_products",
    "has_values",
    "lacks_products",
    "unset_fake_temporarily",
    "without_logs",
]


@contextmanager
def without_logs() -> Iterator[None]:
    """An operator without a kernel for such tensors is told by its exception alone; torch would log a traceback."""
    logger = logging.getLogger(FakeTensor.__module__)
    was_disabled = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = was_disabled


@contextmanager
def grouped_products() -> Iterator[None]:
    """Has experts in float32 run by transformers' own product: torch 2.13's, without values, is for bf16 alone."""
    can_use = experts._can_use_grouped_mm

    def in_16_bits(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> bool:
        return weight.dtype is torch.bfloat16 and bool(can_use(input, weight, offs))

    experts._can_use_grouped_mm = in_16_bits
    try:
        yield
    finally:
        experts._can_use_grouped_mm = can_use


def lacks_products() -> bool:
    """Whether `grouped_products` has no backward: before transformers 5.23 it looks at the numbers of tokens."""
    return not hasattr(experts, "_grouped_mm_fallback_backward_fake")


def has_values(tensor: torch.Tensor) -> bool:
    """Whether one can look at what the tensor holds."""
    return not isinstance(tensor, FakeTensor)
