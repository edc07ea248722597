"""Which part of a parameter each rank holds, and how the parts make the whole."""

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
"""Share of a stack's rows that is better padded than avoided; see `shard_dim`."""


def shard_dim(shape: Sequence[int], num_shards: int) -> int:
    """The dimension along which a parameter is sharded among so many ranks: rows, but for stacks that would be padded.

    FSDP2 pads rows to a multiple of the ranks. Of 8 experts on 16 ranks half would hold one and half none, and each
    would hold, gather and reduce twice its share. Such a stack (E, rows, columns) is sharded along its matrices' rows.
    FSDP2 needs these to be a multiple of the ranks, and copies what it has gathered, and gradients, once more: little
    padding (60 experts on 8 ranks) costs less.
    """
    if len(shape) < 3 or shape[1] % num_shards:
        return 0
    return int(-shape[0] % num_shards > MAX_PADDING * shape[0])


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def state_once(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's state, every parameter once, under its first name, then the persistent buffers.

    Holds the float32 masters where the optimizer state is offloaded.
    """
    state = model.state_dict()
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    return {name: state[name] for name in names if name in state}


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The full value of a DTensor, gathered on every rank; a plain tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_dim(parameter: DTensor) -> int:
    """The dimension along which it is sharded; "rows" are its slices along this one."""
    placement = parameter.placements[_shard_axis(parameter)]
    assert isinstance(placement, Shard)
    return placement.dim


def shard_chunk(parameter: DTensor) -> int:
    """Rows in one shard, padding included: ceil(rows / F)."""
    return -(-parameter.shape[sharded_dim(parameter)] // parameter.device_mesh.size(_shard_axis(parameter)))


def shard_shape(parameter: DTensor) -> torch.Size:
    """Of one shard, padding included."""
    dim = sharded_dim(parameter)
    return torch.Size((*parameter.shape[:dim], shard_chunk(parameter), *parameter.shape[dim + 1 :]))


def shard_rows(parameter: DTensor) -> Rows:
    """The rows that this rank holds: chunks of ceil(rows / F) rows, as `torch.chunk` cuts them."""
    position, dim = parameter.device_mesh.get_local_rank(_shard_axis(parameter)), sharded_dim(parameter)
    chunk, num_rows = shard_chunk(parameter), parameter.shape[dim]
    rows = slice(min(position * chunk, num_rows), min((position + 1) * chunk, num_rows))
    return (*map(slice, parameter.shape[:dim]), rows)


def row_counts(parameter: DTensor) -> list[int]:
    """The rows that each rank of the shard group holds."""
    chunk, num_rows = shard_chunk(parameter), parameter.shape[sharded_dim(parameter)]
    num_shards = parameter.device_mesh.size(_shard_axis(parameter))
    return [min(chunk, max(0, num_rows - position * chunk)) for position in range(num_shards)]


def shard_group(parameter: DTensor) -> dist.ProcessGroup:
    """The ranks that hold the shards of one copy of the parameter."""
    return parameter.device_mesh.get_group(_shard_axis(parameter))


def _shard_axis(parameter: DTensor) -> int:
    return next(i for i, placement in enumerate(parameter.placements) if isinstance(placement, Shard))


def beside(parameter: DTensor, local: torch.Tensor) -> DTensor:
    """`local` as this rank's part of a tensor that is sharded as `parameter` is, wherever `local` lies.

    `DTensor.from_local` would move it to the mesh's device; FSDP2's own host offload holds such tensors
    too, and torch's state dict functions gather them.
    """
    spec = DTensorSpec(
        parameter.device_mesh,
        parameter.placements,
        tensor_meta=TensorMeta(parameter.shape, parameter.stride(), local.dtype),
    )
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
