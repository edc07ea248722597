"""Makes masks for models in which the tokens of an image see each other: Gemma 3, larger Gemma 4.

transformers makes such masks itself. In 5.23 those of sliding windows are wrong if rows share samples: it looks for the
tokens of images at the positions of their documents instead of their places in the sample.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Masks = dict[str, torch.Tensor]
"""Masks by the type of a layer, (B, 1, T, T): bool, or numbers that are added to scores."""

TAKE_SPANS = ("eager", "sdpa")
"""Allowed values of `model.attention`. Flash attention takes no such mask, and would leave these tokens causal."""


def sees_in_spans(model: nn.Module) -> bool:
    """Tells whether the tokens of an image see each other in this model, later ones too."""
    return _mask_function(model) is not None


def masks_of(model: nn.Module, kinds: torch.Tensor, positions: torch.Tensor) -> Masks:
    """Returns transformers' masks of whole rows, restricted to documents.

    Args:
        kinds: (B, T), 1 for tokens of images.
        positions: (B, T), which restart with each document.
    """
    make = _mask_function(model)
    assert make is not None, "not for models without spans"
    documents = (positions == 0).cumsum(dim=1)
    shared = documents[:, None, :, None] == documents[:, None, None, :]
    masks: dict[str, torch.Tensor | None] = make(kinds)
    return {kind: _within_documents(shared, mask) for kind, mask in masks.items()}


def _within_documents(shared: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    if mask is None:  # sdpa's own causal one
        return shared.tril()
    if mask.dtype == torch.bool:
        return mask & shared
    return mask.masked_fill(~shared, torch.finfo(mask.dtype).min)


def _mask_function(model: Any) -> Callable[[torch.Tensor], Any] | None:
    """Returns transformers' function in the model's file that takes kinds of tokens, or None."""
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
