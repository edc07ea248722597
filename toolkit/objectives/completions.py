"""The base of objectives that learn from log-probabilities of completions: preferences, KTO, GRPO."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from toolkit.data.samples.documents_apart import documents_apart
from toolkit.data.samples.samples import IGNORED, Batch
from toolkit.data.samples.sequence_parts import counts_here
from toolkit.model.adapters.adapters import adapters_off, has_adapter
from toolkit.model.structure.fake_tensors import has_values
from toolkit.model.structure.without_dropout import without_dropout
from toolkit.objectives.causal_lm import CausalLM
from toolkit.objectives.objective import OF_BASE, Objective, RunsWindows


class OfCompletions(Objective):
    """An objective on a causal model whose `segments` (B, T) are completions after their prompts.

    Args:
        apart: whether each completion has a row of its own; otherwise they share rows.
        continued: whether the model's adapters were trained before, so that the model without them is not a reference.
    """

    needs_documents = True

    def __init__(self, model: nn.Module, apart: bool, continued: bool) -> None:
        self.apart = apart
        self._causal = CausalLM(model, packed=not apart)
        self._adapted = model if has_adapter(model) and not continued else None

    def on_host(self, batch: Batch) -> dict[str, Any]:
        """Adds what `CausalLM.on_host` adds."""
        return self._causal.on_host(documents_apart(batch) if self.apart and "segments" in batch else batch)

    def logits(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns logits (B, T, V)."""
        return self._causal.logits(model, batch)

    def check_head_loss(self, model: nn.Module, device: torch.device, in_16_bits: bool) -> str:
        """Checks as `CausalLM.check_head_loss` does."""
        return self._causal.check_head_loss(model, device, in_16_bits)

    @contextmanager
    def _as_base(self, model: nn.Module) -> Iterator[None]:
        """Runs the block with the adapters off, without dropout and without gradients."""
        assert self._adapted is not None, "the reference is the model without its adapters"
        with torch.no_grad(), without_dropout(model), adapters_off(self._adapted):
            yield

    def _with_base(
        self,
        model: nn.Module,
        batches: list[Batch],
        run: RunsWindows,
        log_probabilities: Callable[[nn.Module, Batch], torch.Tensor],
    ) -> list[Batch]:
        """Returns the batches with the log-probabilities of the base, which the loss needs."""
        # For all micro-batches at once: adapters are switched off for the process, not for a thread.
        with self._as_base(model):
            found = run([functools.partial(log_probabilities, model, batch) for batch in batches])
        return [{**batch, OF_BASE: of_base} for batch, of_base in zip(batches, found, strict=True)]


def learned(batch: Batch, count: int, completions: int = 1) -> torch.Tensor:
    """Returns which of `count` rows or pairs have targets and count on this rank, (count,), bool.

    Those that ranks share count on the rank with the first part, and what only fills up a batch on none.

    Args:
        completions: of a row or a pair p, which are segments p * completions and the next ones.
    """
    segments = batch["segments"]
    if not has_values(segments):  # a trace does not know the labels
        return torch.ones(count, dtype=torch.bool, device=segments.device)
    found = torch.zeros(count, dtype=torch.bool, device=segments.device)
    if counts_here(batch):
        found[segments[batch["labels"] != IGNORED] // completions] = True
    return found
