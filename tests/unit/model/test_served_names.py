"""Names of exported tensors, by the rules of vLLM's loaders. vLLM itself needs a GPU, and is not run here.

The rules are facts read in vllm/model_executor/models of github.com/vllm-project/vllm: llama.py at e06c9ba2,
qwen2.py at cb24295e, qwen3_moe.py at 2e0831b0, mixtral.py at f0e26957, gemma3_mm.py at e5fa9450, mistral3.py at
577477b5 and qwen3_vl.py at 4f5768c7. A loader renames prefixes, joins parts of fused
layers, and refuses what it has no place for.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from support.every_multimodal import small_config
from support.tiny import tiny_config
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from toolkit.model.weights.file_names import FileNames
from toolkit.sharding.fsdp2.shards import state_once

ATTENTION = r"self_attn\.[qkvo]_proj\.(weight|bias)"
NORMS = r"(input|post_attention|pre_feedforward|post_feedforward)_layernorm\.weight|self_attn\.[qk]_norm\.weight"
MLP = r"mlp\.(gate|up|down)_proj\.weight"
"""vLLM joins q, k and v, and gate and up, by these names."""

EXPERTS = {
    "qwen3_moe": r"mlp\.gate\.weight|mlp\.experts\.\d+\.(gate|up|down)_proj\.weight",
    "mixtral": r"block_sparse_moe\.gate\.weight|block_sparse_moe\.experts\.\d+\.w[123]\.weight",
}
"""Of an expert by its number: names of stacked experts have no place."""

TEXT = ("llama", "qwen2", "qwen3_moe", "mixtral")
TOWERS = {
    "gemma3": ("vision_tower.", "multi_modal_projector."),
    "mistral3": ("vision_tower.", "multi_modal_projector."),
    "qwen3_vl": ("visual.",),
}
"""Modules beside the language model; names within them are those of transformers' tower and are not looked at."""

RENAMED = {
    "model.language_model.": "language_model.model.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "model.visual.": "visual.",
    "lm_head.": "language_model.lm_head.",
}
"""Of multimodal models, the first prefix that fits."""


def has_place(name: str, kind: str) -> bool:
    """Whether the loader of a text model takes a name."""
    layer = "|".join((ATTENTION, NORMS, EXPERTS.get(kind, MLP)))
    return bool(re.fullmatch(rf"(model\.(embed_tokens|norm)|lm_head)\.weight|model\.layers\.\d+\.({layer})", name))


def has_place_beside_towers(name: str, kind: str) -> bool:
    """Whether the loader of a multimodal model takes a name."""
    for prefix, renamed in RENAMED.items():
        if name.startswith(prefix):
            name = renamed + name.removeprefix(prefix)
            break
    is_text = name.startswith("language_model.") and has_place(name.removeprefix("language_model."), kind)
    return is_text or name.startswith(TOWERS[kind])


def exported(model: Any) -> set[str]:
    return {name for name, _ in FileNames(model, None).in_files(iter(state_once(model).items()))}


@pytest.mark.parametrize("kind", TEXT)
def test_a_text_models_names_have_a_place(kind: str) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config(kind), dtype=torch.float32)
    names = exported(model)
    assert [name for name in sorted(names) if not has_place(name, kind)] == []
    if kind in EXPERTS:
        inner = set(state_once(model))
        assert [name for name in inner if not has_place(name, kind)], "the names in memory are stacked and have none"


@pytest.mark.parametrize("kind", TOWERS)
def test_a_multimodal_models_names_have_a_place(kind: str) -> None:
    model = AutoModelForImageTextToText.from_config(small_config(kind), dtype=torch.float32)
    names = exported(model)
    assert [name for name in sorted(names) if not has_place_beside_towers(name, kind)] == []
    assert any("layers" in name and has_place_beside_towers(name, kind) for name in names)


def test_other_names_have_none() -> None:
    assert not has_place("model.layers.0.mlp.experts.gate_up_proj", "qwen3_moe")
    assert not has_place("model.model.layers.0.input_layernorm.weight", "llama")
    assert not has_place_beside_towers("model.layers.0.input_layernorm.weight", "gemma3")
    assert has_place_beside_towers("model.language_model.layers.0.input_layernorm.weight", "gemma3")
