"""Sequence parallelism: a group of ranks shares its rows and exchanges tokens for heads around attention.

Each rank of a group of n neighbours holds T / n tokens of every row. Before attention an all-to-all gives it all T
tokens of H / n heads, and after attention another one reverses this (DeepSpeed Ulysses, arXiv 2309.14509). The groups
do not affect the weights: FSDP2 shards over all ranks as usual, and sums of losses over tokens need no other scale.
"""

from __future__ import annotations

import functools
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
    """The rows of a forward that the ranks of a group share.

    Attributes:
        positions: the positions of all their tokens, (B, T).
        parts: n, the number of ranks of a group.
    """

    positions: torch.Tensor
    parts: int


class _SharedRows(threading.local):
    """The shared rows of the forward in this thread: micro-batches that run by block have several forwards at once.

    `tokens` are those of a row of which the ranks of a tensor group have parts between layers, or 0.

    `for_second_forward` passes them to a checkpoint's second forward, which runs in autograd's thread.
    """

    rows: WholeRows | None = None
    tokens: int = 0


@dataclass
class _Process:
    """The state of this process.

    Attributes:
        group: the ranks that share rows with this one, or None.
        plans: whether exchanges are only planned, not made.
    """

    group: dist.ProcessGroup | None = None
    plans: bool = False


_current = _SharedRows()
_process = _Process()


def form_groups(size: int) -> None:
    """Forms groups of `size` neighbouring ranks that share their rows. Collective.

    Raises:
        BadInputError: if `size` does not divide the number of ranks.
    """
    require_groups("sharding.sequence", size, ranks.world_size())
    _process.group = dist.new_subgroups(group_size=size)[0] if size > 1 else None  # type: ignore[no-untyped-call]


def require_groups(key: str, size: int, num_ranks: int) -> None:
    """Checks that groups of `size` ranks can be formed.

    Args:
        key: the recipe's key that sets the size, for the message.
        size: the ranks of a group.
        num_ranks: the number of ranks to divide.

    Raises:
        BadInputError: if `size` does not divide `num_ranks`.
    """
    if num_ranks % size:
        allowed = [number for number in range(1, num_ranks + 1) if num_ranks % number == 0]
        if num_ranks == 1:
            raise BadInputError(f"{key}: {size} ranks are needed, and there is 1; start {size}, or set it to 1")
        raise BadInputError(
            f"{key}: {size} does not divide the {num_ranks} ranks into groups; "
            f"set it to one of {', '.join(map(str, allowed))}"
        )


def own_part() -> int:
    """Returns the index of the part of its group's rows that this rank holds, from 0."""
    return 0 if _process.group is None else dist.get_rank(_process.group)


@contextmanager
def without_ranks() -> Iterator[None]:
    """Makes exchanges only planned inside the `with` block: they return tensors of the right shape, without values."""
    before = _process.group, _process.plans
    _process.group, _process.plans = None, True
    try:
        yield
    finally:
        _process.group, _process.plans = before


def exchanges_are_planned() -> bool:
    """Returns whether exchanges are only planned, so that tensors have no values."""
    return _process.plans


@contextmanager
def rows_shared(rows: WholeRows) -> Iterator[None]:
    """Marks the forwards inside the `with` block as having `rows`, which the ranks of a group share."""
    before, _current.rows = _current.rows, rows
    try:
        yield
    finally:
        _current.rows = before


def rows_under_way() -> WholeRows | None:
    """Returns the shared rows of the current forward, or None if it has whole rows."""
    return _current.rows


def for_second_forward() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Returns the contexts of a checkpoint's first and second forward. The second has the same shared rows."""
    rows, tokens = _current.rows, _current.tokens
    return nullcontext(), nullcontext() if rows is None and not tokens else _as_in_first_forward(rows, tokens)


@contextmanager
def _as_in_first_forward(rows: WholeRows | None, tokens: int) -> Iterator[None]:
    before = _current.rows, _current.tokens
    _current.rows, _current.tokens = rows, tokens
    try:
        yield
    finally:
        _current.rows, _current.tokens = before


def set_tokens_of_row(tokens: int) -> None:
    """Notes the tokens of a row of the current forward, if the ranks of a tensor group go on with parts of it."""
    _current.tokens = tokens


def tokens_of_row() -> int:
    """Returns what `set_tokens_of_row` has noted in this forward."""
    return _current.tokens


