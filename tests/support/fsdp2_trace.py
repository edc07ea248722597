"""Runs the real FSDP2 on a fake process group, to count what a rank would hold, byte by byte.

It is slow (seconds to a minute) and exact: what the planner is compared with. It runs the backend's own `apply` under
FakeTensorMode, so it needs no GPU and works for any number of ranks.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_post_forward_mesh_info
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from toolkit.model.structure.fake_tensors import FakeTensorMode, grouped_products
from toolkit.objectives.teacher import shard_teacher
from toolkit.planning.memory.fake import Ledger, cuda_dropout, host_copies, tree_map_only
from toolkit.planning.memory.known import known_batch
from toolkit.planning.workload.workload import Workload
from toolkit.sharding.apply import apply, prepare_blocks
from toolkit.sharding.blocks.by_block import ByBlock
from toolkit.sharding.blocks.checkpointing import Checkpointing
from toolkit.sharding.parallel.expert_parallel import expert_grid
from toolkit.sharding.parallel.sequence_parallel import without_ranks
from toolkit.sharding.plan.strategy import MeshShape, Strategy
from toolkit.sharding.plan.units import plan_units
from toolkit.sharding.tensor.axes import data_mesh, joined_mesh, tensor_mesh

COLLECTIVES = {
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "allreduce_": "all_reduce",
}
"""Operators of torch.distributed -> their kind of collective."""


@contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """A process group of this process and others that do not exist; collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def in_these_modes(act: Callable[[], Any]) -> Callable[[], Any]:
    """A function that runs `act` under this thread's dispatch modes, in whichever thread it is called."""
    modes = _get_current_dispatch_mode_stack()

    def run() -> Any:
        with ExitStack() as stack:
            for mode in modes:  # pushed, not entered again: what they change in the process is changed already
                _push_mode(mode)
                stack.callback(_pop_mode)
            return act()

    return run


@dataclass(frozen=True)
class Traced:
    """Bytes of one rank without the optimizer's state.

    Attributes:
        between: the shards, buffers and the batch before a step.
        peak: the most during the step.
        moment: the name of the moment of the peak.
        traffic: bytes of the whole tensors of the collectives, by kind.
        host_peak: the most that offloaded checkpoints took on the host.
    """

    between: int
    peak: int
    moment: str
    traffic: dict[str, int]
    host_peak: int


