"""All-gather and reduce-scatter from each rank to each, against the parts and the sums written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_on_ranks

from toolkit.sharding.fsdp2 import gloo as pairwise

LENGTH = 5


def whole_of(rank: int, ranks: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(ranks * LENGTH, generator=torch.Generator().manual_seed(rank)).to(dtype)


def gathered_and_reduced(members: list[int], dtype: torch.dtype) -> Any:
    """By a group of these ranks: the parts of all, given apart and in place; and the sums."""
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return None
    rank, ranks = dist.get_rank(group), len(members)
    own = whole_of(rank, ranks, dtype)
    part = own[rank * LENGTH : (rank + 1) * LENGTH]
    apart, in_place = (torch.full((ranks * LENGTH,), 7, dtype=dtype) for _ in range(2))
    pairwise.all_gather(apart, part, group)
    in_place[rank * LENGTH : (rank + 1) * LENGTH] = part
    pairwise.all_gather(in_place, in_place[rank * LENGTH : (rank + 1) * LENGTH], group)
    given, reduced = own.clone(), torch.full((LENGTH,), 7, dtype=dtype)
    pairwise.reduce_scatter(reduced, given, group)
    assert torch.equal(given, own)
    return apart, in_place, reduced


def all_groups(groups: list[list[int]]) -> list[Any]:
    return [gathered_and_reduced(members, dtype) for members in groups for dtype in (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_parts_and_sums_by_rank(num_ranks: int) -> None:
    groups = [list(range(num_ranks))] + ([[1, 3], [0, 2, 3]] if num_ranks == 4 else [])
    found = run_on_ranks(all_groups, num_ranks, groups)
    cases = [(members, dtype) for members in groups for dtype in (torch.float32, torch.bfloat16)]
    for number, (members, dtype) in enumerate(cases):
        wholes = [whole_of(rank, len(members), dtype).view(len(members), LENGTH) for rank in range(len(members))]
        everybodys = torch.cat([wholes[rank][rank] for rank in range(len(members))])
        for rank, member in enumerate(members):
            apart, in_place, reduced = found[member][number]
            total = wholes[0][rank].clone()
            for other in wholes[1:]:
                total += other[rank]
            assert torch.equal(apart, everybodys)
            assert torch.equal(in_place, everybodys)
            assert torch.equal(reduced, total), (members, rank)
