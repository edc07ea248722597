"""What each rank holds of a DTensor, and how the parts make the whole."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta


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


def shard_chunk(parameter: DTensor) -> int:
    """Rows of dimension 0 in one shard, padding included: ceil(rows / F)."""
    return -(-parameter.shape[0] // parameter.device_mesh.size(_shard_axis(parameter)))


def shard_rows(parameter: DTensor) -> slice:
    """The rows of dimension 0 that this rank holds: chunks of ceil(rows / F), as `torch.chunk` cuts them."""
    position = parameter.device_mesh.get_local_rank(_shard_axis(parameter))
    chunk, num_rows = shard_chunk(parameter), parameter.shape[0]
    return slice(min(position * chunk, num_rows), min((position + 1) * chunk, num_rows))


def row_counts(parameter: DTensor) -> list[int]:
    """The rows of dimension 0 that each rank of the shard group holds."""
    chunk, num_rows = shard_chunk(parameter), parameter.shape[0]
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
