"""The dimension along which a parameter is sharded, and what is said where ranks do not divide the experts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from support.cases import cases
from support.moe import mixture
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from toolkit.sharding.fsdp2.shards import row_counts, rows_in_part, shard_dim, shard_rows, shard_shape
from toolkit.sharding.parallel.expert_parallel import expert_placement

TABLES = cases(__file__)


@pytest.mark.parametrize(("shape", "ranks", "dim"), TABLES["STACKS"])
def test_stacks_are_sharded_by_rows_where_much_would_be_padded(shape: tuple[int, ...], ranks: int, dim: int) -> None:
    assert shard_dim(shape, ranks) == dim


def test_a_run_says_how_ranks_share_experts_that_they_do_not_divide() -> None:
    model = mixture("mixtral", num_local_experts=6)
    assert expert_placement(model, 3) == expert_placement(model) == expert_placement(nn.Linear(3, 3), 2) == ""
    assert (
        expert_placement(model, 4)
        == "6 of a layer are sharded along their matrices' rows, as 4 ranks do not divide them"
    )
    assert expert_placement(model, 5).endswith(
        "padded to 10 for 5 ranks, 67% more of their bytes; a number of ranks that divides them pads none"
    )
    assert expert_placement(model, 9).endswith("50% more of their bytes; hybrid with dp_shard_size 3 pads none")
    assert expert_placement(mixture("mixtral", num_local_experts=15), 8).endswith(
        "to 16 for 8 ranks, 7% more of their bytes"
    )


@pytest.fixture
def leave() -> Iterator[None]:
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("rank", range(4))
def test_a_shard_has_the_rows_of_torchs_chunks(rank: int, leave: None) -> None:
    """Of five rows on four ranks the last rank has none."""
    dist.init_process_group("fake", rank=rank, world_size=4)
    whole = torch.arange(10.0).view(5, 2)
    chunks = [*whole.chunk(4), whole[5:]]
    mesh = dist.init_device_mesh("cpu", (4,))
    sizes = {"shape": whole.shape, "stride": whole.stride()}
    parameter = DTensor.from_local(chunks[rank], mesh, [Shard(0)], run_check=False, **sizes)
    assert row_counts(parameter) == [2, 2, 1, 0]
    assert torch.equal(whole[shard_rows(parameter)], chunks[rank])
    assert shard_shape(parameter) == (2, 2)
    assert rows_in_part(parameter) == shard_rows(parameter)


@pytest.mark.parametrize("rank", range(4))
def test_a_shard_of_columns_that_a_rank_cuts_has_its_place_in_the_whole_and_in_the_part(rank: int, leave: None) -> None:
    dist.init_process_group("fake", rank=rank, world_size=4)
    whole = torch.arange(24.0).view(4, 6)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "shard"))
    part = whole.chunk(2, dim=1)[rank // 2]
    local = part.chunk(2)[rank % 2]
    sizes = {"shape": whole.shape, "stride": whole.stride()}
    parameter = DTensor.from_local(local, mesh, [Shard(1), Shard(0)], run_check=False, **sizes)
    assert torch.equal(whole[shard_rows(parameter)], local)
    assert torch.equal(part[rows_in_part(parameter)], local)
    assert shard_shape(parameter) == (2, 3)
