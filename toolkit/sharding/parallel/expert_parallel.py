"""Expert parallelism: each rank computes some of the experts, and tokens are sent to them and back.

Ranks form a grid (n, F / n). The ranks of a row hold the same E / n experts of every layer; FSDP2 gathers and reduces
these experts among the row only. The ranks of a column exchange tokens: before its experts a layer sends each token to
the ranks that hold the chosen experts, and after them it receives their outputs (GShard, arXiv 2006.16668).

Under `hybrid` each replica is such a grid, and its experts are reduced over the replicas like all other parameters.

Experts are assigned to the grid row by row. So between forwards each rank holds E / F experts, the same ones that it
would hold without expert parallelism. Optimizer, norm, checkpoints and exports see no difference.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from toolkit.errors import BadInputError
from toolkit.sharding.fsdp2.fsdp import class_name
from toolkit.sharding.fsdp2.shards import MAX_PADDING, shard_dim, shard_group
from toolkit.sharding.parallel.sequence_parallel import all_to_all, exchanges_are_planned
from toolkit.sharding.plan.units import stacked_experts

REPLICAS, GROUP, SHARD = "replicas", "experts", "expert_shard"
"""Axes of the grid: under `hybrid` replicas; ranks that exchange tokens; ranks that hold the same experts."""

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps hidden states (N, D), expert indices (N, k) and weights (N, k) to the weighted sums (N, D)."""


