"""FSDP2's record of its units: the only place that reads torch's private names of it.

They are those of torch 2.13 and later, and of 2.11 where a state has one group; versions.py says when one moves.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._prims_common import make_contiguous_strides_for
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext, FSDPParamGroup
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta


def class_name(module: nn.Module) -> str:
    """The name of a module's own class: `fully_shard` puts one with FSDP before it in its place."""
    return next(kind.__name__ for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))


def sharded_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """Every module that `fully_shard` was called on, the root first."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def fsdp_groups(model: nn.Module) -> Iterator[Any]:
    """FSDP2's record of each unit (`FSDPParamGroup`), once."""
    seen: set[int] = set()
    for module in sharded_modules(model):
        groups = _own_groups(module)
        # Modules that form one unit share its record.
        yield from (group for group in groups if id(group) not in seen)
        seen.update(id(group) for group in groups)


def _own_groups(module: FSDPModule) -> list[Any]:
    """Those of the unit itself; none where all its parameters belong to units inside."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return [group for group in (state._fsdp_param_group,) if group is not None] if groups is None else groups


def fsdp_units(model: nn.Module) -> Iterator[tuple[list[Any], list[DTensor]]]:
    """The modules of each unit and its sharded parameters, in the order in which FSDP2 reduces them."""
    for group in fsdp_groups(model):
        yield list(group.modules), [parameter.sharded_param for parameter in group.fsdp_params]


def forget_uncalled_modules(module: FSDPModule) -> None:
    """Has the unit's next forward gather it, although one of its modules was not called in the last.

    torch 2.11 goes on waiting for that module (a head whose weight alone is used), and gathers the unit no more.
    """
    module._get_fsdp_state()._modules_to_run_forward.clear()


def pass_over_ungathered_units(model: nn.Module) -> None:
    """Has the end of a backward do nothing for a unit that was never gathered, as a tower that no row has reached.

    FSDP2 ends a pass in all units. Where it reduces, it asks whether a parameter was ever whole; where a window goes
    on, it does not, and fails ("no attribute '_unsharded_param'").
    """
    for group in fsdp_groups(model):
        group.post_backward = functools.partial(_end_pass_if_gathered, group, group.post_backward)


def _end_pass_if_gathered(group: Any, post_backward: Callable[..., None], *args: Any) -> None:
    if group.reduce_grads or any(hasattr(parameter, "_unsharded_param") for parameter in group.fsdp_params):
        post_backward(*args)


def reshard_all(model: nn.Module) -> None:
    """Frees what a forward without gradients gathered and no backward will free."""
    for unit in sharded_modules(model):
        groups = _own_groups(unit)
        copied = [each for group in groups if group.is_sharded_post_forward for each in group.fsdp_params]
        for group in groups:
            # On torch 2.11 a unit with an uncalled module is still in its forward, after which it may stay gathered.
            group._training_state = type(group._training_state).IDLE
        unit.reshard()
        for parameter in copied:  # a group's, which FSDP2 frees when backward has gathered them
            parameter._sharded_post_forward_param = parameter._sharded_post_forward_param_data = None
        forget_uncalled_modules(unit)


def reshard_in_groups(model: nn.Module, mesh: DeviceMesh) -> None:
    """Has units keep a copy, sharded among the ranks of a group, from forward until backward has gathered it there.

    As FSDP2's `reshard_after_forward=n`, which makes process groups of its own for each unit: NCCL would take buffers
    for all of them.

    Args:
        mesh: (groups, ranks of a group).
    """
    info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    for group in fsdp_groups(model):
        if group.post_forward_mesh_info is None:
            continue  # it stays gathered
        group.post_forward_mesh_info = info
        for parameter in group.fsdp_params:
            parameter.post_forward_mesh_info = info
            own, parameter.fsdp_placement = parameter.fsdp_placement, Shard(0)
            parameter._init_sharded_post_forward_param_metadata(torch.empty(parameter._orig_size, device="meta"))
            parameter.fsdp_placement = own
            if own.dim:
                _keep_flat(parameter, mesh.size(1))


def _keep_flat(parameter: Any, num_ranks: int) -> None:
    """Has a parameter that is not sharded by rows be put together as one that is, from what a group's ranks keep.

    They keep equal parts of its elements in their order; FSDP2 would put them together along the parameter's own
    dimension.
    """
    own = parameter.fsdp_placement
    parameter.sharded_post_forward_size = torch.Size((parameter._orig_size.numel() // num_ranks,))
    parameter.contiguous_sharded_post_forward_stride = (1,)

    def then(act: Callable[[], None], placement: Shard) -> Callable[[], None]:
        def act_and_place() -> None:
            act()
            parameter.fsdp_placement = placement

        return act_and_place

    parameter.to_sharded_post_forward = then(parameter.to_sharded_post_forward, Shard(0))
    parameter.to_unsharded = then(parameter.to_unsharded, own)
    parameter.to_sharded = then(parameter.to_sharded, own)


@contextmanager
def gathered(model: nn.Module, parameter: nn.Parameter) -> Iterator[None]:
    """The unit of a sharded parameter, whole, outside of its forward; of a model that is not sharded, as it is."""
    own = (module for module in sharded_modules(model) for group in _own_groups(module) if _holds(group, parameter))
    unit = next(own, None)
    if unit is not None:
        unit.unshard()
    try:
        yield
    finally:
        if unit is not None:
            unit.reshard()


def _holds(group: Any, parameter: nn.Parameter) -> bool:
    return any(own.sharded_param is parameter for own in group.fsdp_params)


def forget_forwards(model: nn.Module) -> None:
    """Has a backward prefetch by the order of the forwards that come now.

    FSDP2 notes those without gradients, too, and the first unit's backward would gather the last unit of theirs.
    """
    for group in fsdp_groups(model):
        group._post_forward_indices.clear()
        group.comm_ctx.post_forward_order.clear()


def before_copying_shards(module: FSDPModule, act: Callable[[], None]) -> None:
    """Calls `act` before the shards of the module's unit are copied where one rank holds all, and gathers nothing."""
    group = next(fsdp_groups(module))  # type: ignore[arg-type]
    unshard = group.wait_for_unshard

    def act_and_unshard() -> None:
        if group._all_gather_result is not None and group._all_gather_process_group.size() == 1:
            act()
        unshard()

    group.wait_for_unshard = act_and_unshard


