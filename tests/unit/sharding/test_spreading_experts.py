"""Which models and runs can spread their experts, and the units that they get."""

from __future__ import annotations

import pytest
import torch
from support.moe import mixture
from support.tiny import llama
from torch import nn

from toolkit.errors import BadInputError
from toolkit.sharding import plan_units
from toolkit.sharding.parallel.expert_parallel import require_experts
from toolkit.sharding.plan.strategy import STRATEGIES
from toolkit.sharding.plugin import ShardingMesh, ShardingPlugin

ZERO3 = STRATEGIES["zero3"]


def test_experts_are_units_of_their_own_before_their_blocks() -> None:
    model = mixture("deepseek_v3", first_k_dense_replace=1)
    gathered, spread = plan_units(model), plan_units(model, experts=True)
    (experts,) = (unit for unit in spread.units if unit.kind == "experts")
    assert experts is spread.units[0]
    assert experts.name == "model.layers.1.mlp.experts"
    assert experts.num_parameters == sum(p.numel() for p in model.get_submodule(experts.name).parameters())
    assert [unit.num_parameters for unit in spread.blocks] == [
        gathered.blocks[0].num_parameters,
        gathered.blocks[1].num_parameters - experts.num_parameters,
    ]
    assert spread.num_parameters == gathered.num_parameters


def test_a_model_without_stacked_experts_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"sharding.experts: no layer of LlamaForCausalLM holds .*; remove it"):
        require_experts(llama(), 2)


def test_experts_that_ranks_cannot_share_evenly_are_refused() -> None:
    model = mixture("mixtral", num_local_experts=6)
    require_experts(model, 3)
    with pytest.raises(BadInputError, match=r"the 6 experts of model.layers.0.mlp.experts are not a multiple of the 4"):
        require_experts(model, 4)


def test_experts_with_a_parameter_for_all_are_refused() -> None:
    model = mixture("mixtral")
    model.model.layers[1].mlp.experts.scale = nn.Parameter(torch.ones(3))
    with pytest.raises(BadInputError, match=r"layers.1.mlp.experts.scale of shape \(3,\) has no row for each"):
        require_experts(model, 2)


def test_what_a_plugin_cannot_do_with_spread_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInputError, match=r"sharding.experts is not possible with sharding.strategy ddp"):
        ShardingPlugin("ddp", experts=2)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(BadInputError, match=r"sharding.experts: 3 does not divide the 4 ranks .*one of 1, 2, 4"):
        ShardingMesh(plugin=ShardingPlugin("zero3", experts=3))
    with pytest.raises(BadInputError, match=r"sharding.experts: 4 does not divide the 2 ranks .*one of 1, 2"):
        ShardingMesh(plugin=ShardingPlugin("hybrid", experts=4), dp_replicate_size=2)