def trace(
    workload: Workload,
    strategy: Strategy,
    shape: MeshShape,
    micro_batch_size: int,
    accumulation: int = 1,
    checkpointing: Checkpointing | None = None,
    by_block: bool = False,
) -> Traced:
    """Traces an optimizer step up to the optimizer, on the first of `shape`'s ranks.

    The process must not be in a process group; it is in none afterwards.

    Args:
        by_block: whether the micro-batches go through each unit together.
    """
    counted: Counter[str] = Counter()
    ledger = Ledger(on_operator=lambda func, args, kwargs, out: _count_collective(counted, func, args))
    plan = plan_units(workload.model, workload.unit_classes, workload.experts > 1)
    last = [False]
    with fake_ranks(shape.num_ranks):
        of_all = _mesh(strategy, shape)
        mesh, joined = data_mesh(of_all), joined_mesh(of_all)  # made of ranks that have values
        grid = expert_grid(mesh, workload.experts)
        shard = functools.partial(apply, experts=grid, reshard_after_forward=shape.reshard_after_forward)
        model, teacher, planned = workload.model_copy(), workload.teacher_copy(), without_ranks()
        models = [model] if teacher is None else [model, teacher]
        objective = workload.objective(*models)  # looks at the forward, which FSDP2 forbids before the root's first one
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with ExitStack() as stack:
            for mode in (fake, cuda_dropout(), host_copies(ledger), planned, grouped_products()):
                stack.enter_context(mode)
            meshes = unset_fake_temporarily()(_get_post_forward_mesh_info)  # read the numbers of ranks
            stack.enter_context(mock.patch.object(_fully_shard, "_get_post_forward_mesh_info", meshes))
            prepare_blocks(model, plan, checkpointing, None)
            shard(model, plan, strategy, mesh, workload.mixed_precision, lambda: last[0])
            # After `apply`, so that each rank makes only its own shards.
            model.to_empty(device="cpu")
            if teacher is not None:
                shard_teacher(teacher, strategy, joined, workload.mixed_precision, workload.unit_classes)
                teacher.to_empty(device="cpu")
            # One after another, batches reuse the same memory; by block they all exist at once.
            made = [workload.batch(micro_batch_size) for _ in range(accumulation if by_block else 1)]
            batches = [known_batch(stack, batch, objective) for batch in made]
            _see_held(ledger, models, batches)
            # Before the ledger opens, so that making the shards is not part of the peak.
            between = ledger.current
            _label_units(model, [path for unit in plan.blocks for path in unit.modules], ledger)
            runner = ByBlock(model, plan) if by_block else None
            with ledger:
                ledger.label = "forward"
                if runner is not None:
                    losses = [in_these_modes(functools.partial(objective.loss_sum, model, batch)) for batch in batches]
                    runner.run(losses, _scaled_backward, functools.partial(setattr, ledger, "label", "backward"))
                for micro_batch in range(0 if by_block else accumulation):
                    last[0] = micro_batch == accumulation - 1
                    ledger.label = "forward"
                    loss = objective.loss_sum(model, batches[0])
                    ledger.label = "backward"
                    _scaled_backward(loss)
                    del loss
    return Traced(between, ledger.peak, ledger.peak_label, dict(counted), ledger.host_peak)


def _see_held(ledger: Ledger, models: list[nn.Module], batches: list[dict[str, Any]]) -> None:
    """Counts what exists before the step."""
    on_device = (value for batch in batches for value in batch.values() if isinstance(value, torch.Tensor))
    for tensor in (*(held for each in models for held in (*each.parameters(), *each.buffers())), *on_device):
        ledger.see(tensor)


def _scaled_backward(loss: torch.Tensor) -> None:
    torch.autograd.backward(loss * 1.0)  # Accelerate scales the loss too: one more node above it


def _mesh(strategy: Strategy, shape: MeshShape) -> DeviceMesh:
    if shape.tensor > 1:
        return tensor_mesh("cpu", shape, strategy.replicated)
    if strategy.replicated:
        return init_device_mesh("cpu", (shape.replicate, shape.shard), mesh_dim_names=("dp_replicate", "dp_shard"))
    return init_device_mesh("cpu", (shape.shard,), mesh_dim_names=("dp_shard",))


def _label_units(model: nn.Module, paths: list[str], ledger: Ledger) -> None:
    """Labels the ledger with the block whose forward or backward runs."""

    def say(path: str) -> None:
        ledger.label = f"{ledger.label.split(' ')[0]} of {path}"

    def watch(path: str, tensor: torch.Tensor) -> None:
        if tensor.requires_grad:
            tensor.register_hook(lambda _gradient: say(path))  # type: ignore[no-untyped-call]

    for path in paths:
        module = model.get_submodule(path)
        module.register_forward_pre_hook(lambda _module, _args, path=path: say(path))
        # Not a full backward hook, which would keep the gradients of the outputs alive.
        module.register_forward_hook(
            lambda _module, _args, output, path=path: (
                tree_map_only(torch.Tensor, functools.partial(watch, path), output) and None
            )
        )


def _count_collective(counted: Counter[str], func: Any, args: Any) -> None:
    namespace, _, name = func._schema.name.partition("::")
    # The largest argument is the whole tensor: an all-gather's output, a reduce-scatter's input.
    if namespace in ("c10d", "_c10d_functional"):
        counted[COLLECTIVES.get(name, name)] += max((_tensor_bytes(value) for value in args), default=0)


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(_tensor_bytes(item) for item in value) if isinstance(value, list | tuple) else 0
