"""Holds the state of one unit: its parameters' positions in flat tensors, and its place in the schedule."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from toolkit.sharding.fsdp2.fsdp import fsdp_units
from toolkit.sharding.fsdp2.shards import local_tensor, shard_shape


@dataclass(eq=False)
class UnitSlice:
    """A parameter's position in its unit.

    FSDP2 reduces a unit's gradients into one flat tensor, the concatenated padded shards of its trainable parameters.
    Masters and moments have the same layout.

    Attributes:
        name: the parameter's first name in the model.
        parameter: the sharded parameter, a DTensor in the compute type, or in float32 if its authors keep it so.
        offset: the index of this rank's first element in the flat tensors.
        shape: the shape of this rank's rows, without padding.
        group: the index in `optimizer.param_groups`, or None if no optimizer steps this parameter.
        step: the number of steps taken, a 0-dim tensor, as torch's optimizers keep it.
    """

    name: str
    parameter: DTensor
    offset: int
    shape: torch.Size
    group: int | None = None
    step: torch.Tensor = field(default_factory=lambda: torch.zeros(()))

    @property
    def numel(self) -> int:
        """Returns the number of elements of this rank's rows."""
        return self.shape.numel()

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns this parameter's rows, of shape `self.shape`, as a view of a flat tensor (numel of the unit,)."""
        return flat[self.offset : self.offset + self.numel].view(self.shape)


class OffloadedUnit:
    """One FSDP unit with trainable parameters.

    Attributes:
        name: the name of the module of its first parameter.
        modules: the modules that `fully_shard` was called on (`FSDPModule`s).
        slots: its trainable parameters in FSDP2's order.
        numel: the number of elements of each flat tensor, padding included.
        master: the float32 weights, (numel,).
        moments: the optimizer's tensors by torch's names, each float32, (numel,).
        landing: the host buffer for the gradient, (numel,).
        resident: whether master, moments and gradient are on the device.

    Schedule:
        gradient: the gradient since the last step, in `landing`, or None if there is none.
        present: the indices of the slots that any rank used. The others are zero and are not stepped.
        norms: the 2-norm of each slot's gradient on this rank, on the device, (number of slots,).
        accumulated: the sum over the micro-batches before the last, on the device, (numel,).
        leaving: the gradient on the device, kept so that its memory is not reused before the copy is done.
        landed: the event after which the copy to the host is done.
        published: set if the worker has queued the copy of the new weights, or has nothing to do for this unit.
        arrived: the event after which the new weights are on the device.
    """

    def __init__(self, name: str, modules: list[Any], slots: list[UnitSlice], numel: int) -> None:
        self.name = name
        self.modules = modules
        self.slots = slots
        self.numel = numel
        self.master = torch.empty(0)
        self.moments: dict[str, torch.Tensor] = {}
        self.landing = torch.empty(0)
        self.resident = False

        self.gradient: torch.Tensor | None = None
        self.present: frozenset[int] = frozenset()
        self.norms: torch.Tensor | None = None
        self.accumulated: torch.Tensor | None = None
        self.leaving: torch.Tensor | None = None
        self.landed: Any = None
        self.arrived: Any = None
        self.published = threading.Event()
        # Before the first step nothing is under way, and the first forward waits for nothing.
        self.published.set()

    @property
    def has_gradient(self) -> bool:
        """Returns whether the unit was reduced since the last step."""
        return self.gradient is not None or self.accumulated is not None

    def forget_gradient(self) -> None:
        """Drops the gradient, its norms and its sum over micro-batches."""
        self.gradient = self.norms = self.accumulated = None
        self.present = frozenset()


def read_units(model: nn.Module) -> list[OffloadedUnit]:
    """Returns the units of a sharded model that have trainable parameters, the root first."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    units = []
    for modules, parameters in fsdp_units(model):
        slots, offset = [], 0
        for parameter in parameters:
            # Frozen parameters have no place in the flat gradient that FSDP2 reduces.
            if parameter.requires_grad:
                local = local_tensor(parameter)
                slots.append(UnitSlice(names[id(parameter)], parameter, offset, local.shape))
                # Padded: in the flat gradient every rank has ceil(rows / F) rows, even if it holds fewer.
                offset += shard_shape(parameter).numel()
        if slots:
            units.append(OffloadedUnit(slots[0].name.rpartition(".")[0], modules, slots, offset))
    return units
