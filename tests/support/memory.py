"""Counts the bytes that a rank holds, each storage once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from toolkit.sharding.fsdp2.fsdp import fsdp_groups
from toolkit.sharding.offload import OffloadEngine, engine_of


@dataclass(frozen=True)
class MemoryReport:
    """Bytes that this rank holds, on the device unless stated otherwise.

    Attributes:
        sharded_parameters: shards, padding included. For an unsharded model, the parameters.
        gathered_parameters: the whole copies of sharded parameters that exist right now.
        gradients: sharded or whole, in the type in which they are accumulated.
        optimizer_state: moments and step counts. With offload, the part that stays on the device, masters included.
        host_state: the host memory of offload: masters, moments, gradient buffers and staging.
    """

    sharded_parameters: int
    gathered_parameters: int
    gradients: int
    optimizer_state: int
    host_state: int = 0


def memory_report(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> MemoryReport:
    """Counts the bytes that this rank holds for `model` and `optimizer`, each storage once.

    Args:
        model: sharded, in DDP, or plain.
        optimizer: torch's or Accelerate's.
    """
    seen: set[int] = set()
    sharded = _count_bytes(_shard_tensors(model), seen)
    gathered = _count_bytes(_gathered_tensors(model), seen)
    gradients = _count_bytes(_gradient_tensors(model), seen)
    engine = engine_of(model)
    state = _count_bytes(_optimizer_tensors(optimizer, engine), seen) if optimizer is not None else 0
    return MemoryReport(sharded, gathered, gradients, state, 0 if engine is None else engine.state.host_bytes)


def _count_bytes(tensors: Iterator[torch.Tensor | None], seen: set[int]) -> int:
    """Returns the bytes of the storages that were not counted before. Freed storages have none."""
    total = 0
    for tensor in tensors:
        if tensor is None:
            continue
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        # FSDP2 frees what it has gathered by shrinking the storage to nothing; the tensors stay.
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def _shard_tensors(model: nn.Module) -> Iterator[torch.Tensor | None]:
    groups = list(fsdp_groups(model))
    for parameter in _fsdp_parameters(groups):
        yield parameter._sharded_param_data
        yield parameter.sharded_param
    if not groups:
        yield from model.parameters()


def _gathered_tensors(model: nn.Module) -> Iterator[torch.Tensor | None]:
    for parameter in _fsdp_parameters(fsdp_groups(model)):
        yield getattr(parameter, "_unsharded_param", None)
        yield from parameter.all_gather_outputs


def _gradient_tensors(model: nn.Module) -> Iterator[torch.Tensor | None]:
    groups = list(fsdp_groups(model))
    for group in groups:
        # Of a replicated unit: reduced inside the shard group, not yet over the replicas.
        yield getattr(group, "_partial_reduce_output", None)
    for parameter in _fsdp_parameters(groups):
        whole = getattr(parameter, "_unsharded_param", None)
        yield whole.grad if whole is not None else None
        yield parameter.unsharded_accumulated_grad
        yield parameter.sharded_param.grad
    engine = engine_of(model)
    for unit in engine.state.units if engine is not None else ():
        yield unit.accumulated
    if not groups:
        for plain in model.parameters():
            yield plain.grad


def _fsdp_parameters(groups: Iterable[Any]) -> Iterator[Any]:
    for group in groups:
        yield from group.fsdp_params


def _optimizer_tensors(optimizer: torch.optim.Optimizer, engine: OffloadEngine | None) -> Iterator[torch.Tensor | None]:
    if engine is not None:
        for unit in engine.state.residents:
            yield from (unit.master, unit.landing, *unit.moments.values())
        return
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    for state in inner.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))
