"""The mesh of ranks with tensor groups, the cut of a model for it, and its shards shown as whole tensors."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from toolkit.sharding.fsdp2.fsdp_replaced import sum_before_reduction, wrap_as_dtensor
from toolkit.sharding.fsdp2.shards import TENSOR
from toolkit.sharding.plan.strategy import MeshShape
from toolkit.sharding.tensor.cut import Cut, Key, cut_model
from toolkit.sharding.tensor.moves import TensorRanks
from toolkit.sharding.tensor.plan import tensor_plan


def tensor_mesh(device_type: str, shape: MeshShape, replicated: bool) -> DeviceMesh:
    """Returns the mesh of all ranks: (tp, dp_shard), or (dp_replicate, tp, dp_shard). Collective.

    A tensor group is of neighbouring ranks, as it meets several times in a layer. Its axis comes before that of the
    shards, because a rank's shard is a part of its group's part.
    """
    names: tuple[str, ...] = ("dp_replicate", TENSOR, "dp_shard")
    ranks = torch.arange(shape.replicate * shape.shard * shape.tensor)
    grid = ranks.view(shape.replicate, shape.shard, shape.tensor).transpose(1, 2)
    if not replicated:
        grid, names = grid[0], names[1:]
    return DeviceMesh(device_type, grid.contiguous(), mesh_dim_names=names)


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the mesh of the ranks that hold the same parts: (shard), or (replicate, shard)."""
    names = mesh.mesh_dim_names
    if names is None or TENSOR not in names:
        return mesh
    others = tuple(name for name in names if name != TENSOR)
    return mesh[others[0] if len(others) == 1 else others]


def joined_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the mesh of all ranks for a model that is not cut: shard groups have the tensor groups' ranks as well.

    It is (shard), or (replicate, shard). Collective if there are tensor groups.
    """
    names = mesh.mesh_dim_names
    if names is None or TENSOR not in names:
        return mesh
    ranks = mesh.mesh.transpose(-1, -2).flatten(-2)
    return DeviceMesh(mesh.device_type, ranks.contiguous(), mesh_dim_names=names[:-2] + names[-1:])


def with_tensor_axis(mesh: DeviceMesh) -> DeviceMesh | None:
    """Returns the mesh if its ranks form tensor groups, else None."""
    return mesh if TENSOR in (mesh.mesh_dim_names or ()) else None


def cut_for(model: nn.Module, mesh: DeviceMesh) -> Cut:
    """Cuts a model in place for the tensor groups of a mesh.

    Raises:
        BadInputError: if it cannot be cut so.
    """
    size = mesh[TENSOR].size()
    ranks = TensorRanks(size, mesh.get_local_rank(TENSOR), mesh.get_group(TENSOR))
    return cut_model(model, tensor_plan(model, size), ranks)


def present_whole(unit: nn.Module, mesh: DeviceMesh, cut: Cut) -> None:
    """Shows the shards of a unit as DTensors of whole parameters, and sums its partial gradients over tensor groups."""
    axes = mesh.mesh_dim_names or ()

    def placements(key: Key) -> list[Placement]:
        dim = cut.dims.get(key)
        return [Replicate() if dim is None or name != TENSOR else Shard(dim) for name in axes[:-1]]

    wrap_as_dtensor(unit, mesh, cut.shapes, placements)
    sum_before_reduction(unit, cut.partial, mesh.get_group(TENSOR))
