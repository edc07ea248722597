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


def chunk_of(length: int, num_chunks: int, number: int) -> slice:
    """Returns the place of a chunk in `length` entries, as `torch.chunk` cuts them; the last ones may be empty."""
    width = -(-length // num_chunks)
    return slice(min(number * width, length), min((number + 1) * width, length))


def sharded_dim(parameter: DTensor) -> int:
    """Returns the dimension along which FSDP2 shards a parameter of any shape. Its slices along it are called rows."""
    placement = parameter.placements[_shard_axis(parameter)]
    assert isinstance(placement, Shard)
    return placement.dim


def tensor_dim(parameter: DTensor) -> int | None:
    """Returns the dimension along which a tensor group cuts a parameter (any shape), or None if it is whole there."""
    axis = _tensor_axis(parameter)
    placement = None if axis is None else parameter.placements[axis]
    return placement.dim if isinstance(placement, Shard) else None


def tensor_part(parameter: DTensor) -> Rows:
    """Returns the index of the part of a parameter (any shape) that this rank's shard group has, as `torch.chunk`s."""
    dim = tensor_dim(parameter)
    if dim is None:
        return tuple(slice(0, length) for length in parameter.shape)
    axis = _tensor_axis(parameter)
    assert axis is not None
    mesh, length = parameter.device_mesh, parameter.shape[dim]
    part = chunk_of(length, mesh.size(axis), mesh.get_local_rank(axis))
    return tuple(part if number == dim else slice(0, size) for number, size in enumerate(parameter.shape))


def tensor_group(parameter: DTensor) -> dist.ProcessGroup | None:
    """Returns the group of ranks whose parts make a parameter (any shape) whole, or None without tensor parallelism."""
    axis = _tensor_axis(parameter)
    return None if axis is None else parameter.device_mesh.get_group(axis)


def shard_chunk(parameter: DTensor) -> int:
    """Returns the number of rows in one shard, padding included: ceil(rows / F)."""
    part = tensor_part(parameter)[sharded_dim(parameter)]
    return -(-int(part.stop - part.start) // parameter.device_mesh.size(_shard_axis(parameter)))


def shard_shape(parameter: DTensor) -> torch.Size:
    """Returns the shape of one shard of a parameter of any shape, padding included."""
    dim = sharded_dim(parameter)
    sizes = [part.stop - part.start for part in tensor_part(parameter)]
    return torch.Size((*sizes[:dim], shard_chunk(parameter), *sizes[dim + 1 :]))


def shard_rows(parameter: DTensor) -> Rows:
    """Returns the index of the rows that this rank holds: one chunk of ceil(rows / F) rows, as of `torch.chunk`.

    Under tensor parallelism these are rows of a part, which may have some of the columns.
    """
    position, dim = parameter.device_mesh.get_local_rank(_shard_axis(parameter)), sharded_dim(parameter)
    parts = list(tensor_part(parameter))
    first, last = parts[dim].start, parts[dim].stop
    rows = chunk_of(last - first, parameter.device_mesh.size(_shard_axis(parameter)), position)
    parts[dim] = slice(first + rows.start, first + rows.stop)
    return tuple(parts[: max(dim, tensor_dim(parameter) or 0) + 1])


def rows_in_part(parameter: DTensor) -> Rows:
    """Returns the index of the rows that this rank holds in the part of `tensor_part`."""
    pairs = zip(shard_rows(parameter), tensor_part(parameter), strict=False)
    return tuple(slice(rows.start - part.start, rows.stop - part.start) for rows, part in pairs)


def row_counts(parameter: DTensor) -> list[int]:
    """Returns how many rows of a parameter (any shape) each rank of the shard group holds, without padding."""
    part, chunk = tensor_part(parameter)[sharded_dim(parameter)], shard_chunk(parameter)
    num_rows, num_shards = part.stop - part.start, parameter.device_mesh.size(_shard_axis(parameter))
    return [min(chunk, max(0, num_rows - position * chunk)) for position in range(num_shards)]


def shard_group(parameter: DTensor) -> dist.ProcessGroup:
    """Returns the group of the ranks that hold the shards of one copy of a parameter (any shape), or of its part."""
    return parameter.device_mesh.get_group(_shard_axis(parameter))


def _shard_axis(parameter: DTensor) -> int:
    """Returns the axis along which FSDP2 shards: the last one, after those of replicas and of tensor parallelism."""
    return len(parameter.placements) - 1


TENSOR = "tp"
"""The axis of a mesh whose ranks cut matrices; the name is Accelerate's."""


def _tensor_axis(parameter: DTensor) -> int | None:
    names = parameter.device_mesh.mesh_dim_names or ()
    return names.index(TENSOR) if TENSOR in names else None


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
