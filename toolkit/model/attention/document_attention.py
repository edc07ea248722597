"""Attention of packed rows on a CPU, document by document.

`sdpa` computes all T x T pairs of a packed row and masks those of different documents. Here the mask is cut into
its diagonal blocks, and each is computed alone: the same numbers from sum(t^2) pairs, half of these if a block
is causal. The blocks are read from the mask that transformers makes, so that whatever it forbids, such as
what lies outside a sliding window, stays forbidden.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from toolkit.model.structure.fake_tensors import has_values

BY_DOCUMENT = "sdpa_by_document"
"""The name in a model's configuration."""


@dataclass(frozen=True)
class Block:
    """Tokens of one row that see no others. `causal` says that each sees itself and all before it."""

    row: int
    tokens: slice
    causal: bool

    @property
    def length(self) -> int:
        return int(self.tokens.stop - self.tokens.start)


def diagonal_blocks(mask: torch.Tensor) -> list[Block]:
    """Returns the smallest diagonal blocks, row by row, outside of which no token sees another.

    Args:
        mask: (B, T, T), bool; `mask[b, i, j]` says that token i sees token j. A token that sees nothing ends no block.
    """
    count = mask.sum(dim=2)
    seen = mask.to(torch.uint8)
    first = seen.argmax(dim=2)
    last = mask.shape[2] - 1 - seen.flip(2).argmax(dim=2)
    # k starts a block if no token at k or later sees one before k, and none before k sees k or a later one.
    low = first.flip(1).cummin(dim=1).values.flip(1)
    high = last.cummax(dim=1).values
    index = torch.arange(mask.shape[1], device=mask.device)
    starts = low >= index
    starts[:, 1:] &= high[:, :-1] < index[1:]
    starts[:, 0] = True
    begin = torch.where(starts, index, 0).cummax(dim=1).values  # of the block that a token is in
    causal = (first == begin) & (last == index) & (count == index - begin + 1)
    blocks = []
    for row, (where, whole) in enumerate(zip(starts, causal.tolist(), strict=True)):
        bounds = [*where.nonzero().flatten().tolist(), mask.shape[1]]
        blocks += [Block(row, slice(start, end), all(whole[start:end])) for start, end in itertools.pairwise(bounds)]
    return blocks


def attend_by_document(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Computes transformers' `sdpa_attention_forward`, to rounding.

    It calls that function if there is nothing to cut: without a mask, and with a cache, a position bias, or dropout,
    whose draws would differ.

    Args:
        query: (B, H, T, D).
        key: (B, K, T, D), H a multiple of K.
        value: (B, K, T, E).
        attention_mask: (B or 1, 1, T, T), bool.

    Returns:
        (B, T, H, E), and None for the attention's weights.
    """
    blocks = None
    if dropout == 0.0 and kwargs.get("position_bias") is None and kwargs.get("softcap") is None:
        blocks = _blocks_of(attention_mask, query, key)
    if blocks is None or attention_mask is None:
        found: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return found
    lengths = [block.length for block in blocks]
    # Split, not sliced: the backward of a slice fills a tensor of the whole's size with zeros, for each of them.
    # Each (B, H, T, D) becomes (B T, H, D), token by token.
    parts = (torch.split(tensor.transpose(1, 2).flatten(0, 1), lengths) for tensor in (query, key, value))
    outputs = [
        _attend(block, attention_mask, scaling, *of_block) for block, *of_block in zip(blocks, *parts, strict=True)
    ]
    return torch.cat(outputs).view(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


def _attend(
    block: Block,
    mask: torch.Tensor,
    scaling: float | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    """Computes (t, H, E) from a block's query (t, H, D), key (t, K, D) and value (t, K, E)."""
    # The mask may have one row for all of the batch.
    own = None if block.causal else mask[block.row % mask.shape[0], 0, block.tokens, block.tokens]
    output = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=own,
        is_causal=block.causal,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output[0].transpose(0, 1)


def _blocks_of(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> list[Block] | None:
    """Returns the mask's blocks in all rows; None if each row has one, or the mask cannot be cut."""
    if mask is None or not has_values(mask) or mask.dtype != torch.bool or mask.shape[1] != 1:
        return None
    if not mask.shape[2] == mask.shape[3] == query.shape[2] == key.shape[2]:
        return None
    blocks = getattr(mask, "_blocks", None)  # every layer is given the same mask
    # Cut once a forward, not once a layer.
    if blocks is None:
        blocks = diagonal_blocks(mask[:, 0].expand(query.shape[0], -1, -1))
        mask._blocks = blocks  # type: ignore[attr-defined]
    return blocks if len(blocks) > query.shape[0] else None


def register_by_document() -> None:
    """Makes `BY_DOCUMENT` a name that `set_attn_implementation` knows; a second call changes nothing."""
    AttentionInterface.register(BY_DOCUMENT, attend_by_document)
    AttentionMaskInterface.register(BY_DOCUMENT, sdpa_mask)
