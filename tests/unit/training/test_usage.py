"""The arithmetic behind the MFU."""

from __future__ import annotations

import pytest
from tiny import llama

from toolkit.training.usage import flops_per_token


@pytest.mark.parametrize("tied", [True, False])
def test_frozen_parameters_cost_no_gradient(tied: bool) -> None:
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    model = llama(**sizes, num_key_value_heads=1, tie_word_embeddings=tied)
    block = 16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 24 + 2 * 16  # q and o, k and v, MLP, norms
    rest, head, attention = 16, 40 * 16, 12 * 2 * 16 * 10  # the last norm; 12 L H T
    assert flops_per_token(model, 10) == 6 * (2 * block + rest + head) + attention
    model.requires_grad_(False)
    model.model.layers[1].requires_grad_(True)
    assert flops_per_token(model, 10) == 4 * (block + rest + head) + 6 * block + attention
