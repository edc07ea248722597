"""Masks of models in which the tokens of an image see each other, pair by pair, and the attention that takes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.images_by_hand import random_rows, samples_of, seeing_model

from toolkit.data.samples.image_samples import KINDS_OF_TOKENS
from toolkit.errors import BadInputError
from toolkit.model.attention.attention import settle_attention
from toolkit.model.attention.image_masks import masks_of, sees_in_spans
from toolkit.objectives.causal_lm import CausalLM

WINDOW = 6
VISION = {"use_bidirectional_attention": "vision"}
# Two documents: one ends in an image that is longer than the window, the other begins with one.
KINDS = torch.tensor([[0, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0]])
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0, 1, 2]])
IMAGE = [-1, 0, 0, -1, -1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, -1]


def by_hand(in_all_layers: bool) -> dict[str, torch.Tensor]:
    full, sliding = torch.zeros(16, 16, dtype=torch.bool), torch.zeros(16, 16, dtype=torch.bool)
    for i in range(16):
        for j in range(16):
            if (i < 13) != (j < 13):
                continue
            of_one_image = IMAGE[i] == IMAGE[j] >= 0
            full[i, j] = j <= i or (of_one_image and in_all_layers)
            sliding[i, j] = (j <= i or of_one_image) and j > i - WINDOW
    return {"full_attention": full, "sliding_attention": sliding}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("kind", "text"), [("gemma3", {}), ("gemma4", VISION)])
def test_masks_pair_by_pair(kind: str, text: dict[str, Any], attention: str) -> None:
    model = seeing_model(kind, {**text, "sliding_window": WINDOW})
    model.set_attn_implementation(attention)
    assert sees_in_spans(model)
    found = masks_of(model, KINDS, POSITIONS)
    for name, expected in by_hand(in_all_layers=kind == "gemma3").items():
        mask = found[name][0, 0]
        assert torch.equal(mask if attention == "sdpa" else mask == 0.0, expected), name


def test_other_models_have_none() -> None:
    assert not any(sees_in_spans(seeing_model(kind)) for kind in ("gemma4", "llava", "qwen3_vl", "llama4"))


def test_attentions_that_take_masks_agree() -> None:
    samples = samples_of("gemma3", [random_rows("gemma3", [0, 2, 1], seed=3)], True, 96)
    found = {}
    for attention in ("eager", "sdpa"):
        model = seeing_model("gemma3", {"sliding_window": WINDOW}).eval()
        model.set_attn_implementation(attention)
        objective, batch = CausalLM(model), samples.batch([0])
        assert int(batch[KINDS_OF_TOKENS].sum()) == 12
        with torch.no_grad():
            found[attention] = objective.logits(model, objective.on_host(batch))
    torch.testing.assert_close(found["eager"], found["sdpa"], rtol=1e-5, atol=1e-5)


def test_attention_without_masks_is_refused_and_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cpu = seeing_model("gemma3"), torch.device("cpu")
    monkeypatch.setattr("toolkit.model.attention.attention.best_flash", lambda *_: ("flash_attention_2", "installed"))
    for asked in ("flash_attention_2", "flex_attention"):
        with pytest.raises(BadInputError, match=rf"model\.attention: {asked} takes no mask, and in Gemma3ForCond"):
            settle_attention(model, asked, cpu, True, True, False, has_images=True)
    told = settle_attention(model, "auto", cpu, True, False, False, has_images=True)
    assert told == "sdpa (the tokens of an image see each other, which takes a mask)"
    assert "flash" in settle_attention(model, "auto", cpu, True, False, False)
