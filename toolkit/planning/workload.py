"""What one rank does in a micro-batch, before there are weights or data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from toolkit.objectives import Objective


@dataclass
class Workload:
    """A model on the meta device, what is minimised, and batches of the run's shape.

    Attributes:
        model: as the backend is given it; its parameters have no memory.
        objective: of a model like this one.
        batch: micro-batch size -> a batch on the CPU; values do not matter, shapes and types do.
        mixed_precision: `no`, `bf16` or `fp16`.
        tokens: of one sample.
        unit_classes: as `plan_units` takes them.
    """

    model: nn.Module
    objective: Callable[[nn.Module], Objective]
    batch: Callable[[int], dict[str, torch.Tensor]]
    mixed_precision: str
    tokens: int
    unit_classes: list[str] | None = field(default=None)
