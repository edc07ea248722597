"""Tensors without memory and values, with which the planner runs a model. The names are private ones of torch.

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
    "unset_fake_temporarily",
    "without_logs",
]


@contextmanager
def without_logs() -> Iterator[None]:
    """Hides the traceback that torch logs for an operator without such a kernel; its exception is enough."""
    logger = logging.getLogger(FakeTensor.__module__)
    was_disabled = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = was_disabled


@contextmanager
def grouped_products() -> Iterator[None]:
    """Runs experts in float32 by transformers' own product: torch 2.13's, without values, only takes bf16."""
    can_use = experts._can_use_grouped_mm

    def in_16_bits(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> bool:
        return weight.dtype is torch.bfloat16 and bool(can_use(input, weight, offs))

    experts._can_use_grouped_mm = in_16_bits
    try:
        yield
    finally:
        experts._can_use_grouped_mm = can_use


def has_values(tensor: torch.Tensor) -> bool:
    """Tells whether the tensor has values that can be read."""
    return not isinstance(tensor, FakeTensor)
