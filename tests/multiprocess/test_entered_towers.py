"""Towers whose lists are units as their elements are large: features and steps of the plain model on two ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.backend import accelerated
from support.every_multimodal import small_config
from support.plain_loop import Trained, plain_loop
from support.ranks import run_on_ranks
from torch import nn
from transformers import AutoModelForMultimodalLM

from toolkit.sharding.plan import units

STEPS = 2
Inputs = dict[str, torch.Tensor]


def sound(number: int, *shape: int) -> torch.Tensor:
    return torch.randn(1, *shape, generator=torch.Generator().manual_seed(number))


SOUND: Callable[[int], Inputs] = lambda number: {"input_features": sound(number, 16, 160)}  # noqa: E731
TOWERS: dict[str, tuple[str, str, Callable[[int], Inputs]]] = {
    "granite_speech": ("encoder.layers.0", "get_audio_features", SOUND),
    "granite_speech_plus": ("encoder.layers.0", "get_audio_features", SOUND),
    "vibevoice_asr": (
        "acoustic_tokenizer_encoder.conv_layers.0",
        "get_audio_features",
        lambda number: {"input_values": sound(number, 1, 64), "padding_mask": torch.ones(1, 64, dtype=torch.bool)},
    ),
    "florence2": (
        "vision_tower.blocks.0.0",
        "get_image_features",
        lambda number: {"pixel_values": sound(number, 3, 32, 32)},
    ),
    "granite_docling": (
        "vision_model.connector.coarse.deepstack_mergers.0",
        "get_image_features",
        lambda number: {
            "pixel_values": sound(number, 2, 3, 64, 64),
            "pixel_attention_mask": torch.ones(1, 2) > 0,
            **({"tile_fine_mask": torch.ones(1) > 0} if number % 4 > 1 else {}),  # the other list of mergers
        },
    ),
}
"""By type: an element of a list that only its size makes a unit, what runs the tower, and rows for it by number."""


VISION: dict[str, dict[str, Any]] = {
    "florence2": {"depths": [2, 2]},
    "granite_docling": {"image_size": 64, "deepstack_visual_indexes": [0, 1]},
}
"""By type, fields of the tower, so that lists have two elements and each is entered."""


class Senses(nn.Module):
    """The whole model, whose forward is its tower and its text side by side."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = small_config(kind)
        for name, value in VISION.get(kind, {}).items():
            setattr(config.vision_config, name, value)
        self.whole: Any = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
        self.tower = TOWERS[kind][1]
        self.is_encoder_decoder = config.is_encoder_decoder

    def forward(self, inputs: Inputs, ids: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(int(ids[0, 0]))  # VibeVoice draws what it hears
        found = getattr(self.whole, self.tower)(**inputs)
        inner = [each for features in getattr(found, "deepstack_features", None) or () for each in features]
        features = torch.cat([each.flatten() for each in [*found.pooler_output, *inner]])
        targets = {"decoder_input_ids": ids} if self.is_encoder_decoder else {}
        logits = self.whole(input_ids=ids, use_cache=False, **targets).logits
        return features.square().mean() + logits.square().mean()


def rows(kind: str, step: int, rank: int) -> tuple[Inputs, torch.Tensor]:
    number = 2 * step + rank
    ids = torch.randint(10, 60, (1, 9), generator=torch.Generator().manual_seed(number))
    return TOWERS[kind][2](number), ids


@functools.cache
def plain_steps(kind: str) -> Trained:
    model = Senses(kind).train()
    return plain_loop(
        model,
        range(STEPS),
        lambda step: torch.stack([model(*rows(kind, step, rank)) for rank in range(2)]).mean(),
        max_norm=None,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
    )


def sharded_steps(kind: str) -> tuple[list[str], list[float], float]:
    """Names of the units, this rank's losses, and how far the weights are off, as a share of the largest change."""
    units.LARGE = 0  # so that the small model's lists count as the large one's do
    expected = plain_steps(kind).weights
    accelerator = accelerated("zero3")
    model: Any = Senses(kind).train()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    losses = []
    for step in range(STEPS):
        loss = model(*rows(kind, step, dist.get_rank()))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    whole = {name: tensor.full_tensor() for name, tensor in model.named_parameters()}
    largest = max((expected[name] - before[name]).abs().max().item() for name in expected)
    off = max((whole[name] - expected[name]).abs().max().item() for name in expected) / largest
    names = [unit.name for unit in accelerator.state.fsdp_plugin.unit_plan.units]
    accelerator.end_training()
    return names, losses, off


def all_steps() -> dict[str, tuple[list[str], list[float], float]]:
    return {kind: sharded_steps(kind) for kind in TOWERS}


def test_a_tower_of_large_elements_is_entered_unit_by_unit() -> None:
    of_ranks = run_on_ranks(all_steps, 2)
    for kind, (element, *_) in TOWERS.items():
        both = [found[kind][1] for found in of_ranks]
        assert [sum(pair) / 2 for pair in zip(*both, strict=True)] == pytest.approx(plain_steps(kind).losses, rel=1e-5)
        for names, _, off in (found[kind] for found in of_ranks):
            assert any(name.endswith(element) for name in names), kind
            assert off < 1e-4, kind
