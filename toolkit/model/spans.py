"""Masks of models in which the tokens of a picture see each other: Gemma 3, larger Gemma 4.

transformers makes such masks itself. In 5.23 those of sliding windows are wrong if rows share samples: it looks for the
tokens of pictures at the positions of their documents instead of their places in the sample.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Masks = dict[str, torch.Tensor]
"""By the type of a layer: bool, or to be added to scores, (B, 1, T, T)."""

TAKE_SPANS = ("eager", "sdpa")
"""What `model.attention` may be. Flash attention takes no such mask, and would leave these tokens causal."""


def sees_in_spans(model: nn.Module) -> bool:
    """Whether the tokens of a picture see each other in this model, those behind them too."""
    return _maker(model) is not None


def masks_of(model: nn.Module, kinds: torch.Tensor, positions: torch.Tensor) -> Masks:
    """transformers' masks of whole rows, without what a document sees of another.

    Args:
        kinds: 1 for tokens of pictures, (B, T).
        positions: restart with each document, (B, T).
    """
    make = _maker(model)
    assert make is not None, "not for models without spans"
    documents = (positions == 0).cumsum(dim=1)
    shared = documents[:, None, :, None] == documents[:, None, None, :]
    masks: dict[str, torch.Tensor | None] = make(kinds)
    return {kind: _inside(shared, mask) for kind, mask in masks.items()}


def _inside(shared: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    if mask is None:  # sdpa's own causal one
        return shared.tril()
    if mask.dtype == torch.bool:
        return mask & shared
    return mask.masked_fill(~shared, torch.finfo(mask.dtype).min)


def _maker(model: Any) -> Callable[[torch.Tensor], Any] | None:
    """transformers' function in the model's own file, from the kinds of tokens."""
    # A sharded model's class is FSDP2's, made from transformers'.
    files = [sys.modules[kind.__module__] for kind in type(model).__mro__]
    module: Any = next((file for file in files if hasattr(file, "create_masks_for_vision_model")), None)
    if module is None:
        return None
    config = model.config.get_text_config()
    # Gemma 4 says "vision", "all" or None. Gemma 3 has such spans always; its True is for encoders of texts.
    if config.use_bidirectional_attention not in ("vision", False):
        return None

    def masks(kinds: torch.Tensor) -> Any:
        return module.create_masks_for_vision_model(
            config=config,
            inputs_embeds=torch.empty((*kinds.shape, 0), device=kinds.device),
            attention_mask=None,
            past_key_values=None,
            position_ids=None,
            block_sequence_ids=module.get_block_sequence_ids_for_mask(kinds, device=kinds.device),
        )

    return masks
