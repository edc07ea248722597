"""The numbers of transformers' sdpa, from the pairs of each document alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.model.attention.document_attention import (
    BY_DOCUMENT,
    attend_by_document,
    diagonal_blocks,
    register_by_document,
)


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    register_by_document()


LENGTHS = [[5, 9, 2], [16], [1, 1, 14]]
T = 16


def positions() -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in LENGTHS])


def packed_mask(window: int | None = None) -> torch.Tensor:
    """(B, 1, T, T): token by token, what a document sees of itself."""
    mask = torch.zeros((len(LENGTHS), 1, T, T), dtype=torch.bool)
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            for i in range(length):
                for j in range(i + 1):
                    mask[row, 0, start + i, start + j] = window is None or i - j < window
            start += length
    return mask


def shapes(mask: torch.Tensor) -> list[tuple[int, int, int, bool]]:
    return [(block.row, block.tokens.start, block.tokens.stop, block.causal) for block in diagonal_blocks(mask[:, 0])]


def test_blocks_are_the_documents() -> None:
    expected = [(0, 0, 5), (0, 5, 14), (0, 14, 16), (1, 0, 16), (2, 0, 1), (2, 1, 2), (2, 2, 16)]
    assert shapes(packed_mask()) == [(*block, True) for block in expected]
    # A window of 4 leaves documents of 1, 2 (causal) and longer ones whole; each token alone with one of 1.
    assert shapes(packed_mask(4)) == [(*block, block[2] - block[1] <= 4) for block in expected]
    assert shapes(packed_mask(1)) == [(row, i, i + 1, True) for row in range(3) for i in range(T)]


def test_what_sees_ahead_or_nothing_joins_blocks() -> None:
    ahead = packed_mask()
    ahead[0, 0, 4, 5] = True  # the first document's last token sees the second's first
    assert shapes(ahead)[:2] == [(0, 0, 14, False), (0, 14, 16, True)]
    behind = packed_mask()
    behind[0, 0, 15, 5] = True
    assert shapes(behind)[:2] == [(0, 0, 5, True), (0, 5, 16, False)]
    nothing = packed_mask()
    nothing[0, 0, 7] = False
    assert not shapes(nothing)[0][3]
    holes = packed_mask()
    holes[0, 0, 8, 6] = False  # within the second document
    assert shapes(holes)[:2] == [(0, 0, 5, True), (0, 5, 14, False)]
    both_ways = packed_mask() | packed_mask().transpose(2, 3)
    assert [shape[:3] for shape in shapes(both_ways)] == [shape[:3] for shape in shapes(packed_mask())]
    assert [shape[3] for shape in shapes(both_ways)] == [False] * 4 + [True] * 2 + [False]


def plainly(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(B, T, H, E), by the formula."""
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
    scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[3])
    return (scores.masked_fill(~mask, -math.inf).softmax(dim=3) @ value).transpose(1, 2)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("shared", [False, True])
def test_output_and_gradients_are_those_of_the_formula(kv_heads: int, window: int | None, shared: bool) -> None:
    """`shared`: one mask for all rows."""
    draw = torch.Generator().manual_seed(0)
    sizes = ((4, 8), (kv_heads, 8), (kv_heads, 6))
    inputs = [torch.randn((3, heads, T, width), generator=draw, dtype=torch.float64) for heads, width in sizes]
    upstream = torch.randn((3, T, 4, 6), generator=draw, dtype=torch.float64)
    mask = packed_mask(window)[:1] if shared else packed_mask(window)
    found = []
    for attend in (plainly, lambda *args: attend_by_document(nn.Module(), *args)[0]):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        output = attend(*leaves, mask)  # type: ignore[operator]
        found.append([output, *torch.autograd.grad(output, leaves, upstream)])
    for expected, tensor in zip(*found, strict=True):
        torch.testing.assert_close(tensor, expected, rtol=1e-12, atol=1e-12)


@pytest.fixture
def attended() -> Iterator[list[tuple[int, ...]]]:
    """(H, t, t) of each call of torch's attention."""
    calls: list[tuple[int, ...]] = []
    original = F.scaled_dot_product_attention

    def noted(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append((query.shape[1], query.shape[2], key.shape[2]))
        return original(query, key, *args, **kwargs)

    with mock.patch.object(F, "scaled_dot_product_attention", noted):
        yield calls


SMALL = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
}


def model_of(kind: str, attention: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(MODELS[kind] | ({} if kind == "gpt2" else SMALL)))
    config.vocab_size = 50
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).double().eval()


@pytest.mark.parametrize("kind", MODELS)
def test_models_compute_what_they_do_under_sdpa(kind: str, attended: list[tuple[int, ...]]) -> None:
    ids = torch.randint(0, 50, (3, T), generator=torch.Generator().manual_seed(1))
    found = []
    for attention in ("sdpa", BY_DOCUMENT):
        attended.clear()
        model = model_of(kind, attention)
        logits = model(input_ids=ids, position_ids=positions(), use_cache=False).logits
        logits.square().mean().backward()
        found.append([logits, *(p.grad for p in model.parameters())])
    for expected, tensor in zip(*found, strict=True):
        torch.testing.assert_close(tensor, expected, rtol=1e-9, atol=1e-12)
    assert attended == [(4, length, length) for _ in range(2) for lengths in LENGTHS for length in lengths]


def test_one_look_at_a_mask_does_for_all_layers(attended: list[tuple[int, ...]]) -> None:
    model = model_of("llama", BY_DOCUMENT)
    ids = torch.zeros((3, T), dtype=torch.long)
    with mock.patch("toolkit.model.attention.document_attention.diagonal_blocks", wraps=diagonal_blocks) as looked:
        model(input_ids=ids, position_ids=positions(), use_cache=False)
    assert looked.call_count == 1
    assert len(attended) == 14


def test_a_row_of_fewer_documents_than_heads_is_cut(attended: list[tuple[int, ...]]) -> None:
    assert 1 < len(LENGTHS[0]) < 4
    ids = torch.zeros((1, T), dtype=torch.long)
    model_of("llama", BY_DOCUMENT)(input_ids=ids, position_ids=positions()[:1], use_cache=False)
    assert attended == [(4, length, length) for _ in range(2) for length in LENGTHS[0]]


@pytest.mark.parametrize("what", ["no mask", "dropout", "one document", "bias", "cache"])
def test_what_cannot_be_cut_is_given_to_sdpa(what: str, attended: list[tuple[int, ...]]) -> None:
    query = torch.randn((3, 4, T, 8))
    mask: torch.Tensor | None = packed_mask()
    given: dict[str, Any] = {}
    if what == "no mask":
        mask = None
    elif what == "dropout":
        given["dropout"] = 0.5
    elif what == "one document":
        mask = torch.ones((T, T), dtype=torch.bool).tril().expand(3, 1, T, T)
    elif what == "bias":
        given["position_bias"] = torch.zeros((1, 4, T, T))
    elif what == "cache":
        query, mask = query[:, :, -1:], packed_mask()[:, :, -1:]
    key = torch.randn((3, 4, T, 8))
    attend_by_document(nn.Module(), query, key, key, mask, **given)
    assert attended == [(4, query.shape[2], T)]


def test_text_is_generated_as_under_sdpa() -> None:
    ids = torch.tensor([[0, 0, 7, 9], [3, 4, 5, 6]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    written = [
        model_of("llama", attention).generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0
        )
        for attention in ("sdpa", BY_DOCUMENT)
    ]
    assert torch.equal(*written)
