"""What is minimised: a sum of losses over target tokens, and how many of them there are.

A sum and a count, not a mean: the trainer divides by the count over all ranks and micro-batches of an
optimizer step, so that the loss does not depend on how the batch is split (transformers#34191).
"""

from __future__ import annotations

import inspect
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from toolkit.data.loader import Batch
from toolkit.data.text import IGNORED
from toolkit.errors import BadInputError


class Objective(Protocol):
    """One kind of training."""

    def count_targets(self, batch: Batch) -> int:
        """Terms of the loss's sum in a micro-batch."""

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The summed loss of a micro-batch, float32, with a graph to the parameters."""


class CausalLM:
    """Next-token cross-entropy. `labels` are aligned with `input_ids`, as transformers has them."""

    def __init__(self, model: nn.Module) -> None:
        if "position_ids" not in inspect.signature(model.forward).parameters:
            raise BadInputError(
                f"objective.kind causal_lm: {type(model).__name__} takes no position_ids, so documents that share a "
                "block would see each other; this model cannot be trained on blocks of text"
            )

    def count_targets(self, batch: Batch) -> int:
        return int((batch["labels"][:, 1:] != IGNORED).sum())

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        # No attention mask and no cache: only then do restarting positions keep documents apart.
        logits = model(
            input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
        ).logits  # (B, T, V)
        targets = batch["labels"][:, 1:]  # (B, T - 1)
        return F.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