def heads_for_tokens(local: torch.Tensor, parts: int) -> torch.Tensor:
    """Exchanges this rank's tokens of all heads, (B, T / n, H, D), for all tokens of its heads, (B, T, H / n, D)."""
    batch, tokens, heads, width = local.shape
    by_rank = local.reshape(batch, tokens, parts, heads // parts, width).permute(2, 0, 1, 3, 4)
    received = _exchange_over_group(by_rank)  # (n, B, T / n, H / n, D), by whose tokens
    return received.transpose(0, 1).reshape(batch, parts * tokens, heads // parts, width)


def tokens_for_heads(whole: torch.Tensor, parts: int) -> torch.Tensor:
    """Exchanges all tokens of this rank's heads, (B, T, H / n, D), for its tokens of all heads, (B, T / n, H, D)."""
    batch, tokens, heads, width = whole.shape
    by_rank = whole.reshape(batch, parts, tokens // parts, heads, width).transpose(0, 1)
    received = _exchange_over_group(by_rank)  # (n, B, T / n, H / n, D), by whose heads
    return received.permute(1, 2, 0, 3, 4).reshape(batch, tokens // parts, parts * heads, width)


def _exchange_over_group(by_rank: torch.Tensor) -> torch.Tensor:
    exchanged: torch.Tensor = _OverGroup.apply(by_rank, _process.group, _exchange_parts)  # type: ignore[no-untyped-call]
    return exchanged


class _OverGroup(torch.autograd.Function):
    """A collective over the group that is its own transpose, so that backward is the same collective."""

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


def _exchange_parts(by_rank: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Sends part i of a tensor (n, ...) to rank i of the group. Returns the received parts, (n, ...)."""
    counts = [1] * len(by_rank)
    return all_to_all(by_rank, counts, counts, len(by_rank) if group is None else group)


def all_to_all(
    rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup | int
) -> torch.Tensor:
    """Exchanges rows (N, ...) between the ranks of a group. Returns what they send to this one, (M, ...), by rank.

    Args:
        sent: how many of the rows go to each rank, in order.
        received: how many rows come from each rank.
        group: the ranks that exchange. For a plan, their number.
    """
    if exchanges_are_planned() or isinstance(group, int):
        ranks = group if isinstance(group, int) else group.size()
        planned: torch.Tensor = planned_exchange(rows.contiguous(), ranks, sum(received))
        return planned
    result = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
    return result


def planned_exchange(rows: torch.Tensor, ranks: int, received: int) -> torch.Tensor:
    """Stands for an all-to-all in a plan, which counts it.

    Args:
        rows: the rows that this rank sends, shape (N, ...).
        ranks: the number of ranks that exchange.
        received: the number of rows that this rank receives, M.

    Returns:
        A tensor of shape (M, ...) without values.
    """
    found: torch.Tensor = planned_operator("planned_exchange", _received)(rows, ranks, received)
    return found


def _received(rows: torch.Tensor, ranks: int, received: int) -> torch.Tensor:
    return rows.new_empty(received, *rows.shape[1:])


@functools.cache
def planned_operator(name: str, result_of: Callable[..., torch.Tensor]) -> Any:
    """Returns the operator that stands for an exchange in a plan, under a name that `planning/memory/fake.py` counts.

    Args:
        result_of: returns a result of the exchange's shape, without values.
    """
    # Not when this is imported: torch looks through all modules for the file that makes an operator, 0.1 s of CPU.
    operator = torch.library.custom_op(f"toolkit::{name}", result_of, mutates_args=())
    operator.register_fake(result_of)
    return operator


def summed_over_group(part: torch.Tensor) -> torch.Tensor:
    """Sums tensors of the same shape over the ranks of the group. The gradient is summed in the same way."""
    summed: torch.Tensor = _OverGroup.apply(part, _process.group, _all_reduce)  # type: ignore[no-untyped-call]
    return summed


def whole_rows(part: torch.Tensor, parts: int) -> torch.Tensor:
    """Gathers values of this rank's tokens, (B, T / n), into those of whole rows, (B, T). Without a gradient."""
    stacked = part.new_zeros(parts, *part.shape)
    stacked[own_part()] = part
    return summed_over_group(stacked).transpose(0, 1).reshape(len(part), -1)


def _all_reduce(part: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    total = part.clone()
    if group is not None:
        dist.all_reduce(total, group=group)
    return total
