"""Which models and meshes tensor parallelism takes, and how it refuses the others: by name, before a weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from support.cases import cases
from support.tiny import llama, tiny_config
from transformers import AutoModelForCausalLM

from toolkit.errors import BadInputError
from toolkit.sharding.accelerate_config import read_accelerate_config
from toolkit.sharding.plan.strategy import STRATEGIES, MeshShape, agreed_tensor, tensor_shape
from toolkit.sharding.tensor.plan import tensor_plan

TABLES = cases(__file__)

REFUSED = TABLES["REFUSED"]
"""Types whose plans have other styles, cut no attention, or do not tell whose gradients are to be summed."""


@pytest.mark.parametrize("kind", REFUSED)
def test_other_types_are_refused_by_type_and_style(kind: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(kind))
    with pytest.raises(BadInputError) as found:
        tensor_plan(model, 2)
    assert str(found.value).startswith(f"sharding.tensor is not possible with {kind}: ")
    assert REFUSED[kind] in str(found.value)
    assert "remove it" in str(found.value)


SIZES: list[tuple[dict[str, Any], int, str]] = [
    ({}, 3, "3 does not cut the 4 attention heads and 2 key heads of llama evenly; set it to one of 1, 2, 4"),
    ({"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 48}, 4, "set it to one of 1, 2, 3, 6"),
    ({"intermediate_size": 63}, 2, "2 does not divide the 63 outputs of model.layers.0.mlp.gate_proj; lower it"),
    ({"vocab_size": 12}, 4, "4 ranks cannot share a vocabulary of 12 tokens; lower it"),
]


@pytest.mark.parametrize(("fields", "size", "told"), SIZES)
def test_sizes_that_do_not_divide_are_refused(fields: dict[str, Any], size: int, told: str) -> None:
    fields = {"pad_token_id": None, "intermediate_size": 12 * 4, **fields}
    with pytest.raises(BadInputError, match=r"sharding.tensor: ") as found:
        tensor_plan(llama(**fields), size)
    assert told in str(found.value)


def test_adapters_that_are_not_cut_are_refused() -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], use_dora=True)
    tensor_plan(peft.get_peft_model(llama(), config), 2)
    biased = peft.get_peft_model(llama(mlp_bias=True), config)
    with pytest.raises(BadInputError, match=r"adapter.use_dora on model.layers.0.mlp.down_proj, .* has a bias"):
        tensor_plan(biased, 2)
    head = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"])
    with pytest.raises(
        BadInputError, match=r"adapters on embeddings or head are not cut; leave these out of adapter.target_modules"
    ):
        tensor_plan(peft.get_peft_model(llama(), head), 2)


def test_the_mesh_has_groups_inside_nodes() -> None:
    zero3, hybrid = STRATEGIES["zero3"], STRATEGIES["hybrid"]
    assert tensor_shape(zero3, 16, 4, 8, replicate=None, shard=None) == MeshShape(1, 4, tensor=4)
    assert tensor_shape(zero3, 4, 4, 8, replicate=1, shard=1) == MeshShape(1, 1, tensor=4)
    assert tensor_shape(hybrid, 16, 2, 8, replicate=None, shard=4) == MeshShape(2, 4, tensor=2)
    with pytest.raises(BadInputError, match=r"16 does not divide the 8 ranks of a node.* one of 1, 2, 4, 8"):
        tensor_shape(zero3, 32, 16, 8, replicate=None, shard=None)
    with pytest.raises(BadInputError, match=r"dp_shard_size is 8, but with strategy zero3 it is 4"):
        tensor_shape(zero3, 8, 2, 8, replicate=None, shard=8)


def test_recipe_and_accelerate_config_agree(tmp_path: Path) -> None:
    assert [agreed_tensor(*sizes) for sizes in ((1, None), (2, None), (1, 2), (2, 2), (None, 1))] == [1, 2, 2, 2, 1]
    with pytest.raises(BadInputError, match=r"sharding.tensor is 4, but the Accelerate config's parallelism_config_tp"):
        agreed_tensor(4, 2)
    path = tmp_path / "config.yaml"
    path.write_text("num_processes: 4\nparallelism_config:\n  parallelism_config_tp_size: 2\n")
    assert read_accelerate_config(path).size("tp") == 2
    path.write_text("num_processes: 4\nparallelism_config:\n  parallelism_config_tp_size: two\n")
    with pytest.raises(BadInputError, match=r"parallelism_config_tp_size is 'two'"):
        read_accelerate_config(path).check()
