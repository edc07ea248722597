"""Reads FSDP2's records of its units. unit_states.py changes their states, fsdp_replaced.py replaces their methods.

Only these three files name FSDP2's private records. private_names.yaml lists them, and a run names one that has moved.
"""

from __future__ import annotations

import traceback
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext, FSDPParamGroup
from torch.distributed.tensor import DTensor


def class_name(module: nn.Module) -> str:
    """Returns the name of a module's original class, which `fully_shard` replaces by one with an FSDP prefix."""
    return original_class(module).__name__


def original_class(module: nn.Module) -> type:
    """Returns a module's class before `fully_shard`."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))


def sharded_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """Yields every module that `fully_shard` was called on, the root first."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def fsdp_groups(model: nn.Module) -> Iterator[Any]:
    """Yields FSDP2's record of each unit (`FSDPParamGroup`), each once."""
    seen: set[int] = set()
    for module in sharded_modules(model):
        groups = groups_of_module(module)
        # Modules that form one unit share its record.
        yield from (group for group in groups if id(group) not in seen)
        seen.update(id(group) for group in groups)


def groups_of_module(module: FSDPModule) -> list[Any]:
    """Returns the records of a module's own unit. Empty if all its parameters belong to units inside it."""
    state: Any = module._get_fsdp_state()
    return list(state._fsdp_param_groups)


def in_backward() -> bool:
    """Returns whether this thread is inside of a backward, as hooks of tensors and checkpointed forwards are."""
    return torch._C._current_graph_task_id() != -1


def run_while_sharded(error: BaseException) -> nn.Module | None:
    """Returns the module of a unit whose weights were not gathered where an error came up in its forward, if any.

    A unit is gathered by hooks, which run when the module is called; `module.forward(...)` runs none. `UnitStates` asks
    before it frees what a failed forward has gathered, and leaves the answer on the error, as `ran_sharded`.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        # Not its hooks: one of them fails, before the weights are gathered, if a peer is gone.
        unit: Any = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if isinstance(unit, FSDPModule) and any(group.is_sharded for group in groups_of_module(unit)):
            return unit  # type: ignore[return-value]
    return None


def fsdp_units(model: nn.Module) -> Iterator[tuple[list[Any], list[DTensor]]]:
    """Yields each unit's modules and its sharded parameters (any shape), in the order in which FSDP2 reduces them."""
    for group in fsdp_groups(model):
        yield list(group.modules), [parameter.sharded_param for parameter in group.fsdp_params]


@contextmanager
def gathered(model: nn.Module, parameter: nn.Parameter) -> Iterator[None]:
    """Gathers the unit of a parameter inside the `with` block. Does nothing if the model is not sharded."""
    own = (
        module for module in sharded_modules(model) for group in groups_of_module(module) if _contains(group, parameter)
    )
    unit = next(own, None)
    if unit is not None:
        unit.unshard()
    try:
        yield
    finally:
        if unit is not None:
            unit.reshard()


def _contains(group: Any, parameter: nn.Parameter) -> bool:
    return any(own.sharded_param is parameter for own in group.fsdp_params)


@torch.no_grad()
def fill_missing_gradients(group: Any) -> list[DTensor]:
    """Sets zero gradients on the trainable parameters of a gathered unit that have none.

    Returns:
        Their shards (any shape).
    """
    trainable = [parameter for parameter in group.fsdp_params if parameter.sharded_param.requires_grad]
    missing = [parameter for parameter in trainable if unreduced_gradient(parameter) is None]
    for parameter in missing:
        whole = parameter.unsharded_param
        # torch 2.15 refuses a gradient of another type than the tensor's own or this, which FSDP2 sets there.
        whole.grad = torch.zeros_like(whole, dtype=getattr(whole, "grad_dtype", None) or whole.dtype)
    if missing and any(parameter.unsharded_accumulated_grad is not None for parameter in trainable):
        # Gradients that are reduced once per optimizer step are summed in float32, and FSDP2 reduces only one type.
        for parameter in trainable:
            if parameter.unsharded_accumulated_grad is None:
                parameter.to_accumulated_grad_if_needed()
    return [parameter.sharded_param for parameter in missing]


def unreduced_gradient(parameter: Any) -> torch.Tensor | None:
    """Returns what backward has summed of a parameter and not reduced yet, in its whole shape, or None."""
    found: torch.Tensor | None = parameter.unsharded_accumulated_grad
    return getattr(getattr(parameter, "_unsharded_param", None), "grad", None) if found is None else found


def has_partial_sums(group: Any) -> bool:
    """Tells whether a unit holds sums of its shard group that were not yet added up over the replicas."""
    return group._partial_reduce_output is not None


def drop_unreduced_gradients(groups: Iterable[Any], parameters: Container[int]) -> None:
    """Drops what backward has summed of sharded parameters, given by id, but not reduced yet, or not over replicas."""
    for group in groups:
        own = [parameter for parameter in group.fsdp_params if id(parameter.sharded_param) in parameters]
        for parameter in own:
            if (whole := getattr(parameter, "_unsharded_param", None)) is not None:
                whole.grad = None
            if parameter.unsharded_accumulated_grad is not None:  # a sum of its own; in torch 2.15 it is this gradient
                parameter.unsharded_accumulated_grad = None
        if own:
            group._partial_reduce_output = None


def frees_gather_before_copying() -> bool:
    """Returns whether a forward frees the last gather's output before it copies the next (torch 2.15), not after."""
    return hasattr(FSDPCommContext, "release_all_gather_state_for_comm_reuse")


def frees_all_gradients_before_reducing() -> bool:
    """Returns whether all gradients of a unit are freed before its reduction (torch 2.15).

    Before, the last one stayed alive during the reduction.
    """
    return hasattr(FSDPParamGroup, "_take_unsharded_grads_to_reduce")


def autograd_sums_gradients() -> bool:
    """Returns whether autograd accumulates the gradients of several micro-batches, in the type of the sum (torch 2.15).

    Before, FSDP2 accumulated them once a unit had all its gradients, and could reduce only one type.
    """
    return not hasattr(FSDPParam, "to_accumulated_grad_if_needed")
