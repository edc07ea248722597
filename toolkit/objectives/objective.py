"""What is minimised: a sum of losses over targets, and how many of them there are.

A sum and a count, not a mean: the trainer divides by the count over all ranks and micro-batches of an
optimizer step, so that the loss does not depend on how the batch is split (transformers#34191).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from toolkit.data.samples import Batch

OF_BASE = "of_base"
"""Where a batch has the log-probabilities of the model without its adapters, of each row or pair, (R, 2)."""

RunsWindows = Callable[[Sequence[Callable[[], Any]]], list[Any]]
"""Runs forwards of several micro-batches without gradients; gives what they give."""


class Objective(Protocol):
    """One kind of training.

    Attributes:
        unit: what it counts: `targets` (tokens), `rows` or `pairs`.
        figures: what a training record has beside the loss, means over these.
    """

    @property
    def unit(self) -> str: ...

    @property
    def figures(self) -> tuple[str, ...]: ...

    def count_targets(self, batch: Batch) -> int:
        """Terms of the loss's sum in a micro-batch."""

    def on_host(self, batch: Batch) -> dict[str, Any]:
        """The micro-batch, still on the host, with what the loss would otherwise have to ask the device for."""

    def looked_at(self, model: nn.Module, batches: list[Batch], run: RunsWindows) -> list[Batch]:
        """The micro-batches of a step that runs by block, with what their losses have to ask the model before that."""

    def logits(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """What the model makes of a micro-batch."""

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The summed loss of a micro-batch, float32, with a graph to the parameters."""

    def training_sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """`loss_sum`, and the sums of `figures` over a micro-batch, (F,) without a graph."""

    def evaluation_sums(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Numbers to add up over a held-out data set, float64, equally many for each batch; the loss first."""

    def evaluation_record(self, sums: list[float]) -> dict[str, Any]:
        """`loss` and the objective's own figures, from the numbers added up over all batches and ranks."""


@runtime_checkable
class ByDocument(Protocol):
    """An objective whose loss needs a number of each document, whose tokens several ranks may hold."""

    def by_document(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """These numbers, (D, C), equal on all ranks that share the rows of a micro-batch."""


@runtime_checkable
class OverWindow(Protocol):
    """An objective whose losses share a number that comes from all micro-batches they are summed over.

    These are all of an optimizer step, or of an evaluation, on all ranks. It finds the sums of them in the batch as
    `window`; where that is missing, the micro-batch stands for the whole.
    """

    def window_sums(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Numbers to add up over all micro-batches, without a graph."""
