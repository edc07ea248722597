"""Losses of models that read more than text come from the inputs of their heads too, wherever the head stands."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.every_multimodal import on_meta, small_config
from support.tiny import VOCAB_SIZE
from transformers import AutoModelForMultimodalLM

from toolkit.objectives.causal_lm import CausalLM
from toolkit.objectives.losses.find_head import find_head_loss
from toolkit.objectives.losses.fused_linear_cross_entropy import HeadLoss

LOOKS_FOR_IMAGES = ("gemma4", "gemma4_unified", "molmo2")
"""Around their decoders, in a way that needs values of parameters, or arguments that a trial does not give."""

HOLDS_HEAD = ("llama4", "kosmos-2.5")
"""Whose decoders have the head in them."""


@pytest.mark.parametrize("kind", [*LOOKS_FOR_IMAGES, *HOLDS_HEAD, "qwen3_vl"])
def test_it_is_found_without_weights(kind: str) -> None:
    assert isinstance(find_head_loss(on_meta(kind, small=True)), HeadLoss)


@pytest.mark.parametrize("kind", ["gemma4", "llama4", "kosmos-2.5"])
def test_loss_and_gradients_are_those_of_whole_logits(kind: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(small_config(kind), dtype=torch.float32).eval()
    ids = torch.randint(10, VOCAB_SIZE, (2, 12))  # below are marks of images
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    expected = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum", ignore_index=-100)
    expected.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    objective = CausalLM(model, packed=False)
    assert isinstance(objective.head_loss, HeadLoss)
    batch = {"input_ids": ids, "labels": labels, "position_ids": torch.arange(12).expand(2, 12)}
    loss = objective.loss_sum(model, batch)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for name, gradient in gradients.items():
        off = (model.get_parameter(name).grad - gradient).norm()
        assert float(off) <= 1e-6 * max(1.0, float(gradient.norm())), name
