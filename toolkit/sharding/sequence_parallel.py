"""Rows that a group of ranks shares: the group, the exchange of tokens for heads, and the rows under way.

Each rank of a group of n neighbours holds T / n tokens of every row. Around attention an all-to-all gives it all T
tokens of H / n heads, and another one takes them back (DeepSpeed Ulysses, arXiv 2309.14509). The groups share no copy
of the weights: FSDP2 shards over all ranks as ever, and sums of losses over tokens need no other scale.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from toolkit import ranks
from toolkit.errors import BadInputError


@dataclass(frozen=True)
class WholeRows:
    """The rows of a forward of which each rank of a group holds a part.

    Attributes:
        positions: of all their tokens, (B, T).
        parts: n, the ranks of a group.
    """

    positions: torch.Tensor
    parts: int


class _Here(threading.local):
    """The rows under way in this thread: micro-batches that run by block are in several forwards at the same time.

    A checkpoint's second forward, which runs in autograd's thread, is given them (`for_second_forward`).
    """

    rows: WholeRows | None = None


@dataclass
class _Process:
    """The group of this process that shares rows, and whether exchanges are planned alone.

    Attributes:
        skew: see `without_ranks`.
    """

    group: dist.ProcessGroup | None = None
    plans: bool = False
    skew: int = 1


_here = _Here()
_process = _Process()


def form_groups(size: int) -> None:
    """Puts every rank into a group of `size` neighbours that share their rows. Collective.

    Raises:
        BadInputError: if the groups do not fill the ranks.
    """
    require_groups("sharding.sequence", size, ranks.world_size())
    _process.group = dist.new_subgroups(group_size=size)[0] if size > 1 else None  # type: ignore[no-untyped-call]


def require_groups(key: str, size: int, num_ranks: int) -> None:
    """Raises BadInputError if groups of `size` ranks do not fill the ranks."""
    if num_ranks % size:
        allowed = [number for number in range(1, num_ranks + 1) if num_ranks % number == 0]
        if num_ranks == 1:
            raise BadInputError(f"{key}: {size} ranks are needed, and there is 1; start {size}, or set it to 1")
        raise BadInputError(
            f"{key}: {size} does not divide the {num_ranks} ranks into groups; "
            f"set it to one of {', '.join(map(str, allowed))}"
        )


def own_part() -> int:
    """Which part of its group's rows this rank has, from 0."""
    return 0 if _process.group is None else dist.get_rank(_process.group)


@contextmanager
def without_ranks(skew: int = 1) -> Iterator[None]:
    """Inside, exchanges are planned and not made.

    Args:
        skew: how many times as many tokens come to this rank's experts as it sends to all of them.
    """
    before = _process.group, _process.plans, _process.skew
    _process.group, _process.plans, _process.skew = None, True, skew
    try:
        yield
    finally:
        _process.group, _process.plans, _process.skew = before


def exchanges_are_planned() -> bool:
    """Whether this is a plan, whose tensors have no values."""
    return _process.plans


def planned_skew() -> int:
    """That of `without_ranks`."""
    return _process.skew


@contextmanager
def rows_shared(rows: WholeRows) -> Iterator[None]:
    """A forward whose rows are shared by the ranks of a group."""
    before, _here.rows = _here.rows, rows
    try:
        yield
    finally:
        _here.rows = before


def rows_under_way() -> WholeRows | None:
    """The rows that this forward has a part of; None if it has them whole."""
    return _here.rows


def for_second_forward() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of a checkpoint's forward and of its second one, which has the same rows under way."""
    rows = _here.rows
    return nullcontext(), nullcontext() if rows is None else rows_shared(rows)


def heads_for_tokens(local: torch.Tensor, parts: int) -> torch.Tensor:
    """All tokens of this rank's heads, (B, T, H / n, D), for its tokens of all heads, (B, T / n, H, D)."""
    batch, tokens, heads, width = local.shape
    by_rank = local.reshape(batch, tokens, parts, heads // parts, width).permute(2, 0, 1, 3, 4)
    received = _exchange(by_rank)  # (n, B, T / n, H / n, D), by whose tokens
    return received.transpose(0, 1).reshape(batch, parts * tokens, heads // parts, width)


def tokens_for_heads(whole: torch.Tensor, parts: int) -> torch.Tensor:
    """This rank's tokens of all heads, (B, T / n, H, D), for all tokens of its heads, (B, T, H / n, D)."""
    batch, tokens, heads, width = whole.shape
    by_rank = whole.reshape(batch, parts, tokens // parts, heads, width).transpose(0, 1)
    received = _exchange(by_rank)  # (n, B, T / n, H / n, D), by whose heads
    return received.permute(1, 2, 0, 3, 4).reshape(batch, tokens // parts, parts * heads, width)


def _exchange(by_rank: torch.Tensor) -> torch.Tensor:
    exchanged: torch.Tensor = _OverGroup.apply(by_rank, _process.group, _all_to_all)  # type: ignore[no-untyped-call]
    return exchanged


class _OverGroup(torch.autograd.Function):
    """A collective of the group that is its own transpose, so that backward is the same collective."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        group: dist.ProcessGroup | None,
        collective: Callable[[torch.Tensor, dist.ProcessGroup | None], torch.Tensor],
    ) -> torch.Tensor:
        ctx.group, ctx.collective = group, collective
        return collective(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.collective(gradient, ctx.group), None, None


def _all_to_all(by_rank: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Gives part i of a tensor (n, ...) to rank i of the group."""
    by_rank = by_rank.contiguous()
    if group is None:
        planned: torch.Tensor = planned_exchange(by_rank, len(by_rank), len(by_rank))
        return planned
    received = torch.empty_like(by_rank)
    dist.all_to_all_single(received, by_rank, group=group)
    return received


@torch.library.custom_op("toolkit::planned_exchange", mutates_args=())
def planned_exchange(rows: torch.Tensor, ranks: int, received: int) -> torch.Tensor:
    """Stands for an exchange among so many ranks in a plan, which counts it; tensors have no values there."""
    return rows.new_empty(received, *rows.shape[1:])


planned_exchange.register_fake(lambda rows, ranks, received: rows.new_empty(received, *rows.shape[1:]))


def summed_over_group(part: torch.Tensor) -> torch.Tensor:
    """The sum of every rank's part, on each rank of the group; the gradient is summed alike."""
    summed: torch.Tensor = _OverGroup.apply(part, _process.group, _all_reduce)  # type: ignore[no-untyped-call]
    return summed


def whole_rows(part: torch.Tensor, parts: int) -> torch.Tensor:
    """Numbers of all tokens of shared rows, (B, T), of this rank's, (B, T / n); without a gradient."""
    stacked = part.new_zeros(parts, *part.shape)
    stacked[own_part()] = part
    return summed_over_group(stacked).transpose(0, 1).reshape(len(part), -1)


def _all_reduce(part: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    total = part.clone()
    if group is not None:
        dist.all_reduce(total, group=group)
    return total
