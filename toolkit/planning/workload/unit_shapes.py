"""Computes the sizes of each unit's parameters under FSDP2, in its order."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch import nn

from toolkit.model.adapters.adapters import base_of
from toolkit.sharding.apply import PRECISIONS
from toolkit.sharding.fsdp2.precision import kept_in_float32, types_of_authors
from toolkit.sharding.fsdp2.shards import shard_dim
from toolkit.sharding.plan.unit_plan import UnitKind, UnitPlan
from toolkit.sharding.plan.units import owned_parameters
from toolkit.sharding.tensor.cut import cut_of


@dataclass(frozen=True)
class ParameterShape:
    """One parameter.

    Attributes:
        shape: the whole shape; a scalar is one row.
        held: bytes of an element as the optimizer keeps it between steps.
        is_cast: whether it is gathered in the compute dtype; parameters that authors keep in float32 and the bytes of
            a quantised matrix are gathered without a cast.
        moments: number of moments that the optimizer keeps of it.
        spread: ranks of an expert-parallel group; this is one rank's part, which F / spread ranks shard.
        joined: ranks of a tensor group that share it, times the F of a shard group, as they do a teacher's parameters.
        is_partial: whether the ranks of a tensor group sum its gradients, as each has a share of them.
    """

    shape: tuple[int, ...]
    trainable: bool
    held: int
    is_cast: bool = True
    moments: int = 2
    spread: int = 1
    joined: int = 1
    is_partial: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def gathered(self, compute: int | None) -> int:
        """Returns the bytes of an element when it is gathered: `compute`, or its own if it is not cast."""
        return compute if compute is not None and self.is_cast else self.held

    def shard_numel(self, shard: int) -> int:
        """Returns the elements of the first rank's shard, padding included: ceil(rows / F) rows."""
        return _shard_numel(self.shape, self.num_shards(shard))

    def dim(self, shard: int) -> int:
        """Returns the dimension along which F ranks shard it."""
        return shard_dim(self.shape, self.num_shards(shard))

    def num_shards(self, shard: int) -> int:
        """Ranks that gather it from each other, of F that hold the model."""
        return max(1, shard * self.joined // self.spread)


@cache
def _shard_numel(shape: tuple[int, ...], ranks: int) -> int:
    rows = shape[shard_dim(shape, ranks)]
    return math.ceil(rows / ranks) * (math.prod(shape) // max(1, rows))


@dataclass(frozen=True)
class UnitShape:
    """One unit of the plan, with its parameters in the order in which FSDP2 gathers and reduces them.

    Attributes:
        of_teacher: whether it is a teacher's; it runs before the student's forward and is gathered only for that.
    """

    name: str
    kind: UnitKind
    reshard_after_forward: bool
    parameters: tuple[ParameterShape, ...]
    of_teacher: bool = False

    @cached_property
    def trainable(self) -> tuple[ParameterShape, ...]:
        return tuple(parameter for parameter in self.parameters if parameter.trainable)

    def num_shards(self, shard: int) -> int:
        """Ranks that gather it from each other, of F that hold the model."""
        return self.parameters[0].num_shards(shard) if self.parameters else shard

    @property
    def trains_float32(self) -> bool:
        """Whether it has trainable parameters that stay in float32 under mixed precision."""
        return any(not parameter.is_cast for parameter in self.trainable)

    @property
    def is_mixed(self) -> bool:
        """Whether its gradients come in float32 and in the compute dtype."""
        return len({parameter.is_cast for parameter in self.trainable}) > 1

    @property
    def partial_numel(self) -> int:
        """Trainable elements whose gradients the ranks of a tensor group sum."""
        return sum(parameter.numel for parameter in self.trainable if parameter.is_partial)

    def trainable_numel(self, shard: int) -> int:
        """Returns the trainable elements of the first rank's shard, padding included."""
        return sum(parameter.shard_numel(shard) for parameter in self.trainable)


def unit_shapes(
    model: nn.Module,
    plan: UnitPlan,
    mixed_precision: str,
    of_one_moment: Iterable[nn.Parameter] = (),
    experts: int = 1,
) -> list[UnitShape]:
    """Returns the units of `plan` in its order; mixed precision holds trainable parameters in float32.

    Args:
        of_one_moment: parameters of which the optimizer keeps one moment.
        experts: ranks of an expert-parallel group, each with whole experts of its own.
    """
    single = {id(parameter) for parameter in of_one_moment}
    owned = owned_parameters(model, (unit.modules for unit in plan.units))
    dtype = PRECISIONS[mixed_precision]
    names = [] if dtype is None else kept_in_float32(model, types_of_authors(model, dtype))
    kept = {id(model.get_parameter(name)) for name in names}
    cut = cut_of(model)
    partial = set() if cut is None else {id(getattr(owner, name)) for owner, name in cut.partial}
    return [
        UnitShape(
            unit.name,
            unit.kind,
            unit.reshard_after_forward,
            tuple(
                replace(
                    _parameter_shape(p, mixed_precision, id(p) in kept, experts if unit.kind == "experts" else 1),
                    moments=1 if id(p) in single else 2,
                    is_partial=id(p) in partial,
                )
                for p in own
            ),
        )
        for unit, own in zip(plan.units, owned, strict=True)
    ]


def teacher_shapes(model: nn.Module, plan: UnitPlan, mixed_precision: str, tensor: int = 1) -> list[UnitShape]:
    """Returns the units of a frozen teacher in the plan's order.

    Args:
        tensor: ranks of a tensor group.
    """
    return [
        replace(
            shape,
            name=f"the teacher's {shape.name}",
            of_teacher=True,
            parameters=tuple(replace(parameter, joined=tensor) for parameter in shape.parameters),
        )
        for shape in unit_shapes(model, plan, mixed_precision)
    ]


def head_unit(model: nn.Module, plan: UnitPlan) -> int:
    """Returns the number of the unit that has the head's weight."""
    weight = base_of(model).get_output_embeddings().weight
    owned = owned_parameters(model, (unit.modules for unit in plan.units))
    return next(number for number, own in enumerate(owned) if any(parameter is weight for parameter in own))


def _parameter_shape(parameter: torch.Tensor, mixed_precision: str, is_kept: bool, spread: int) -> ParameterShape:
    # `apply` makes float32 masters of trained parameters; frozen ones keep the dtype in which they were loaded.
    is_low = parameter.dtype in (torch.bfloat16, torch.float16)
    is_master = mixed_precision != "no" and parameter.requires_grad and is_low
    held = 4 if is_master or is_kept else parameter.element_size()
    is_cast = parameter.is_floating_point() and not is_kept
    rows, *others = parameter.shape or (1,)
    return ParameterShape((rows // spread, *others), parameter.requires_grad, held, is_cast, spread=spread)
