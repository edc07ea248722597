"""Tensors without memory and without values, with which the planner runs a model. The names are torch's private ones.

tests/unit/planning/memory/test_planning_private_names.py says when one of them moves.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

__all__ = ["FakeTensorMode", "has_values", "unset_fake_temporarily"]


def has_values(tensor: torch.Tensor) -> bool:
    """Whether one can look at what the tensor holds."""
    return not isinstance(tensor, FakeTensor)