def before_reduction(group: Any, act: Callable[[Any], None]) -> None:
    """Calls `act(group)` in backward whenever the unit's gradients are about to be reduced.

    FSDP2 has no hook there: those of its modules' inputs are missing where no input requires a gradient, and the
    parameters' own are called after the reduction.
    """
    reduce, unshard = group.post_backward, group.unshard
    acted = False

    def act_and_reduce(*args: Any) -> None:
        nonlocal acted
        # A unit that this backward has not gathered has nothing to reduce; FSDP2 calls this for all units at the end.
        # torch 2.11 calls it there for a unit of several modules although it is reduced already.
        if group.reduce_grads and group.is_unsharded and not acted:
            act(group)
            acted = True
        reduce(*args)

    def begin_again(*args: Any, **kwargs: Any) -> Any:
        nonlocal acted
        acted = False
        return unshard(*args, **kwargs)

    group.post_backward, group.unshard = act_and_reduce, begin_again


@torch.no_grad()
def fill_missing_gradients(group: Any) -> list[DTensor]:
    """Gives zeros to the trainable parameters of a gathered unit that have no gradient; returns those that have one."""
    trainable = [parameter for parameter in group.fsdp_params if parameter.sharded_param.requires_grad]
    missing = [parameter for parameter in trainable if not _has_gradient(parameter)]
    present = [parameter.sharded_param for parameter in trainable if parameter not in missing]
    for parameter in missing:
        whole = parameter.unsharded_param
        # torch 2.15 refuses a gradient of another type than the tensor's own or this, which FSDP2 sets there.
        whole.grad = torch.zeros_like(whole, dtype=getattr(whole, "grad_dtype", None) or whole.dtype)
    if missing and any(parameter.unsharded_accumulated_grad is not None for parameter in trainable):
        # A window that is reduced once is summed in float32, and FSDP2 reduces gradients of one type alone.
        for parameter in trainable:
            if parameter.unsharded_accumulated_grad is None:
                parameter.to_accumulated_grad_if_needed()
    return present


