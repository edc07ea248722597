"""One unit's state: its parameters' places in flat tensors, and where it stands in the schedule."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from toolkit.sharding.fsdp import fsdp_units
from toolkit.sharding.shards import local_tensor, shard_shape


@dataclass(eq=False)
class Slot:
    """A parameter's place in its unit.

    FSDP2 reduces a unit's gradients into one flat tensor, the padded shards of its trainable
    parameters one after the other. Masters and moments have that layout too.

    Attributes:
        parameter: the sharded parameter, a DTensor in the type of compute, or in float32 if its authors keep it so.
        offset: of this rank's first element in the flat tensors.
        shape: of this rank's rows, without padding.
        group: index in `optimizer.param_groups`; None: no optimizer steps this parameter.
        step: number of steps taken, as torch's optimizers keep it.
    """

    name: str
    parameter: DTensor
    offset: int
    shape: torch.Size
    group: int | None = None
    step: torch.Tensor = field(default_factory=lambda: torch.zeros(()))

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """This parameter's rows of a flat tensor."""
        return flat[self.offset : self.offset + self.numel].view(self.shape)


class OffloadedUnit:
    """One FSDP unit with trainable parameters.

    Attributes:
        name: of its first parameter's module.
        modules: what `fully_shard` was called on (`FSDPModule`s).
        slots: its trainable parameters in FSDP2's order.
        numel: elements of each flat tensor, padding included.
        master: weights in float32, flat.
        moments: the optimizer's tensors by torch's names, flat, float32.
        landing: host memory for the gradient, flat.
        resident: master, moments and gradient are on the device.

    Schedule:
        gradient: what has landed since the last step, in `landing`; None: nothing.
        present: indices of the slots that any rank used; the others are zero, and are not stepped.
        norms: 2-norm of each slot's gradient on this rank, on the device, (number of slots,).
        accumulated: sum over the micro-batches before the last, on the device.
        leaving: the gradient on the device: its memory must not be used anew before the copy is done.
        landed: the copy to the host is done.
        published: the worker has sent the new weights off, or has nothing to do for this unit.
        arrived: the new weights are on the device.
    """

    def __init__(self, name: str, modules: list[Any], slots: list[Slot], numel: int) -> None:
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

    def forget_gradient(self) -> None:
        self.gradient = self.norms = self.accumulated = None
        self.present = frozenset()


def read_units(model: nn.Module) -> list[OffloadedUnit]:
    """The units of a sharded model that train anything, the root first."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    units = []
    for modules, parameters in fsdp_units(model):
        slots, offset = [], 0
        for parameter in parameters:
            # Frozen parameters have no place in the flat gradient that FSDP2 reduces.
            if parameter.requires_grad:
                local = local_tensor(parameter)
                slots.append(Slot(names[id(parameter)], parameter, offset, local.shape))
                # Padded: in the flat gradient every rank has ceil(rows / F) rows, also where it holds fewer.
                offset += shard_shape(parameter).numel()
        if slots:
            units.append(OffloadedUnit(slots[0].name.rpartition(".")[0], modules, slots, offset))
    return units
