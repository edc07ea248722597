"""Makes the inputs besides tokens of a model that sees images: processor's tensors, positions of axes, token types.

Reference: the forwards and `get_rope_index` of transformers' models.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from toolkit.data.samples.image_samples import COUNTS, KINDS_OF_TOKENS, images_in
from toolkit.data.samples.samples import Batch
from toolkit.model.adapters.adapters import base_of

AXES = "positions_of_axes"
"""Batch key of positions of text, time, height and width, (4, B, T), which restart with each document."""

NAMES_OF_KINDS = ("mm_token_type_ids", "token_type_ids")
"""Names of the kinds of tokens among models' inputs."""

WANT_KINDS = ("molmo2",)
"""Types that need the kinds of tokens in training, even for rows of text, whose kinds are all zero."""

HIDE_DOCUMENTS = ("qwen2_vl", "qwen2_5_vl", "glm4v")
"""Types that make three axes of positions (B, T), and their mask without them: rows that share a sample see each other.
Given four rows of positions, they take the first one for the mask."""


def kinds_of_text(model: nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the kinds of tokens of text, (B, T) as `ids`, for a model that needs them; empty for other models."""
    if getattr(getattr(base_of(model), "config", None), "model_type", None) not in WANT_KINDS:
        return {}
    return {NAMES_OF_KINDS[0]: torch.zeros_like(ids)}


class Sight:
    """Makes the inputs of one model for images.

    Args:
        model: the model, which may be on the meta device.
    """

    def __init__(self, model: nn.Module) -> None:
        base: Any = base_of(model)
        self._takes = set(inspect.signature(base.forward).parameters)
        inner = getattr(base, "model", base)
        # Of the family of Qwen-VL: positions on three axes, which only its own function knows.
        self._rope = getattr(inner, "get_rope_index", None)
        config = getattr(base, "config", None)
        self._hides_documents = getattr(config, "model_type", None) in HIDE_DOCUMENTS
        self._base = base

    def on_host(self, batch: Batch) -> dict[str, Any]:
        """Adds positions of three axes, if the model wants them: computed on the host, document by document."""
        if self._rope is None or COUNTS not in batch:
            return {}
        grids = batch.get("picture/image_grid_thw")
        positions = torch.empty(4, *batch["input_ids"].shape, dtype=torch.long)
        number, seen = 0, 0
        for i, ids in enumerate(batch["input_ids"]):
            starts = (batch["position_ids"][i] == 0).nonzero().flatten().tolist()
            for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
                count = int(batch[COUNTS][number])
                kinds = batch[KINDS_OF_TOKENS][i, start:end]
                mine = None if grids is None or count == 0 else grids[seen : seen + count]
                positions[0, i, start:end] = torch.arange(end - start)
                positions[1:, i, start:end] = self._axes(ids[start:end], kinds, mine)
                number, seen = number + 1, seen + count
        return {AXES: positions}

    def _axes(self, ids: torch.Tensor, kinds: torch.Tensor, grids: torch.Tensor | None) -> torch.Tensor:
        """Returns positions of one document, (3, T); for text, all three count its tokens."""
        if grids is None:
            return torch.arange(len(ids)).expand(3, -1)
        found, _ = self._rope(ids[None], mm_token_type_ids=kinds[None].int(), image_grid_thw=grids)  # type: ignore[misc]
        return found[:, 0]  # type: ignore[no-any-return]

    def positions(self, positions: torch.Tensor) -> torch.Tensor:
        """Returns positions of text, (B, T), as the model takes them: (4, B, T) if it needs that for packed rows."""
        return positions.expand(4, -1, -1) if self._hides_documents else positions

    def inputs(self, batch: Batch, in_one_row: bool) -> dict[str, Any]:
        """Returns the inputs of the model's forward besides `input_ids`, as far as it takes them.

        Args:
            in_one_row: whether the rows of the batch are given as one.
        """
        if COUNTS not in batch:
            ids = batch["input_ids"]
            return kinds_of_text(self._base, ids.view(1, -1) if in_one_row else ids)
        kinds = batch[KINDS_OF_TOKENS]
        found = self.shown(batch, kinds.view(1, -1) if in_one_row else kinds)
        if AXES in batch:
            found["position_ids"] = batch[AXES].view(4, 1, -1) if in_one_row else batch[AXES]
        return found

    def shown(self, batch: Batch, kinds: torch.Tensor) -> dict[str, Any]:
        """Returns the processor's tensors in a batch and the kinds of its tokens, as far as the model takes them."""
        found: dict[str, Any] = {name: value for name, value in images_in(batch).items() if name in self._takes}
        return found | {name: kinds for name in NAMES_OF_KINDS if name in self._takes}