def shapes_inside(module: nn.Module) -> dict[tuple[nn.Module, str], torch.Size]:
    """Shapes of the parameters in a module, by their owner and their name there."""
    return {(owner, name): p.shape for owner in module.modules() for name, p in owner.named_parameters(recurse=False)}


def hold_as_part(module: nn.Module, mesh: DeviceMesh, shapes: Mapping[tuple[nn.Module, str], torch.Size]) -> None:
    """Shows the shards of a unit, which some ranks of a mesh hold, as rows of parameters that all its ranks hold.

    The unit gathers and reduces among its own ranks.

    Args:
        mesh: 1-D (shard), or 2-D (replicate, shard).
        shapes: of the whole parameters, as `shapes_inside` has them. The rows of a rank stand before those of the next.
    """
    assert isinstance(module, FSDPModule)
    (group,) = _own_groups(module)
    for parameter in group.fsdp_params:
        shape = shapes[parameter._module_info.module, parameter._module_info.param_name]
        local = parameter.sharded_param.to_local()
        meta = TensorMeta(shape, make_contiguous_strides_for(shape), local.dtype)
        placements = (*[Replicate()] * (mesh.ndim - 1), Shard(0))
        parameter._sharding_spec = DTensorSpec(mesh, placements, tensor_meta=meta)
        parameter._sharding_spec_by_dtype = {}  # torch 2.15's copies of the old one, which gradients would have
        trains = parameter.sharded_param.requires_grad
        parameter.sharded_param = nn.Parameter(parameter.to_sharded_dtensor(local.detach()), requires_grad=trains)
        parameter._setattr_on_modules(parameter.sharded_param)


