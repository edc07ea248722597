"""Masks of rows that hold several documents, pair by pair, as the layers are given them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.images_by_hand import BY_HAND, seeing_model
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from toolkit.model.attention.attention import known_packing

WIDTH = 7
"""Tokens of a window, and of a chunk."""

# Two documents: one ends in an image that is longer than the window, the other begins with one.
KINDS = torch.tensor([[0, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0]])
POSITIONS = torch.tensor([[*range(13), *range(3)]])
IMAGE = [-1, 0, 0, -1, -1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, -1]


def by_hand(layer: str, sees_images: bool) -> torch.Tensor:
    mask = torch.zeros(16, 16, dtype=torch.bool)
    for i in range(16):
        for j in range(16):
            here, there = POSITIONS[0, [i, j]].tolist()
            near = {"sliding_attention": j > i - WIDTH, "chunked_attention": here // WIDTH == there // WIDTH}
            ahead = sees_images and IMAGE[i] == IMAGE[j] >= 0
            mask[i, j] = (i < 13) == (j < 13) and (j <= i or ahead) and near.get(layer, True)
    return mask


@pytest.mark.parametrize(
    ("kind", "text", "sees_images"),
    [
        ("gemma3", {"sliding_window": WIDTH}, {"full_attention": True, "sliding_attention": True}),
        (
            "gemma4",
            {"sliding_window": WIDTH, "use_bidirectional_attention": "vision"},
            {"sliding_attention": True, "full_attention": False},
        ),
        ("llama4", {"attention_chunk_size": WIDTH}, {"full_attention": False, "chunked_attention": False}),
    ],
)
def test_masks_pair_by_pair(kind: str, text: dict[str, Any], sees_images: dict[str, bool]) -> None:
    types, found = [*sees_images], {}
    model = seeing_model(kind, {**text, "layer_types": types, "num_hidden_layers": len(types)})

    def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        found[types[module.layer_idx]] = attention_mask
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register("watched", attend)
    AttentionMaskInterface.register("watched", sdpa_mask)
    model.set_attn_implementation("watched")
    kinds = BY_HAND[kind].kinds
    with torch.no_grad(), known_packing(True):
        model(input_ids=KINDS + 90, position_ids=POSITIONS, use_cache=False, **({kinds: KINDS} if kinds else {}))
    assert found.keys() == sees_images.keys()
    for layer, mask in found.items():
        assert torch.equal(mask[0, 0], by_hand(layer, sees_images[layer])), layer
