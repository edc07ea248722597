"""Which models are checked on a few tokens, because longer rows go through no other code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tiny import llama
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaForCausalLM

from toolkit.model.attention.full_attention import attends_in_full

SMALL = {"num_hidden_layers": 2}
BY_KIND = {
    "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def on_meta(kind: str, attention: str = "sdpa", **fields: Any) -> Any:
    config = CONFIG_MAPPING[kind](**{**SMALL, **fields})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2", "olmo2", "phi3", "smollm3"])
def test_plain_families_attend_in_full(kind: str) -> None:
    assert attends_in_full(on_meta(kind, "eager"))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("mistral", "a window of 4,096"),
        ("gemma2", "a window in every other layer"),
        ("gemma3_text", "the same, of 1,024"),
        ("gpt_neo", "a window of 256 in the model's own code"),
        ("llama4_text", "chunks"),
        ("mixtral", "experts"),
        ("qwen3_moe", "experts"),
        ("qwen3_next", "states along a row"),
        ("falcon_h1", "states beside attention in each layer"),
        ("mamba2", "no attention"),
    ],
)
def test_others_are_checked_on_longer_rows(kind: str, why: str) -> None:
    layers = {"num_layers": 2, "attention_types": [[["global", "local"], 1]]} if kind == "gpt_neo" else {}
    assert not attends_in_full(on_meta(kind, "eager", **layers)), why


@pytest.mark.parametrize(
    ("kind", "fields", "found"),
    [
        ("mistral", {"sliding_window": None}, True),
        # Its file does not read the kinds of layers.
        ("mistral", {"sliding_window": 40, "layer_types": ["full_attention"] * 2}, False),
        ("phi3", {"sliding_window": 40, "layer_types": ["full_attention"] * 2}, False),
        ("olmo3", {"layer_types": ["full_attention"] * 2, "rope_parameters": BY_KIND}, False),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, False),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}, True),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, False),
    ],
)
def test_the_configuration_decides(kind: str, fields: dict[str, Any], found: bool) -> None:
    assert attends_in_full(on_meta(kind, **fields)) == found


def test_code_that_is_not_transformers_own_is_not_known() -> None:
    class Mine(LlamaForCausalLM):  # as a file beside the weights has it
        pass

    model = llama("sdpa")
    assert attends_in_full(model)
    model.__class__ = Mine
    assert not attends_in_full(model)


def test_kernels_that_work_in_blocks_of_tokens_need_longer_rows() -> None:
    model = llama("sdpa")
    model.config._attn_implementation = "flex_attention"
    assert not attends_in_full(model)


def test_a_parameter_that_meets_several_tokens_is_found() -> None:
    model = llama("sdpa")
    model.model.layers[0].self_attn.sinks = torch.nn.Parameter(torch.zeros(4))
    assert not attends_in_full(model)
