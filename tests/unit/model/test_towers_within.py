"""Towers that stand in what a type calls its decoder: no part of the language model."""

from __future__ import annotations

import pytest
import torch
from support.every_multimodal import small_config
from transformers import AutoModelForMultimodalLM, AutoModelForSeq2SeqLM

from toolkit.model.adapters.adapters import add_adapter
from toolkit.model.structure.model_parts import parts_of, untrained_modules
from toolkit.recipe.schema import AdapterSection

WITHIN = {
    "ernie4_5_vl_moe": (
        "model.vision_tower.",
        "model.resampler_model.",
        "model.language_model.layers.0.mlp.vision_moe.",
        "model.language_model.layers.1.mlp.vision_moe.",
    ),
    "git": ("git.image_encoder.", "git.visual_projection."),
    "phi4_multimodal": ("model.embed_tokens_extend.",),
    "t5gemma2": ("model.encoder.vision_tower.", "model.encoder.multi_modal_projector."),
    "gemma3": ("model.vision_tower.", "model.multi_modal_projector."),
}


@pytest.mark.parametrize("kind", list(WITHIN))
def test_text_rows_train_what_stands_beside_the_towers(kind: str) -> None:
    config = small_config(kind)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForMultimodalLM
    with torch.device("meta"):
        model = auto.from_config(config)
    model.config.architectures = [type(model).__name__]  # as `load` and files have it
    parts = parts_of(model)
    assert parts
    assert {name for name, part in parts.items() if part != "language"} == {
        name for name in parts if name.startswith(WITHIN[kind])
    }
    assert {path.removesuffix(".") for path in WITHIN[kind]} <= set(untrained_modules(model, ("language",)))


def test_all_linear_adapts_the_experts_of_words_and_none_of_images() -> None:
    config = small_config("ernie4_5_vl_moe")
    with torch.device("meta"):
        model = AutoModelForMultimodalLM.from_config(config)
    model.config.architectures = [type(model).__name__]
    adapted = add_adapter(model, AdapterSection(kind="lora", r=2, target_modules="all-linear"), "base")
    names = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert any("text_moe.experts" in name for name in names)
    assert not [name for name in names if "visi" in name]