def expert_grid(mesh: DeviceMesh, size: int) -> DeviceMesh | None:
    """Returns the grid of ranks for expert parallelism, or None if `size` is 1. Collective.

    Args:
        mesh: 1-D (shard), or 2-D (replicate, shard).
        size: the rows of the grid, n: the ranks that exchange tokens.
    """
    if size == 1:
        return None
    *replicas, shard = mesh.shape
    names = (REPLICAS, GROUP, SHARD)[-mesh.ndim - 1 :]
    return init_device_mesh(mesh.device_type, (*replicas, size, shard // size), mesh_dim_names=names)


def holders(grid: DeviceMesh) -> DeviceMesh:
    """Returns the mesh of the ranks that hold the same experts: 1-D (shard), or 2-D (replicate, shard)."""
    return grid[REPLICAS, SHARD] if grid.ndim > 2 else grid[SHARD]


def require_experts(model: nn.Module, num_ranks: int) -> None:
    """Checks that the ranks of a replica can share the experts evenly.

    Raises:
        BadInputError: if the model has no stacked experts, or their number is not a multiple of `num_ranks`.
    """
    stacks = stacked_experts(model)
    if not stacks:
        raise BadInputError(
            f"sharding.experts: no layer of {class_name(model)} holds its experts as stacked parameters, which "
            "transformers marks by use_experts_implementation; remove it"
        )
    for path, module in stacks.items():
        _require_divisible(path, module, num_ranks)


def _require_divisible(path: str, module: nn.Module, num_ranks: int) -> None:
    number = int(module.num_experts)  # type: ignore[arg-type]
    for name, parameter in module.named_parameters():
        if not _has_row_per_expert(name, parameter.shape, number):
            raise BadInputError(
                f"sharding.experts: {path}.{name} of shape {tuple(parameter.shape)} has no row for each of the "
                f"{number} experts; remove sharding.experts"
            )
    if number % num_ranks:
        raise BadInputError(
            f"sharding.experts: the {number} experts of {path} are not a multiple of the {num_ranks} ranks, each of "
            "which holds as many; remove it, or start a number of ranks that divides them"
        )


def _has_row_per_expert(name: str, shape: torch.Size, number: int) -> bool:
    """Returns whether a parameter has a row for each expert. LoRA matrices may have several rows for each."""
    if len(shape) < 2:
        return False
    inner = name.replace("base_layer.", "")
    return shape[0] % number == 0 if inner.startswith("lora_") else "." not in inner and shape[0] == number


def expert_placement(model: nn.Module, num_shards: int | None = None) -> str:
    """Describes how the ranks share a layer's experts if their number does not divide it.

    Returns an empty string if it does, or if no experts are stacked.

    Args:
        num_shards: the ranks that share a copy of the model, or None to read it from the sharded parameters.
    """
    for module in stacked_experts(model).values():
        for stack in (parameter for parameter in module.parameters(recurse=False) if parameter.ndim == 3):
            ranks = num_shards or (shard_group(stack).size() if isinstance(stack, DTensor) else 1)
            if stack.shape[0] % ranks:
                return _placement_message(stack.shape, ranks)
    return ""


def _placement_message(shape: torch.Size, num_shards: int) -> str:
    number, rows = shape[0], -(-shape[0] // num_shards) * num_shards
    if shard_dim(shape, num_shards):
        return f"{number} of a layer are sharded along their matrices' rows, as {num_shards} ranks do not divide them"
    padding = (
        f"{number} of a layer are padded to {rows} for {num_shards} ranks, {rows / number - 1:.0%} more of their bytes"
    )
    if rows - number <= MAX_PADDING * number:
        return padding
    size = math.gcd(number, num_shards)
    mend = f"hybrid with dp_shard_size {size}" if size > 1 else "a number of ranks that divides them"
    return f"{padding}; {mend} pads none"


@torch.no_grad()
def shard_experts(module: nn.Module, size: int, grid: DeviceMesh | None = None) -> None:
    """Keeps only the experts of this rank's row of the grid, and makes the forward exchange tokens with other rows.

    Args:
        module: the stacked experts of a layer, with a row for each expert.
        size: the rows of the grid.
        grid: the grid of ranks, or None for a plan.
    """
    group = size if grid is None else grid.get_group(GROUP)
    position = 0 if grid is None else grid.get_local_rank(GROUP)
    number = int(module.num_experts) // size  # type: ignore[arg-type]
    for inner in module.modules():  # peft's wrappers, their adapters and the experts
        for name, parameter in list(inner.named_parameters(recurse=False)):
            rows = parameter.shape[0] // size
            part = parameter.data.narrow(0, position * rows, rows)
            inner.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        if hasattr(inner, "num_experts"):
            inner.num_experts = number  # type: ignore[assignment]
    module.forward = functools.partial(_forward_with_exchange, module.forward, group, number)


def _forward_with_exchange(
    compute: Compute,
    group: dist.ProcessGroup | int,
    number: int,
    hidden: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Returns the layer's output for this rank's tokens, (T, D). Each rank computes its experts for the whole group.

    Args:
        compute: runs this rank's experts, given their indices among them.
        group: the ranks that exchange tokens. For a plan, their number.
        number: the number of experts on each rank.
        hidden: hidden states, (T, D).
        chosen: the expert indices of each token, (T, k).
        weights: the weights of the experts' outputs, (T, k).
    """
    num_tokens, top_k = chosen.shape
    order = chosen.flatten().argsort(stable=True)  # by expert, and so by rank
    if exchanges_are_planned() or isinstance(group, int):
        sent = received = [num_tokens * top_k]  # as if each rank's experts got the same number
        own = chosen.flatten() % number
    else:
        # Not by bincount or a repeat of unknown size, for which a GPU would be waited for: once a layer is enough.
        counts = chosen.new_zeros(number * group.size()).index_add_(
            0, chosen.flatten(), chosen.new_ones(chosen.numel())
        )
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=group)
        sent, received = torch.stack([counts, theirs]).view(2, -1, number).sum(dim=2).tolist()
        experts = torch.arange(number, device=chosen.device).repeat(group.size())
        own = experts.repeat_interleave(theirs, output_size=sum(received))
    arrived = _exchange_rows(hidden[order // top_k], received, sent, group)
    outputs = _exchange_rows(_run_experts(compute, arrived, own), sent, received, group)
    of_tokens = outputs[order.argsort()].view(num_tokens, top_k, -1)
    summed: torch.Tensor = (of_tokens * weights.unsqueeze(-1)).sum(dim=1)
    return summed.to(hidden.dtype)


def _run_experts(compute: Compute, arrived: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Returns the unweighted outputs (N, D) of the tokens that have arrived, (N, D). `own` has their experts, (N,)."""
    # A rank without tokens computes a row of zeros and drops it: it has to take part in the exchange of gradients.
    idle = len(own) == 0
    if idle:
        arrived, own = torch.cat([arrived, arrived.new_zeros(1, arrived.shape[1])]), own.new_zeros(1)
    outputs = compute(arrived, own[:, None], arrived.new_ones(len(own), 1))
    return outputs[1:] if idle else outputs


def _exchange_rows(
    rows: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup | int
) -> torch.Tensor:
    exchanged: torch.Tensor = _Exchange.apply(rows, received, sent, group)  # type: ignore[no-untyped-call]
    return exchanged


class _Exchange(torch.autograd.Function):
    """Sends rows (N, D) to the ranks of a group, in order. Backward sends the gradients back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup | int
    ) -> torch.Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        return all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return all_to_all(gradient, ctx.received, ctx.sent, ctx.group), None, None, None