def gather_in_float32(model: nn.Module, names: Iterable[str], beside_rounded: bool = False) -> None:
    """Has units gather some of their parameters in float32, whatever their type of compute.

    FSDP2 gathers several types in one exchange, but before torch 2.15 reduces one alone: such a unit's gradients are
    made float32 first.

    Args:
        beside_rounded: the shards of the others are held in the type of compute.
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
    # FSDP2 wants one type of all shards of a unit, to which it rounds their gradients. `param_dtype` stays None: what
    # it casts it copies before it allocates the gather's memory, which is where `before_reading_shards` waits.
    parameter.orig_dtype = policy.param_dtype or parameter.orig_dtype


@torch.no_grad()
def _make_gradients_float32(group: Any) -> None:
    for parameter in group.fsdp_params:
        if parameter.sharded_param.requires_grad and parameter.unsharded_accumulated_grad is None:
            parameter.to_accumulated_grad_if_needed()


def end_backward(root: Any) -> None:
    """What FSDP2 does when a backward ends, for backwards that no unit's hook has seen.

    Gradients so far are added up in float32, or reduced where units are set to.
    """
    root._get_fsdp_state()._root_post_backward_final_callback()


def begin_forward(root: Any) -> None:
    """Says that no forward is under way, so that the gathers of the next one wait for what comes before it.

    Where several forwards go through the model together and one has ended, FSDP2 takes the next unit of another for a
    root. torch 2.11 keeps it for good, others until a backward ends: gathers would not wait for the optimizer's step.
    """
    root._get_fsdp_state()._state_ctx.iter_forward_root = None


@contextmanager
def looking_alone(root: Any) -> Iterator[None]:
    """Has FSDP2 not look at all units whenever a backward ends; `end_pass` looks at those that were in it.

    Its look also waits for all reductions so far, which then hide behind nothing.
    """
    context = root._get_fsdp_state()._state_ctx
    context.post_backward_final_callback_queued = True
    try:
        yield
    finally:
        context.post_backward_final_callback_queued = False


def end_pass(modules: Iterable[Any]) -> None:
    """What `end_backward` does, for the units of these modules alone; one that is reduced waits for its reduction."""
    for module in modules:
        state: Any = module._get_fsdp_state()
        for group in _own_groups(module):
            states = type(group._training_state)
            if group._training_state != states.POST_BACKWARD:
                group.post_backward()
                if group.reduce_grads:
                    _free_last_reduction(group)
            group._training_state = states.IDLE
        state._training_state = type(state._training_state).IDLE


def _free_last_reduction(group: Any) -> None:
    """Waits for the last reduction and lets its input go; torch 2.11 does so only where it reduces the next unit."""
    last = getattr(group.comm_ctx, "reduce_scatter_state", None)
    if last is not None:
        if last.event is not None:
            group.device_handle.current_stream().wait_event(last.event)
        group.comm_ctx.reduce_scatter_state = None


def stay_in_forward(root: Any) -> None:
    """Says that the root's forward is still under way, after a backward in its midst.

    FSDP2 would free the root's parameters when that forward ends, and gather them for the backward behind it.
    """
    for group in _own_groups(root):
        group._training_state = type(group._training_state).FORWARD


def _has_gradient(parameter: Any) -> bool:
    return parameter.unsharded_accumulated_grad is not None or parameter.unsharded_param.grad is not None


def reduce_again_after(module: FSDPModule, read: Any) -> None:
    """Has the next reduce-scatter wait for `read`, the event after the last reading of the unit's reduced gradient.

    FSDP2 allocates the reduced gradient on its reduce-scatter stream, but its all-reduce hook and its rounding read
    it on the all-reduce stream. Freed after that, its memory goes to the next unit's reduce-scatter, which would wait
    for neither. Across replicas FSDP2 itself holds the memory until backward ends (pytorch#140044), and waiting here
    would only keep a unit's reduce-scatter from running beside the all-reduce of the one before.
    """
    group = next(fsdp_groups(module))  # type: ignore[arg-type]
    if not group._is_hsdp:
        group.comm_ctx.reduce_scatter_stream.wait_event(read)


def free_reduced_gradient(module: FSDPModule) -> None:
    """Frees the unit's reduced gradient when its reduction is over, where the unit's hook calls `reduce_again_after`.

    FSDP2 of torch 2.15 holds what it has shown to a hook until backward ends: of all units together this is the
    whole gradient of a rank's shard in float32, which offload is there to keep off the device.
    """
    group = next(fsdp_groups(module))  # type: ignore[arg-type]
    reduce = group.post_backward

    def reduce_and_free(*args: Any) -> None:
        reduce(*args)
        if not group._is_hsdp:
            group._all_reduce_state = None

    group.post_backward = reduce_and_free


def frees_gather_before_copying() -> bool:
    """Whether a forward lets go of the last gather's output before it copies the next (torch 2.15), or after that."""
    return hasattr(FSDPCommContext, "release_all_gather_state_for_comm_reuse")


def frees_all_gradients_before_reducing() -> bool:
    """Whether no gradient of a unit outlives its copy into the reduction's input (torch 2.15), or the last one does."""
    return hasattr(FSDPParamGroup, "_take_unsharded_grads_to_reduce")


def autograd_sums_gradients() -> bool:
    """Whether autograd adds up a window's gradients, each where it arises and in the type of its sum (torch 2.15).

    Before, FSDP2 did when a unit had all of its own, and it could reduce one type alone.
    """
    return not hasattr(FSDPParam, "to_accumulated_grad_if_needed")
