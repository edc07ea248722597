"""Replaces methods of FSDP2's records, each because FSDP2 has no public hook at that point.

They are replaced on the records of one model, never on a class of torch. `REPLACED` lists them, and a test compares the
list with a sharded model.

    method                                  by                      what no hook does
    FSDPParamGroup.post_backward            before_reduction        act when a unit has all its gradients: hooks of
    FSDPParamGroup.unshard                                          inputs are missing if no input requires a gradient,
                                                                    and hooks of parameters come after the reduction
    FSDPParamGroup.post_backward            pass_over_ungathered_   skip units that were never gathered, in which FSDP2
                                            units                   fails if a window goes on; sum over replicas what
                                                                    the last micro-batch has not reached
    FSDPParamGroup.post_backward            free_reduced_gradient   free what FSDP2 keeps for a hook until backward ends
    FSDPParamGroup.wait_for_unshard         before_copying_shards   wait before shards are copied if one rank holds all:
                                                                    the collective that could be set is not called then
    FSDPParam.init_dtype_attrs              gather_in_float32       give the parameters of one unit different types

Next to methods, `wrap_as_dtensor` sets attributes of the records.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._prims_common import make_contiguous_strides_for
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from toolkit.sharding.fsdp2.fsdp import (
    autograd_sums_gradients,
    fill_missing_gradients,
    fsdp_groups,
    groups_of_module,
    unreduced_gradient,
)

REPLACED = {
    "FSDPParamGroup": {"post_backward", "unshard", "wait_for_unshard"},
    "FSDPParam": {"init_dtype_attrs"},
}
"""Class of torch -> its methods that are replaced on objects of a model."""


def before_reduction(group: Any, act: Callable[[Any], None]) -> None:
    """Calls `act(group)` in backward whenever the unit's gradients are about to be reduced.

    FSDP2 has no hook at that point: hooks of its modules' inputs do not run if no input requires a gradient, and hooks
    of the parameters run after the reduction.
    """
    reduce, unshard = group.post_backward, group.unshard
    acted = False

    def act_and_reduce(*args: Any) -> None:
        nonlocal acted
        # FSDP2 calls this for all units when backward ends. One that is not gathered has a gradient if an earlier
        # micro-batch has left it, or if `set_unshard_in_backward(False)` was called.
        if group.reduce_grads and not acted and (group.is_unsharded or any(map(_has_gradient, group.fsdp_params))):
            act(group)
            acted = True
        reduce(*args)

    def begin_again(*args: Any, **kwargs: Any) -> Any:
        nonlocal acted
        acted = False
        return unshard(*args, **kwargs)

    group.post_backward, group.unshard = act_and_reduce, begin_again


def _has_gradient(parameter: Any) -> bool:
    return unreduced_gradient(parameter) is not None


def pass_over_ungathered_units(model: nn.Module) -> None:
    """Ends a backward right in units that it has not reached, such as a tower that no row uses.

    FSDP2 ends a pass in all units. If it reduces, it checks whether a parameter was ever gathered. If it accumulates,
    it does not check, and fails ("no attribute '_unsharded_param'"). If earlier micro-batches have reached a replicated
    unit and the last one has not, it never sums over the replicas, and adds the gradient to the next step's.
    """
    for group in fsdp_groups(model):
        group.post_backward = functools.partial(_end_pass_if_gathered, group, group.post_backward)


def _end_pass_if_gathered(group: Any, post_backward: Callable[..., None], *args: Any) -> None:
    if group.reduce_grads and group.all_reduce_grads and group._partial_reduce_output is not None:
        fill_missing_gradients(group)  # zeros, if there are none: FSDP2 reduces nothing else than what has a gradient
    if group.reduce_grads or any(hasattr(parameter, "_unsharded_param") for parameter in group.fsdp_params):
        post_backward(*args)


def free_reduced_gradient(module: FSDPModule) -> None:
    """Frees the unit's reduced gradient as soon as it is reduced. The unit's hook must call `reduce_again_after`.

    FSDP2 of torch 2.15 holds the gradient that it passed to a hook until backward ends. Over all units this is the
    whole float32 gradient of a rank's shard, and offload exists to keep that off the device.
    """
    group = next(fsdp_groups(module))  # type: ignore[arg-type]
    reduce = group.post_backward

    def reduce_and_free(*args: Any) -> None:
        reduce(*args)
        if not group._is_hsdp:
            group._all_reduce_state = None

    group.post_backward = reduce_and_free


def reduce_again_after(module: FSDPModule, read: Any) -> None:
    """Makes the next reduce-scatter wait for `read`, the event after the last read of the unit's reduced gradient.

    FSDP2 allocates the reduced gradient on its reduce-scatter stream, but its all-reduce hook and its rounding read it
    on the all-reduce stream. Once freed, the memory goes to the next unit's reduce-scatter, which would wait for
    neither. With replicas FSDP2 itself holds the memory until backward ends (pytorch#140044). Waiting here would then
    only prevent a unit's reduce-scatter from overlapping the all-reduce of the previous unit.
    """
    group = next(fsdp_groups(module))  # type: ignore[arg-type]
    if not group._is_hsdp:
        group.comm_ctx.reduce_scatter_stream.wait_event(read)


def before_copying_shards(module: FSDPModule, act: Callable[[], None]) -> None:
    """Calls `act` before the unit's shards are copied, if its group has one rank and so nothing is gathered."""
    group = next(fsdp_groups(module))  # type: ignore[arg-type]
    unshard = group.wait_for_unshard

    def act_and_unshard() -> None:
        if group._all_gather_result is not None and group._all_gather_process_group.size() == 1:
            act()
        unshard()

    group.wait_for_unshard = act_and_unshard


def gather_in_float32(model: nn.Module, names: Iterable[str], beside_rounded: bool = False) -> None:
    """Makes units gather some of their parameters in float32, whatever their compute type.

    FSDP2 gathers several types in one exchange, but before torch 2.15 it reduces only one. There the gradients of such
    a unit are converted to float32 first.

    Args:
        names: the parameters to gather in float32.
        beside_rounded: whether the shards of the other parameters are held in the compute type.
    """
    initialise = _init_beside_rounded if beside_rounded else _init_uncast
    kept = {id(model.get_parameter(name)) for name in names}
    for group in fsdp_groups(model):
        own = [parameter for parameter in group.fsdp_params if id(parameter.sharded_param) in kept]
        for parameter in own:
            parameter.init_dtype_attrs = functools.partial(initialise, parameter)
        if own and not autograd_sums_gradients():
            before_reduction(group, _make_gradients_float32)


def _init_uncast(parameter: Any, policy: MixedPrecisionPolicy) -> None:
    type(parameter).init_dtype_attrs(parameter, dataclasses.replace(policy, param_dtype=None))


def _init_beside_rounded(parameter: Any, policy: MixedPrecisionPolicy) -> None:
    _init_uncast(parameter, policy)
    # FSDP2 needs one dtype for all shards of a unit, to which it rounds their gradients. `param_dtype` stays None:
    # FSDP2 copies what it casts before it allocates the gather's memory, and only there `before_reading_shards` waits.
    parameter.orig_dtype = policy.param_dtype or parameter.orig_dtype


@torch.no_grad()
def _make_gradients_float32(group: Any) -> None:
    for parameter in group.fsdp_params:
        if parameter.sharded_param.requires_grad and parameter.unsharded_accumulated_grad is None:
            parameter.to_accumulated_grad_if_needed()


def shapes_inside(module: nn.Module) -> dict[tuple[nn.Module, str], torch.Size]:
    """Returns the shape of each parameter in a module, keyed by its owning module and its name in that module."""
    return {(owner, name): p.shape for owner in module.modules() for name, p in owner.named_parameters(recurse=False)}


def wrap_as_dtensor(
    module: nn.Module,
    mesh: DeviceMesh,
    shapes: Mapping[tuple[nn.Module, str], torch.Size],
    placements_of: Callable[[tuple[nn.Module, str]], Sequence[Placement]] | None = None,
) -> None:
    """Presents the shards of a unit that only some ranks of a mesh share as DTensors over the whole mesh.

    The unit still gathers and reduces among its own ranks.

    Args:
        module: the unit.
        mesh: its last axis is that of the shards; parameters are whole along the others.
        shapes: the shapes of the whole parameters, as `shapes_inside` returns them. Each rank's rows precede those of
            the next rank.
        placements_of: the placement of a parameter on each axis of the mesh but the last. None: along these all are
            whole.
    """
    assert isinstance(module, FSDPModule)
    for parameter in (parameter for group in groups_of_module(module) for parameter in group.fsdp_params):
        key = parameter._module_info.module, parameter._module_info.param_name
        shape, local = shapes[key], parameter.sharded_param.to_local()
        meta = TensorMeta(shape, make_contiguous_strides_for(shape), local.dtype)
        others = [Replicate()] * (mesh.ndim - 1) if placements_of is None else placements_of(key)
        parameter._sharding_spec = DTensorSpec(mesh, (*others, Shard(0)), tensor_meta=meta)
        parameter._sharding_spec_by_dtype = {}  # torch 2.15's copies of the old one, which gradients would have
        trains = parameter.sharded_param.requires_grad
        parameter.sharded_param = nn.Parameter(parameter.to_sharded_dtensor(local.detach()), requires_grad=trains)
        parameter._setattr_on_modules(parameter.sharded_param)


def sum_before_reduction(module: nn.Module, keys: Container[tuple[nn.Module, str]], ranks: dist.ProcessGroup) -> None:
    """Sums the gradients of some parameters of a unit over `ranks`, once before each reduction.

    Args:
        module: the unit.
        keys: the owning modules of the parameters, and their names in these.
        ranks: they hold the same parameters, and have a share of these gradients each.
    """
    assert isinstance(module, FSDPModule)
    for group in groups_of_module(module):
        infos = [(parameter, parameter._module_info) for parameter in group.fsdp_params]
        mine = [parameter for parameter, info in infos if (info.module, info.param_name) in keys]
        if any(parameter.sharded_param.requires_grad for parameter in mine):
            before_reduction(group, functools.partial(_sum_gradients, mine, ranks))


@torch.no_grad()
def _sum_gradients(parameters: Iterable[Any], ranks: dist.ProcessGroup, _group: Any) -> None:
    found = [unreduced_gradient(parameter) for parameter in parameters if parameter.sharded_param.requires_grad]
    present = [gradient for gradient in found if gradient is not None]
    if not present:
        return
    # In float32: each share is rounded to the compute type once, and the sum once more.
    total = torch.cat([gradient.flatten().float() for gradient in present])
    dist.all_reduce(total, group=ranks)
    for gradient, part in zip(present, torch.split(total, [each.numel() for each in present]), strict=True):
        gradient.copy_(part.view_as(gradient))
