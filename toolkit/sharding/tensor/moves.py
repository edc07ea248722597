"""Moves of activations between the ranks of a tensor group; the backward of each is its transpose.

    copied      the whole tensor, which each rank goes on with in its own way     backward: the sum over the ranks
    summed      the sum over the ranks                                            backward: the whole tensor
    gathered    the ranks' columns, side by side                                  backward: this rank's columns
    split       this rank's columns                                               backward: the ranks' columns

A rank's gradient of a whole tensor is whole, too: what comes after a sum is the same on all ranks of a group, as they
have the same rows (Megatron-LM, arXiv 1909.08053).

Between the layers that are cut, each rank may have some tokens of each row alone, where norms and sums are computed
once and not n times (sequence parallel, arXiv 2205.05198). A whole tensor is then gathered before a layer that is cut,
and of the sum after it each rank gets its tokens; `began` and `ended` are around the blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from toolkit.sharding.fsdp2.shards import chunk_of
from toolkit.sharding.parallel.sequence_parallel import (
    exchanges_are_planned,
    planned_exchange,
    planned_operator,
    set_tokens_of_row,
    tokens_of_row,
)


@dataclass
class TensorRanks:
    """The ranks of a tensor group, as one of them sees them.

    Attributes:
        size: their number, n.
        index: the number of this rank in the group.
        group: their process group, or None for a plan.
        whole: whether layers compute with whole matrices now, so that nothing is moved; see `whole_layers`.
        by_tokens: whether each rank has some tokens alone between the layers that are cut.
    """

    size: int
    index: int = 0
    group: dist.ProcessGroup | None = None
    whole: bool = False
    by_tokens: bool = False

    @property
    def is_planned(self) -> bool:
        """Returns whether moves return tensors without values."""
        return self.group is None or exchanges_are_planned()

    def part(self, length: int) -> slice:
        """Returns this rank's part of `length` rows or columns."""
        return chunk_of(length, self.size, self.index)

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of any shape; its gradient is the sum of the ranks' gradients."""
        return self._move(tensor, _same, _sum, 0)

    def summed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the ranks' tensors, of any shape."""
        return self._move(tensor, _sum, _same, 0)

    def entered(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns whole hidden states (B, T, D) for layers that are cut, of those between such layers."""
        return (
            self._move(hidden, _gather_tokens, _sum_tokens, tokens_of_row()) if self.by_tokens else self.copied(hidden)
        )

    def left(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the ranks' hidden states (B, T, D), of this rank's tokens if each has some alone."""
        return (
            self._move(hidden, _sum_tokens, _gather_tokens, tokens_of_row()) if self.by_tokens else self.summed(hidden)
        )

    def began(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns this rank's tokens of hidden states (B, T, D), with zeros after them if n does not divide T."""
        set_tokens_of_row(hidden.shape[1])
        return self._move(hidden, _own_tokens, _gather_tokens, hidden.shape[1])

    def ended(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns whole hidden states (B, T, D) of the ranks' tokens."""
        return self._move(hidden, _gather_tokens, _own_tokens, tokens_of_row())

    def gathered(self, part: torch.Tensor, length: int) -> torch.Tensor:
        """Returns whole columns (..., length) of the ranks' parts (..., about length / n)."""
        return self._move(part, _gather, _own, length)

    def split(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of the columns of a whole tensor (..., columns)."""
        return self._move(tensor, _own, _gather, tensor.shape[-1])

    def _move(self, tensor: torch.Tensor, there: _Act, back: _Act, length: int) -> torch.Tensor:
        if self.whole:
            return tensor
        moved: torch.Tensor = _Move.apply(tensor, self, there, back, length)  # type: ignore[no-untyped-call]
        return moved


_Act = Callable[[torch.Tensor, TensorRanks, int], torch.Tensor]


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, ranks: TensorRanks, there: _Act, back: _Act, length: int
    ) -> torch.Tensor:
        ctx.ranks, ctx.back, ctx.length = ranks, back, length
        return there(tensor, ranks, length)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.back(gradient, ctx.ranks, ctx.length), None, None, None, None


def _same(tensor: torch.Tensor, ranks: TensorRanks, length: int) -> torch.Tensor:
    return tensor.view_as(tensor)


def _sum(tensor: torch.Tensor, ranks: TensorRanks, length: int) -> torch.Tensor:
    if ranks.is_planned:  # a ring sends each part twice, to be added up and to be handed round
        flat = tensor.reshape(-1, tensor.shape[-1])
        whole: torch.Tensor = planned_exchange(planned_reduction(flat, ranks.size), ranks.size, len(flat))
        return whole.view(tensor.shape)
    total = tensor.contiguous().clone()
    dist.all_reduce(total, group=ranks.group)
    return total


def _own_tokens(hidden: torch.Tensor, ranks: TensorRanks, length: int) -> torch.Tensor:
    width = -(-length // ranks.size)
    own = hidden[:, ranks.part(length)]
    return F.pad(own, (0, 0, 0, width - own.shape[1])).contiguous()


def _gather_tokens(hidden: torch.Tensor, ranks: TensorRanks, length: int) -> torch.Tensor:
    every = _every(hidden.transpose(0, 1).contiguous(), ranks)
    return every[:length].transpose(0, 1).contiguous()


def _sum_tokens(hidden: torch.Tensor, ranks: TensorRanks, length: int) -> torch.Tensor:
    width = -(-length // ranks.size)
    by_token = F.pad(hidden.transpose(0, 1), (0, 0, 0, 0, 0, width * ranks.size - length)).contiguous()
    if ranks.is_planned:
        summed: torch.Tensor = planned_reduction(by_token, ranks.size)
    else:
        summed = by_token.new_empty(width, *by_token.shape[1:])
        dist.reduce_scatter_single(summed, by_token, group=ranks.group)
    return summed.transpose(0, 1).contiguous()


def _own(tensor: torch.Tensor, ranks: TensorRanks, length: int) -> torch.Tensor:
    return tensor[..., ranks.part(length)].contiguous()


def _gather(part: torch.Tensor, ranks: TensorRanks, length: int) -> torch.Tensor:
    return joined(part, ranks, length, part.ndim - 1).contiguous()


def joined(part: torch.Tensor, ranks: TensorRanks, length: int, dim: int) -> torch.Tensor:
    """Returns a whole tensor of the ranks' parts along `dim`, where the whole one has `length` entries. No gradient."""
    width = -(-length // ranks.size)
    first = part.movedim(dim, 0)  # the last ranks may have fewer, and a gather needs equal shapes
    padded = F.pad(first, (0, 0) * (first.ndim - 1) + (0, width - len(first))).contiguous()
    return _every(padded, ranks)[:length].movedim(0, dim)


def _every(part: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
    """Returns the ranks' parts (rows, ...), all of one shape, in order: (n rows, ...)."""
    every: torch.Tensor
    if ranks.is_planned:
        every = planned_exchange(part, ranks.size, len(part) * ranks.size)
    else:
        every = part.new_empty(len(part) * ranks.size, *part.shape[1:])
        dist.all_gather_single(every, part, group=ranks.group)
    return every


def planned_reduction(rows: torch.Tensor, ranks: int) -> torch.Tensor:
    """Stands for a reduce-scatter in a plan, which counts it.

    Args:
        rows: the rows that this rank adds, shape (N, ...).
        ranks: the number of ranks that add theirs, n.

    Returns:
        A tensor of shape (about N / n, ...) without values.
    """
    found: torch.Tensor = planned_operator("planned_reduction", _own_rows)(rows, ranks)
    return found


def _own_rows(rows: torch.Tensor, ranks: int) -> torch.Tensor:
    return rows.new_empty(-(-len(rows) // ranks), *rows.shape[1:])
