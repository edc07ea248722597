"""Which rows of a parameter each rank holds, and how to get the whole parameter from them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

Rows = tuple[slice, ...]
"""Index of a tensor's rows along the dimension in which it is sharded."""

MAX_PADDING = 1 / 8
"""Largest share of padding rows that `shard_dim` accepts for a stack."""


def shard_dim(shape: Sequence[int], num_shards: int) -> int:
    """Returns the dimension along which a parameter is sharded: 0 (rows), or 1 for a stack that would be padded a lot.

    FSDP2 pads rows to a multiple of the ranks. With 8 experts on 16 ranks, half of the ranks would hold one expert and
    half none, and each would hold, gather and reduce twice its share. Such a stack (E, rows, columns) is sharded along
    its matrices' rows. FSDP2 then needs these to be a multiple of the ranks, and makes one more copy of the gathered
    parameter and of the gradient. A little padding (60 experts on 8 ranks) costs less.

    Args:
        shape: the shape of the whole parameter.
        num_shards: the number of ranks that share it.
    """
    if len(shape) < 3 or shape[1] % num_shards:
        return 0
    return int(-shape[0] % num_shards > MAX_PADDING * shape[0])


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a DTensor, in the shape of its shard, or a plain tensor (any shape) unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def state_once(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the model's state dict with every parameter once, under its first name, then the persistent buffers.

    Tensors have the shapes of the model; sharded parameters are DTensors. If the optimizer state is offloaded, the
    parameters are the float32 masters.
    """
    state = model.state_dict()
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    return {name: state[name] for name in names if name in state}


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Gathers a DTensor of any shape on every rank. Returns a plain tensor unchanged. Collective for a DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_dim(parameter: DTensor) -> int:
    """Returns the dimension along which a parameter of any shape is sharded. Its slices along it are called rows."""
    placement = parameter.placements[_shard_axis(parameter)]
    assert isinstance(placement, Shard)
    return placement.dim


def shard_chunk(parameter: DTensor) -> int:
    """Returns the number of rows in one shard, padding included: ceil(rows / F)."""
    return -(-parameter.shape[sharded_dim(parameter)] // parameter.device_mesh.size(_shard_axis(parameter)))


def shard_shape(parameter: DTensor) -> torch.Size:
    """Returns the shape of one shard of a parameter of any shape, padding included."""
    dim = sharded_dim(parameter)
    return torch.Size((*parameter.shape[:dim], shard_chunk(parameter), *parameter.shape[dim + 1 :]))


def shard_rows(parameter: DTensor) -> Rows:
    """Returns the index of the rows that this rank holds: one chunk of ceil(rows / F) rows, as of `torch.chunk`."""
    position, dim = parameter.device_mesh.get_local_rank(_shard_axis(parameter)), sharded_dim(parameter)
    chunk, num_rows = shard_chunk(parameter), parameter.shape[dim]
    rows = slice(min(position * chunk, num_rows), min((position + 1) * chunk, num_rows))
    return (*map(slice, parameter.shape[:dim]), rows)


def row_counts(parameter: DTensor) -> list[int]:
    """Returns how many rows of a parameter (any shape) each rank of the shard group holds, without padding."""
    chunk, num_rows = shard_chunk(parameter), parameter.shape[sharded_dim(parameter)]
    num_shards = parameter.device_mesh.size(_shard_axis(parameter))
    return [min(chunk, max(0, num_rows - position * chunk)) for position in range(num_shards)]


def shard_group(parameter: DTensor) -> dist.ProcessGroup:
    """Returns the group of the ranks that hold the shards of one copy of a parameter (any shape)."""
    return parameter.device_mesh.get_group(_shard_axis(parameter))


def _shard_axis(parameter: DTensor) -> int:
    return next(i for i, placement in enumerate(parameter.placements) if isinstance(placement, Shard))


def beside(parameter: DTensor, local: torch.Tensor) -> DTensor:
    """Wraps `local` as this rank's shard of a DTensor that is sharded like `parameter`.

    `local` stays on its device; `DTensor.from_local` would move it to the mesh's device. FSDP2's own host offload
    holds such tensors too, and torch's state dict functions gather them.

    Args:
        parameter: the parameter whose shape, mesh and placements are taken.
        local: this rank's rows, in the shape of this rank's shard of `parameter`, of any dtype and on any device.
    """
    spec = DTensorSpec(
        parameter.device_mesh,
        parameter.placements,
        tensor_meta=TensorMeta(parameter.shape, parameter.stride(), local.dtype),
    )
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
