"""Adapters of models with experts: what has one, the merged weights, and what peft makes of the saved files."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from support.tiny import llama, tiny_config
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from toolkit.errors import BadInputError
from toolkit.model.adapters.adapter_checks import require_mergeable
from toolkit.model.adapters.adapters import add_adapter, merged, state_in_layers, write_adapter
from toolkit.model.adapters.targets import stacked_experts, targets_beside_experts
from toolkit.model.part_sizes import adapter_fact
from toolkit.recipe.schema import AdapterSection

ATTENTION = {f"self_attn.{letter}_proj" for letter in "qkvo"}
EXPERTS = {"experts.gate_up_proj", "experts.down_proj"}


def mlp(path: str) -> set[str]:
    return {f"{path}.{name}_proj" for name in ("gate", "up", "down")}


LATENT = {f"self_attn.{name}" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")}
ADAPTED = {
    "mixtral": ATTENTION | {f"mlp.{name}" for name in EXPERTS},
    "qwen2_moe": ATTENTION | {f"mlp.{name}" for name in EXPERTS} | mlp("mlp.shared_expert"),
    "deepseek_v3": LATENT | {f"mlp.{name}" for name in EXPERTS} | mlp("mlp.shared_experts") | mlp("mlp"),
    "gpt_oss": ATTENTION | {f"mlp.{name}" for name in EXPERTS},
    "granitemoe": ATTENTION | {f"block_sparse_moe.{name}" for name in EXPERTS},
    "llama4_text": ATTENTION | {f"feed_forward.{name}" for name in EXPERTS} | mlp("feed_forward.shared_expert"),
    # peft would not find its shared experts again under the names that the model has.
    "laguna": ATTENTION
    | {"self_attn.g_proj"}
    | {f"mlp.{name}" for name in EXPERTS}
    | mlp("mlp.shared_experts")
    | mlp("mlp"),
    "phimoe": ATTENTION | {f"mlp.{name}" for name in EXPERTS},
    "jetmoe": {"self_attention.kv_proj"}
    | {f"{path}.{name}_linear" for path in ("mlp", "self_attention.experts") for name in ("input", "output")},
}
"""Family -> what has an adapter in its blocks: every linear layer and every expert, and no router."""


def build(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(tiny_config(family))
    return model.eval()


def adapt(model: PreTrainedModel, **fields: Any) -> peft.PeftModel:
    """With adapters that change what the model says."""
    adapted = add_adapter(model, AdapterSection(kind="lora", r=2, **fields), "base")
    for name, parameter in list(adapted.named_parameters()):
        if parameter.requires_grad:  # and on the meta device
            owner, _, leaf = name.rpartition(".")
            values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.3
            setattr(adapted.get_submodule(owner), leaf, nn.Parameter(values))
    return adapted


def within_block(name: str) -> str:
    """A parameter's name behind the number of its block."""
    return name.partition("layers.")[2].partition(".")[2].removesuffix(".weight")


IDS = torch.arange(3, 19)[None]


def test_a_gate_that_forgets_is_no_router_and_stacks_of_unequal_lengths_are_experts() -> None:
    with torch.device("meta"):
        kimi, longcat = build("kimi_linear"), build("longcat_flash")
    targets = targets_beside_experts(kimi, stacked_experts(kimi), ("language",))
    adapted = {within_block(name) for name in (*targets.modules, *targets.parameters)}
    assert adapted >= {"self_attn.forget_gate.f_a_proj", "self_attn.forget_gate.f_b_proj", "mlp.experts.gate_up_proj"}
    assert "mlp.gate" not in adapted
    config = longcat.config
    shapes = {name.rpartition(".")[2]: len(longcat.get_parameter(name)) for name in stacked_experts(longcat)}
    both = config.n_routed_experts + config.zero_expert_num
    assert shapes == {"gate_up_proj": both, "down_proj": config.n_routed_experts}


@pytest.mark.parametrize("family", list(ADAPTED))
def test_every_linear_layer_and_every_expert_has_an_adapter(family: str, tmp_path: Path) -> None:
    base = build(family)
    plain = base(input_ids=IDS, use_cache=False).logits
    adapted = adapt(copy.deepcopy(base))
    logits = adapted(input_ids=IDS, use_cache=False).logits
    logits.sum().backward()
    trained = {name: parameter for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert all(parameter.grad is not None for parameter in trained.values())
    assert (logits - plain).abs().max() > 1e-3

    whole = dict(merged(adapted, state_in_layers(adapted).items()))
    # Tied heads stand there once; a bias of a router is saved beside the parameters.
    before = {name: tensor for name, tensor in base.state_dict().items() if name in whole}
    assert before.keys() >= {name for name, _ in base.named_parameters()}
    assert before.keys() == whole.keys()
    changed = {within_block(name) for name, tensor in before.items() if not torch.equal(tensor, whole[name])}
    assert changed == ADAPTED[family]
    by_peft = copy.deepcopy(adapted).merge_and_unload().state_dict()
    for name, tensor in whole.items():
        torch.testing.assert_close(by_peft[name], tensor, rtol=0, atol=1e-6)

    write_adapter(adapted, adapted.state_dict().items(), tmp_path)
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path))
    torch.testing.assert_close(loaded(input_ids=IDS, use_cache=False).logits, logits, rtol=0, atol=1e-6)


def test_the_share_of_the_weights_with_adapters_is_told() -> None:
    fact = adapter_fact(adapt(build("mixtral")), ("language",))
    assert fact == "on 98.9% of the blocks' weights; none on mlp.gate"
    assert adapter_fact(adapt(build("mixtral"), target_modules=["q_proj"]), ("language",)).startswith("on 4.5%")


def test_a_pattern_means_whole_paths() -> None:
    """peft takes the last word of what a pattern matches in these families, and would adapt all blocks."""
    for pattern, paths in {
        r".*\.1\.self_attn\..*b_proj": {"self_attn.q_b_proj", "self_attn.kv_b_proj"},
        r".*\.1\..*experts\.(gate_up|down|up)_proj": {
            "mlp.experts.gate_up_proj",
            "mlp.experts.down_proj",
            "mlp.shared_experts.up_proj.weight",
            "mlp.shared_experts.down_proj.weight",
        },
    }.items():
        config = adapt(build("deepseek_v3"), target_modules=pattern).peft_config["default"]
        found = {*(config.target_modules or ()), *(config.target_parameters or ())}
        assert found == {f"model.layers.1.{path}" for path in paths}


@pytest.mark.parametrize(("field", "value"), [("dropout", 0.1), ("use_dora", True)])
def test_what_peft_cannot_do_with_experts_is_refused(field: str, value: Any) -> None:
    with pytest.raises(BadInputError, match=rf"adapter\.{field}: .* experts .*model\.layers\.0\.mlp\.experts"):
        adapt(build("mixtral"), **{field: value})
    assert adapt(build("mixtral"), target_modules=["q_proj"], **{field: value})


def test_an_adapter_of_the_embeddings_is_merged() -> None:
    adapted = adapt(llama(tie_word_embeddings=False), target_modules=["embed_tokens", "q_proj"])
    require_mergeable(adapted)
    whole = dict(merged(adapted, state_in_layers(adapted).items()))
    by_peft = copy.deepcopy(adapted).merge_and_unload().state_dict()
    assert whole.keys() == by_peft.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(by_peft[name], tensor, rtol=0, atol=1e-6)
