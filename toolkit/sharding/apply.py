"""Turns a model into an FSDP2 model, given a unit plan and a strategy. The only caller of `fully_shard`.

Reference: torch.distributed.fsdp.fully_shard (FSDP2, per-parameter sharding).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from toolkit.errors import BadInputError
from toolkit.recipe.combinations import refuse
from toolkit.recipe.features import Surroundings, settings_of_backend
from toolkit.sharding.blocks.by_block import in_window
from toolkit.sharding.blocks.checkpointing import Checkpointing, checkpoint_blocks
from toolkit.sharding.blocks.compiling import Compilation, compile_blocks
from toolkit.sharding.fsdp2.fsdp import autograd_sums_gradients
from toolkit.sharding.fsdp2.fsdp_replaced import (
    gather_in_float32,
    pass_over_ungathered_units,
    shapes_inside,
    wrap_as_dtensor,
)
from toolkit.sharding.fsdp2.gloo import average_over, communicate
from toolkit.sharding.fsdp2.precision import hold_in_float32, kept_in_float32, round_buffers, types_of_authors
from toolkit.sharding.fsdp2.shards import rows_in_part, shard_dim
from toolkit.sharding.fsdp2.unit_states import UnitStates
from toolkit.sharding.parallel.expert_parallel import GROUP, SHARD, holders, require_experts, shard_experts
from toolkit.sharding.plan.strategy import Strategy
from toolkit.sharding.plan.unit_plan import UnitPlan
from toolkit.sharding.tensor.axes import cut_for, data_mesh, present_whole, with_tensor_axis

PRECISIONS = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class KeepsMasters(Protocol):
    """Stores the master weights of a trainable parameter.

    Args:
        name: the parameter's first name in the model.
        rows: this rank's rows of it (its slice along the sharded dimension), not rounded.
    """

    def __call__(self, name: str, rows: torch.Tensor) -> None: ...


LoadsWeights = Callable[[KeepsMasters | None], None]
"""Loads the weights of a model that was built without, and passes masters on if they are kept elsewhere."""


def precision_policies(
    mixed_precision: str, reduce_dtype: torch.dtype | None = torch.float32, casts_inputs: bool = True
) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy]:
    """Returns the mixed-precision policies of the units and of the root.

    Compute and all-gather use the mixed type. Reduction uses float32, because a bf16 sum over many ranks loses the
    contribution of small gradients. The model's outputs are float32, and so is the loss.

    Args:
        mixed_precision: `no`, `bf16` or `fp16`.
        reduce_dtype: the type of gradient reduction. None means the compute type, for a single rank that sums nothing.
        casts_inputs: whether units cast their inputs to the compute type. False for models of a library: their authors
            cast where they want to, and what they pass to the blocks in float32 (rotary tables, router outputs)
            stays float32.

    Raises:
        BadInputError: if `mixed_precision` is unknown.
    """
    if mixed_precision not in PRECISIONS:
        raise BadInputError(f"mixed_precision: found {mixed_precision!r}; allowed: {', '.join(PRECISIONS)}")
    param_dtype = PRECISIONS[mixed_precision]
    unit = MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=casts_inputs)
    root = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, output_dtype=torch.float32)
    return unit, root


def prepare_blocks(
    model: nn.Module, plan: UnitPlan, checkpointing: Checkpointing | None, compilation: Compilation | None
) -> None:
    """Compiles, then checkpoints, the forwards of the blocks, if asked to. Only this order works with both."""
    if compilation is not None:
        compile_blocks(model, plan, compilation)
    if checkpointing is not None:
        checkpoint_blocks(model, plan, checkpointing)


def apply(
    model: nn.Module,
    plan: UnitPlan,
    strategy: Strategy,
    mesh: DeviceMesh,
    mixed_precision: str,
    is_last_micro_batch: Callable[[], bool],
    offload: Callable[[nn.Module], KeepsMasters] | None = None,
    experts: DeviceMesh | None = None,
    reshard_after_forward: int | None = None,
    load_weights: LoadsWeights | None = None,
) -> dict[nn.Parameter, nn.Parameter]:
    """Shards `model` in place, one `fully_shard` call per unit.

    Parameters on the meta device are sharded there. `load_weights` then gives each rank its own slices.

    Args:
        model: may be on any device. Under mixed precision its trainable parameters become float32.
        mesh: (shard) or (replicate, shard), and then the axis `tp` of ranks that cut matrices, if any do.
        mixed_precision: `no`, `bf16` or `fp16`.
        is_last_micro_batch: called before every forward; returns whether its micro-batch ends the optimizer step.
        offload: called with the sharded model before it has weights. The callable that it returns receives the
            master weights, and trainable parameters are held in the compute type.
        experts: the grid of ranks for expert parallelism. If given, `plan` has units of experts.
        reshard_after_forward: the neighbouring ranks, usually those of a node, among which units are sharded from
            forward to backward. None: among all ranks of a shard group.
        load_weights: gives a model on the meta device its weights. None leaves them as they are.

    Returns:
        Each old parameter mapped to the sharded parameter that replaces it.
    """
    types, kept = _set_dtypes(model, mixed_precision, offload is not None, experts is not None)
    before = dict(model.named_parameters(remove_duplicate=False))
    tensor, mesh = with_tensor_axis(mesh), data_mesh(mesh)
    cut = None if tensor is None else cut_for(model, tensor)
    originals: dict[str, torch.Tensor] = {}
    # One rank reduces nothing: gradients travel in the type of compute, if all have it; zero1 sums windows.
    is_alone = mesh.size() == 1 and tensor is None
    alone = offload is not None and is_alone and strategy.reduce_each_micro_batch and not _trained(model, kept)
    unit_policy, root_policy = precision_policies(mixed_precision, None if alone else torch.float32, not types)
    if experts is not None:
        require_experts(model, mesh.shape[-1])
    for unit in plan.units:
        modules = [model.get_submodule(path) for path in unit.modules]
        if PRECISIONS[mixed_precision] is None and not autograd_sums_gradients():
            _require_one_trained_type(model, modules)
        if offload is not None:
            originals |= _hold_in_compute_type(model, modules, PRECISIONS[mixed_precision], kept)
        if unit.kind == "experts" and experts is not None:
            _shard_expert_unit(modules[0], mesh, experts, unit_policy, strategy)
        else:
            policy = root_policy if unit.kind == "root" else unit_policy
            reshards = strategy.reshard_each_micro_batch and unit.reshard_after_forward
            _shard_unit(modules, mesh, policy, reshards and (reshard_after_forward or True))
        if cut is not None and tensor is not None:
            present_whole(modules[0], tensor, cut)
    gather_in_float32(model, kept, beside_rounded=offload is not None)
    # After all units are made: now each rank knows its rows, and reads no others.
    keep_master = offload(model) if offload is not None else None
    if keep_master is not None:
        _hand_over_masters(model, originals, keep_master)
    if load_weights is not None:
        load_weights(keep_master)
    round_buffers(model, types)
    pass_over_ungathered_units(model)
    UnitStates(model).follow_micro_batches(strategy, is_last_micro_batch, in_window)
    return {before[name]: parameter for name, parameter in model.named_parameters(remove_duplicate=False)}


def _shard_unit(modules: list[nn.Module], mesh: DeviceMesh, policy: MixedPrecisionPolicy, reshards: int) -> None:
    """Makes the modules one FSDP2 unit.

    Args:
        reshards: FSDP2's `reshard_after_forward`: whether, or the ranks among which.
    """
    unit = modules if len(modules) > 1 else modules[0]
    num_shards = mesh.size(mesh.ndim - 1)
    if reshards > 1:
        _require_rows(modules, num_shards)
    fully_shard(
        unit,
        mesh=mesh,
        mp_policy=policy,
        reshard_after_forward=reshards,
        shard_placement_fn=lambda parameter: Shard(shard_dim(parameter.shape, num_shards)),
    )
    communicate(modules[0])


def _require_rows(modules: Sequence[nn.Module], num_shards: int) -> None:
    shapes = [tuple(parameter.shape) for module in modules for parameter in module.parameters()]
    stack = next((shape for shape in shapes if shard_dim(shape, num_shards)), None)
    if stack is not None:
        raise BadInputError(
            f"sharding.reshard_after_forward: a stack of {stack[0]} experts {stack} is sharded along the rows of its "
            f"matrices on {num_shards} ranks, which FSDP2 cannot gather inside a group; remove it"
        )


def _shard_expert_unit(
    module: nn.Module, mesh: DeviceMesh, grid: DeviceMesh, policy: MixedPrecisionPolicy, strategy: Strategy
) -> None:
    """Makes the experts of a layer a unit, sharded among the ranks that hold the same experts."""
    # Their block has cast what is to be cast; the weights of experts' outputs may be float32.
    uncast = replace(policy, cast_forward_inputs=False)
    shapes = shapes_inside(module)
    shard_experts(module, grid[GROUP].size(), grid)
    _shard_unit([module], holders(grid), uncast, strategy.reshard_each_micro_batch)
    wrap_as_dtensor(module, mesh, shapes)
    average_over(module, grid[SHARD].size(), mesh.size())


def hold_whole(model: nn.Module, mixed_precision: str, load_weights: LoadsWeights | None) -> None:
    """Loads all weights of a frozen model on every rank, in the types in which it computes."""
    types, _ = _set_dtypes(model, mixed_precision, is_offloaded=False)
    if load_weights is not None:
        load_weights(None)
    round_buffers(model, types)


def _set_dtypes(
    model: nn.Module, mixed_precision: str, is_offloaded: bool, is_spread: bool = False
) -> tuple[dict[str, torch.dtype], list[str]]:
    """Casts master weights to float32. Returns (compute dtype by name, names of what is computed in float32)."""
    dtype = PRECISIONS[mixed_precision]
    types = {} if dtype is None else types_of_authors(model, dtype)
    kept = kept_in_float32(model, types)
    if is_offloaded:
        _require_one_type(model, kept, is_spread)
    elif dtype is not None:
        _hold_masters_in_float32(model)
    hold_in_float32(model, kept)
    return types, kept


def _hold_masters_in_float32(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()


def _require_one_type(model: nn.Module, kept: Sequence[str], is_spread: bool) -> None:
    """Raises BadInputError if trainable parameters stay in float32 in a configuration that is untested."""
    first = next(iter(_trained(model, kept)), None)
    torch_sums = autograd_sums_gradients()
    settings = settings_of_backend(offload="optimizer", experts=2 if is_spread else 1)
    refuse(settings, Surroundings(sums_in_autograd=torch_sums, keeps_float32=first))


def _require_one_trained_type(model: nn.Module, modules: Sequence[nn.Module]) -> None:
    """Raises BadInputError if trainable parameters of a unit have several types, of which FSDP2 reduces only one."""
    own = (parameter for module in modules for parameter in module.parameters())
    found = {each.dtype: each for each in own if each.requires_grad and not isinstance(each, DTensor)}
    if len(found) > 1:
        name_of = {id(parameter): name for name, parameter in model.named_parameters()}
        types = " and ".join(f"{name_of[id(each)]} {str(dtype)[6:]}" for dtype, each in found.items())
        raise BadInputError(
            f"in a unit of the model {types} are trained, but before torch 2.15 FSDP2 reduces one type; load the model "
            "in float32, and set mixed_precision=bf16 in Accelerator"
        )


def _trained(model: nn.Module, names: Sequence[str]) -> list[str]:
    return [name for name in names if model.get_parameter(name).requires_grad]


def _hold_in_compute_type(
    model: nn.Module, modules: Sequence[nn.Module], dtype: torch.dtype | None, kept: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Rounds a unit's trainable parameters to `dtype`, except `kept`. Returns the unrounded originals by first name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    originals: dict[str, torch.Tensor] = {}
    for module in modules:
        for parameter in module.parameters():
            name = names[id(parameter)]
            # A DTensor already belongs to an earlier unit; the root contains them all.
            if parameter.requires_grad and not isinstance(parameter, DTensor) and name not in originals:
                originals[name] = parameter.data
                if dtype is not None and name not in kept:
                    parameter.data = parameter.data.to(dtype)
    return originals


def _hand_over_masters(model: nn.Module, originals: dict[str, torch.Tensor], keep_master: KeepsMasters) -> None:
    """Passes this rank's rows of the unrounded parameters to `keep_master` and frees the rest."""
    for name, parameter in model.named_parameters():
        original = originals.pop(name, None)
        # On the meta device there is nothing to hand over yet: `load_weights` does so when it reads them.
        if original is not None and not original.is_meta:
            assert isinstance(parameter, DTensor)
            keep_master(name, original[rows_in_part(parameter)] if original.ndim else original)
