"""Tables of spread experts: what runs with them, what they send, and whose state is offloaded."""

from __future__ import annotations

import itertools

import pytest
from support.cases import cases
from support.fsdp2_trace import fake_ranks
from torch.distributed.device_mesh import init_device_mesh

from toolkit.errors import BadInputError
from toolkit.paths import GIB
from toolkit.planning.hardware import presets
from toolkit.planning.planner import Planner
from toolkit.planning.setup import asked_setup
from toolkit.planning.table import plan
from toolkit.planning.workload.workload import workload_of
from toolkit.recipe.recipe import Recipe
from toolkit.sharding import plan_units
from toolkit.sharding.apply import apply
from toolkit.sharding.offload.host import plan_host
from toolkit.sharding.offload.offloaded_units import read_units
from toolkit.sharding.parallel.expert_parallel import expert_grid
from toolkit.sharding.plan.strategy import STRATEGIES, MeshShape

TABLES = cases(__file__)

CHOSEN = 2
"""Experts of a token."""


def recipe(**sharding: object) -> Recipe:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {"model_type": "mixtral", **sizes, "num_key_value_heads": 2, "num_local_experts": 8}
    return Recipe.from_mapping(
        {
            "model": {"config": config, "train_tokenizer_vocab_size": 512},
            "data": {"train": "rows.jsonl", "max_length": 64},
            "training": {"output_dir": "out", "max_steps": 1, "micro_batch_size": 2},
            "optimizer": {"learning_rate": 1e-3},
            "sharding": sharding,
            "checkpoint": {"every_minutes": "never"},  # a save takes host memory
        }
    )


@pytest.mark.slow
def test_a_table_has_what_spread_experts_can_run_with() -> None:
    found = plan(recipe(experts=4), presets()["h100_sxm"], 8)
    assert {row.setup.strategy.name for row in found.rows} == {"zero1", "zero2", "zero3", "hybrid"}
    assert any(row.setup.offload for row in found.rows)
    # Of replicas of 2, 4 and 8 ranks those of 4 and more have groups of 4; all 8 ranks in one are zero3.
    assert {row.setup.mesh for row in found.rows if row.setup.strategy.replicated} == {MeshShape(2, 4)}
    whole = plan(recipe(), presets()["h100_sxm"], 8)
    gathered = whole.asked.traffic
    assert found.asked.traffic.all_gather < gathered.all_gather


@pytest.mark.slow
def test_tokens_go_to_experts_and_around_attention_where_rows_are_shared() -> None:
    found = plan(recipe(experts=4, sequence=2), presets()["h100_sxm"], 8, with_levers=False).asked.traffic
    tokens, width, layers = 2 * 64 // 2, 64, 2  # of a rank
    attention = 2 * 4 * tokens * width // 2  # queries, keys, values and outputs, each to one of two ranks
    sent_on = 4 * tokens * CHOSEN * width * 3 // 4
    assert found.exchanged == layers * (attention + sent_on) * 2


def test_units_whose_state_is_offloaded_are_those_of_the_engine() -> None:
    """Among ranks that are not there; with room on the device for the root, a block and its experts, and no more."""
    room = 0.0006
    own = recipe(strategy="zero3", experts=2, offload="optimizer", device_state_gib=room)
    hardware = presets()["h100_sxm"]
    planner = Planner(own, workload_of(own, "bf16"), hardware)
    setup = asked_setup(own, 4, hardware, None, False, None)
    model = planner.workload.model_copy()
    with fake_ranks(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
        units, zero3 = plan_units(model, experts=True), STRATEGIES["zero3"]
        offload, grid = (lambda _: lambda name, rows: None), expert_grid(mesh, 2)
        apply(model, units, zero3, mesh, "bf16", lambda: True, offload=offload, experts=grid)
        sizes = [unit.numel for unit in read_units(model)]
    held = list(itertools.takewhile(lambda total: 16 * total <= room * GIB, itertools.accumulate(sizes)))
    residents = planner.state.residents(setup)
    assert 2 < len(held) < len(sizes)
    assert sorted(planner.model.units[i].trainable_numel(4) for i in residents) == sorted(sizes[: len(held)])
    assert planner.state.of_rank(setup) == plan_host(sizes[len(held) :], 2, 4, 2 * 2).total


@pytest.mark.parametrize(("sharding", "ranks", "told"), TABLES["UNPLANNED"])
def test_what_cannot_be_spread_is_not_planned(sharding: dict[str, object], ranks: int, told: str) -> None:
    with pytest.raises(BadInputError, match=told):
        plan(recipe(**sharding), presets()["h100_sxm"], ranks)
