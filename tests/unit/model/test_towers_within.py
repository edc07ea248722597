"""Towers that stand in what a type calls its decoder: no part of the language model."""

from __future__ import annotations

import pytest
import torch
from support.every_multimodal import small_config
from transformers import AutoModelForMultimodalLM

from toolkit.model.parts import parts_of, untrained_modules

WITHIN = {
    "git": ("git.image_encoder.", "git.visual_projection."),
    "phi4_multimodal": ("model.embed_tokens_extend.",),
    "gemma3": ("model.vision_tower.", "model.multi_modal_projector."),
}


@pytest.mark.parametrize("kind", list(WITHIN))
def test_text_rows_train_what_stands_beside_the_towers(kind: str) -> None:
    with torch.device("meta"):
        model = AutoModelForMultimodalLM.from_config(small_config(kind))
    model.config.architectures = [type(model).__name__]  # as `load` and files have it
    parts = parts_of(model)
    assert parts
    assert {name for name, part in parts.items() if part != "language"} == {
        name for name in parts if name.startswith(WITHIN[kind])
    }
    assert {path.removesuffix(".") for path in WITHIN[kind]} <= set(untrained_modules(model))
