"""All-gather and reduce-scatter over gloo, as exchanges between every two ranks of the group.

gloo's own reduce-scatter is an all-reduce of a clone of its input: twice the bytes, and memory for the whole
input once more. Its all-gather copies the whole result. Here each rank sends every other one what that one
needs, once: a fraction (N - 1) / N of the whole tensor, the least there can be (Thakur et al. 2005,
Optimization of Collective Communication Operations in MPICH). docs/log.md has the times.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def all_gather(output: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fills `output` with the parts of all ranks of the group, by rank.

    Args:
        output: (N x n,).
        part: (n,), this rank's; it may lie in `output` already.
    """
    parts = output.view(group.size(), -1)
    own = parts[group.rank()]
    if own.data_ptr() != part.data_ptr():
        own.copy_(part)
    _exchange([own] * group.size(), list(parts), group)


def reduce_scatter(output: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fills `output` with the sum over all ranks of this rank's part of `whole`, added up by rank.

    Args:
        output: (n,).
        whole: (N x n,), the parts of the ranks of the group.
    """
    num_ranks, rank = group.size(), group.rank()
    parts = list(whole.view(num_ranks, -1))
    # Of two ranks the one that receives needs no memory beside the result's.
    received = output.view(1, -1) if num_ranks == 2 else output.new_empty(num_ranks - 1, output.numel())
    theirs = list(received)
    theirs.insert(rank, parts[rank])
    _exchange(parts, theirs, group)
    torch.add(theirs[0], theirs[1], out=output)
    for summand in theirs[2:]:
        output.add_(summand)


def _exchange(outgoing: list[torch.Tensor], incoming: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Sends `outgoing[r]` to every other rank r of the group, and receives `incoming[r]` from it."""
    others = [(group.rank() + distance) % group.size() for distance in range(1, group.size())]
    pending = [dist.irecv(incoming[other], group=group, group_src=other) for other in others]
    pending += [dist.isend(outgoing[other], group=group, group_dst=other) for other in others]
    for work in pending:
        assert work is not None  # this rank is in the group
        work.wait()
