"""Implements all-gather and reduce-scatter over gloo as direct exchanges between all pairs of ranks of a group.

gloo's own reduce-scatter is an all-reduce of a copy of its input: it sends twice the bytes and needs memory for a
second input. Its all-gather copies the whole result. Here each rank sends every other rank what that rank needs, once:
a fraction (N - 1) / N of the whole tensor, which is the minimum (Thakur et al. 2005, Optimization of Collective
Communication Operations in MPICH). docs/log/speed.md has the times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from toolkit.sharding.fsdp2.fsdp_replaced import before_copying_shards


def all_gather(output: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fills `output` with the parts of all ranks of the group, in rank order.

    Args:
        output: (N x n,).
        part: (n,), this rank's part. It may be a view of `output`.
    """
    parts = output.view(group.size(), -1)
    own = parts[group.rank()]
    # FSDP2 copies the shards to their place in the output before it gathers.
    if own.data_ptr() != part.data_ptr():
        own.copy_(part)
    _exchange_with_all([own] * group.size(), list(parts), group)


def reduce_scatter(output: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fills `output` with the sum over all ranks of this rank's part of `whole`, added in rank order.

    Args:
        output: (n,).
        whole: (N x n,), the parts of the ranks of the group.
    """
    num_ranks, rank = group.size(), group.rank()
    parts = list(whole.view(num_ranks, -1))
    # Of two ranks the one that receives needs no memory in addition to the result's.
    received = output.view(1, -1) if num_ranks == 2 else output.new_empty(num_ranks - 1, output.numel())
    theirs = list(received)
    theirs.insert(rank, parts[rank])
    _exchange_with_all(parts, theirs, group)
    # By rank, not as they arrive: a sum is the same on every run.
    torch.add(theirs[0], theirs[1], out=output)
    for summand in theirs[2:]:
        output.add_(summand)


def _exchange_with_all(outgoing: list[torch.Tensor], incoming: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Sends `outgoing[r]` to every other rank r of the group and receives `incoming[r]` from it. Blocks until done."""
    # Each rank begins with the one after it, so that they don't all send to the same one first.
    others = [(group.rank() + distance) % group.size() for distance in range(1, group.size())]
    pending = [dist.irecv(incoming[other], group=group, group_src=other) for other in others]
    pending += [dist.isend(outgoing[other], group=group, group_dst=other) for other in others]
    for work in pending:
        assert work is not None  # this rank is in the group
        work.wait()


class _AllGather(DefaultAllGather):
    """FSDP2's all-gather, but over gloo by direct exchanges. Can wait before it reads the shards.

    `allocate` runs just before the shards are copied in, on the stream that copies them. This holds whatever started
    the gather: the unit's own forward, a prefetch, backward or `unshard`.
    """

    def __init__(self, wait: Callable[[], None] | None = None) -> None:
        self._wait = wait

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self._wait is not None:
            self._wait()
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if not _over_gloo(output_tensor, group):
            return super().__call__(output_tensor, input_tensor, group, async_op)
        all_gather(output_tensor, input_tensor, group)
        return None


class _ReduceScatter(DefaultReduceScatter):
    """FSDP2's reduce-scatter, but over gloo by direct exchanges. Can divide the sum."""

    def __init__(self, divisor: int = 1) -> None:
        self._divisor = divisor

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        work = self._reduce(output_tensor, input_tensor, group, op, async_op)
        if self._divisor != 1:
            output_tensor.div_(self._divisor)
        return work

    def _reduce(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: Any, async_op: bool
    ) -> Any:
        if not _over_gloo(output_tensor, group) or op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            return super().__call__(output_tensor, input_tensor, group, op, async_op)
        reduce_scatter(output_tensor, input_tensor, group)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())
        return None


def _over_gloo(tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
    return tensor.device.type == "cpu" and dist.get_backend(group) == dist.Backend.GLOO


def communicate(module: nn.Module) -> None:
    """Makes the module's unit communicate by `_AllGather` and `_ReduceScatter`."""
    assert isinstance(module, FSDPModule)
    module.set_custom_all_gather(_AllGather())
    module.set_custom_reduce_scatter(_ReduceScatter())


def average_over(module: nn.Module, num_own: int, num_ranks: int) -> None:
    """Makes a unit that only some ranks reduce divide its gradients by a larger number of ranks.

    The sum is divided as soon as it is known. FSDP2 itself would divide after the hook in which offload takes the sum,
    and only NCCL can scale before the sum.

    Args:
        module: the unit.
        num_own: the number of ranks that reduce it.
        num_ranks: the divisor of the sum.
    """
    assert isinstance(module, FSDPModule)
    module.set_custom_reduce_scatter(_ReduceScatter(num_ranks))
    # A single rank calls no reduce-scatter. Then FSDP2 itself divides before the hook, and once more after it if it is
    # set to sum.
    is_alone = num_own == 1
    module.set_gradient_divide_factor(num_ranks if is_alone else 1)
    module.set_force_sum_reduction_for_comms(not is_alone)


def before_reading_shards(module: FSDPModule, wait: Callable[[], None]) -> None:
    """Calls `wait` whenever the unit's shards are about to be read, on the stream that will read them."""
    module.set_custom_all_gather(_AllGather(wait))
    before_copying_shards(module, wait)
