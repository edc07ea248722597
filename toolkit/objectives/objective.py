"""What is minimised: a sum of losses over targets, and how many of them there are.

A sum and a count, not a mean: the trainer divides by the count over all ranks and micro-batches of an
optimizer step, so that the loss does not depend on how the batch is split (transformers#34191).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from toolkit.data.samples import Batch
from toolkit.objectives.specs.section import ObjectiveSection

if TYPE_CHECKING:
    from toolkit.objectives.teacher import Teacher

OF_BASE = "of_base"
"""Where a batch has the log-probabilities of the model without its adapters, of each row or pair, (R, 2)."""

RunsWindows = Callable[[Sequence[Callable[[], Any]]], list[Any]]
"""Runs forwards of several micro-batches without gradients; gives what they give."""


@dataclass(frozen=True)
class Ingredients:
    """What an objective is made of.

    Attributes:
        packed: whether documents share samples.
        label_counts: rows, or words, of each class to train on, in the order of the classes; empty: no classification.
        teacher: of a distillation.
        apart: whether completions that are compared must not share rows.
        sources: names of the sources whose losses are told apart.
    """

    section: ObjectiveSection
    model: nn.Module
    packed: bool
    label_counts: dict[str, int]
    teacher: nn.Module | None = None
    apart: bool = False
    sources: tuple[str, ...] = ()


class Objective(ABC):
    """One kind of training, on one model. What it says before there is a model is in its `ObjectiveSpec`.

    Attributes:
        unit: what it counts: `targets` (tokens), `rows` or `pairs`.
        figures: what a training record has beside the loss, means over these.
        apart: whether completions that are compared have rows of their own.
        needs_references: whether the reference's log-probabilities must come with each batch.
        needs_documents: whether the loss needs `by_document`, so that ranks which share rows exchange it.
        needs_whole_steps: whether the losses share `window_sums`.
        teacher: the frozen model to learn from.
    """

    unit: str = "targets"
    apart: bool = False
    needs_documents: bool = False
    needs_whole_steps: bool = False
    teacher: Teacher | None = None

    @classmethod
    @abstractmethod
    def build(cls, of: Ingredients) -> Objective:
        """The objective as a recipe asks for it. Raises BadInputError for a model that cannot be trained so."""

    @property
    def figures(self) -> tuple[str, ...]:
        return ()

    @property
    def needs_references(self) -> bool:
        return False

    @abstractmethod
    def count_targets(self, batch: Batch) -> int:
        """Terms of the loss's sum in a micro-batch."""

    def on_host(self, batch: Batch) -> dict[str, Any]:
        """The micro-batch, still on the host, with what the loss would otherwise have to ask the device for."""
        return batch

    def looked_at(self, model: nn.Module, batches: list[Batch], run: RunsWindows) -> list[Batch]:
        """The micro-batches of a step that runs by block, with what their losses have to ask the model before that."""
        return batches

    @abstractmethod
    def logits(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """What the model makes of a micro-batch: (B, T, V) of tokens, or (B, C) of rows."""

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The summed loss of a micro-batch, float32, with a graph to the parameters."""
        return self.training_sums(model, batch)[0]

    @abstractmethod
    def training_sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """`loss_sum`, and the sums of `figures` over a micro-batch, (F,) without a graph."""

    def training_record(self, means: list[float]) -> dict[str, Any]:
        """What a record of a step has beside the loss, from the sums of `figures` over the step's terms."""
        return dict(zip(self.figures, means, strict=True))

    @abstractmethod
    def evaluation_sums(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Numbers to add up over a held-out data set, float64, equally many for each batch; the loss first."""

    @abstractmethod
    def evaluation_record(self, sums: list[float]) -> dict[str, Any]:
        """`loss` and the objective's own figures, from the numbers added up over all batches and ranks."""

    def window_sums(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Numbers that the losses share, to add up over all micro-batches that they are summed over, without a graph.

        These are all of an optimizer step, or of an evaluation, on all ranks. The sums come back in the batch as
        `window`; if that is missing, the micro-batch stands for the whole.
        """
        raise NotImplementedError

    def by_document(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The numbers of each document, (D, C), equal on all ranks that share the rows of a micro-batch."""
        raise NotImplementedError

    def log_probabilities(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the two completions of each row, and their target tokens, each (R, 2)."""
        raise NotImplementedError

    def decoder_inputs(self, labels: torch.Tensor) -> torch.Tensor:
        """(B, T): the labels of an encoder-decoder, shifted to the right behind the token that begins a target."""
        raise NotImplementedError

    def check_head_loss(self, model: nn.Module, device: torch.device, in_16_bits: bool) -> str | None:
        """Tries the head's loss on a few tokens. Every rank calls this.

        Returns:
            What computes the loss, and why; None if there is no choice.
        """
        return None

    def uniform_guess(self, model: nn.Module, class_weights: object) -> tuple[int, str] | None:
        """The number of answers that a uniform guess takes for equally likely, and what they are; None: no such guess.

        Args:
            class_weights: as the recipe has them.
        """
        return None
