"""The interface of an objective: a sum of losses over targets, and the number of targets.

It gives a sum and a count, not a mean: the trainer divides by the count over all ranks and micro-batches of an
optimizer step, so that the loss does not depend on how the batch is split (transformers#34191).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from toolkit.data.samples.samples import Batch
from toolkit.errors import BadInputError
from toolkit.recipe.objectives.objective_section import ObjectiveSection

OF_BASE = "of_base"
"""Key of a batch's log-probabilities by the model without its adapters, of each row or pair, (R, 2)."""

RunsWindows = Callable[[Sequence[Callable[[], Any]]], list[Any]]
"""Runs forwards of several micro-batches without gradients, and returns their results."""


@dataclass(frozen=True)
class Ingredients:
    """The arguments from which an objective is built.

    Attributes:
        packed: whether documents share samples.
        label_counts: rows, or words, of each class to train on, in the order of the classes; empty if nothing is
            classified.
        teacher: the frozen model of a distillation.
        apart: whether completions that are compared must not share rows.
        sources: names of the sources whose losses are reported separately.
        continued: whether the adapters were trained before, so that the model without them is not the one before the
            run's first step.
    """

    section: ObjectiveSection
    model: nn.Module
    packed: bool
    label_counts: dict[str, int]
    teacher: nn.Module | None = None
    apart: bool = False
    sources: tuple[str, ...] = ()
    continued: bool = False


class FrozenModel(Protocol):
    """A model that is learned from: the objective of its logits, and what gathers its head meanwhile; see `Teacher`."""

    model: nn.Module
    gathering: Callable[[], AbstractContextManager[None]]

    @property
    def causal(self) -> Objective: ...


class Objective(ABC):
    """One kind of training, on one model. What is known before there is a model is in its `ObjectiveSpec`.

    Attributes:
        unit: what it counts: `targets` (tokens), `rows` or `pairs`.
        figures: names of the metrics besides the loss in a training record, as means over the counted units.
        apart: whether completions that are compared have rows of their own.
        pads: whether rows may be padded; if not, a micro-batch is one row, whose padding is cut off.
        needs_references: whether the reference's log-probabilities must come with each batch.
        needs_documents: whether the loss needs `by_document`, so that ranks that share rows exchange it.
        needs_whole_steps: whether the losses share `window_sums`.
        teacher: the frozen model to learn from.
        failure: why a sum of this step is NaN, where code of the user's failed on this rank, perhaps alone.
    """

    unit: str = "targets"
    apart: bool = False
    pads: bool = True
    needs_documents: bool = False
    needs_whole_steps: bool = False
    teacher: FrozenModel | None = None
    failure: str | None = None

    @classmethod
    @abstractmethod
    def build(cls, of: Ingredients) -> Objective:
        """Builds the objective as a recipe asks for it.

        Raises:
            BadInputError: if the model cannot be trained with this objective.
        """

    @property
    def figures(self) -> tuple[str, ...]:
        return ()

    @property
    def needs_references(self) -> bool:
        return False

    @abstractmethod
    def count_targets(self, batch: Batch) -> int:
        """Returns the number of terms in the loss's sum over a micro-batch."""

    def on_host(self, batch: Batch) -> dict[str, Any]:
        """Adds to a micro-batch on the host what the loss would otherwise have to fetch from the device."""
        return batch

    def looked_at(self, model: nn.Module, batches: list[Batch], run: RunsWindows) -> list[Batch]:
        """Adds to the micro-batches of a step that runs by block what their losses need from the model beforehand."""
        return batches

    @abstractmethod
    def logits(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns the model's logits of a micro-batch: (B, T, V) for tokens, or (B, C) for rows."""

    def predictions(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the logits of a micro-batch's N targets, (N, V) float32, and their labels, (N,) int64.

        Raises:
            BadInputError: if the objective predicts no tokens.
        """
        raise BadInputError("predictions of tokens: this objective.kind has none; only causal_lm has")

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns the summed loss of a micro-batch, 0-dim, float32, with a graph to the parameters."""
        return self.training_sums(model, batch)[0]

    @abstractmethod
    def training_sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns `loss_sum`, 0-dim, and the sums of the F `figures` over a micro-batch, (F,), without a graph."""

    def training_record(self, means: list[float]) -> dict[str, Any]:
        """Returns what a step's record has besides the loss, from the means of `figures` over the step's terms."""
        return dict(zip(self.figures, means, strict=True))

    @abstractmethod
    def evaluation_sums(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns N numbers to add up over a held-out data set, (N,), float64, the loss first; all batches have N."""

    def evaluation_record(self, sums: list[float]) -> dict[str, Any]:
        """Returns `loss` and the objective's own metrics, from `evaluation_sums` summed over batches and ranks.

        As it is here, sums are those of the losses, of what is counted and of `figures`, of which it returns means.
        """
        count = max(1.0, sums[1])
        figures = {name: value / count for name, value in zip(self.figures, sums[2:], strict=True)}
        return {"loss": sums[0] / count, self.unit: int(sums[1]), **figures}

    def judged(self, logits: torch.Tensor, batch: Batch, names: Sequence[str]) -> list[dict[str, Any]]:
        """Returns what the model says of each row, or pair, and what is right, from its logits of a micro-batch.

        Args:
            logits: (B, C), or (B, T, C) with a score for each token.
            names: of the C classes.

        Raises:
            NotImplementedError: if it scores no rows.
        """
        raise NotImplementedError

    def parts(self, labels: Any) -> set[tuple[Any, ...]]:
        """Returns what is counted of the labels of a row in `judged`, each with its class last; rewards have none."""
        return set()

    def window_sums(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns numbers (N,), without a graph, whose sum over an accumulation window all its losses share.

        The window is all micro-batches of an optimizer step, or of an evaluation, on all ranks. The sums come back in
        the batch as `window`; if that is missing, the micro-batch stands for the whole.

        Raises:
            NotImplementedError: if the objective has no `needs_whole_steps`.
        """
        raise NotImplementedError

    def by_document(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns the numbers of each document, (D, C), equal on all ranks that share the rows of a micro-batch.

        Raises:
            NotImplementedError: if the objective has no `needs_documents`.
        """
        raise NotImplementedError

    def log_probabilities(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns log-probabilities of the two completions of each row, (R, 2), and their target tokens, (R, 2).

        Raises:
            NotImplementedError: if the objective compares no completions.
        """
        raise NotImplementedError

    def decoder_inputs(self, labels: torch.Tensor) -> torch.Tensor:
        """Returns the decoder's inputs (B, T): labels (B, T), shifted right after the token that begins a target.

        Raises:
            NotImplementedError: if the model is not an encoder-decoder.
        """
        raise NotImplementedError

    def check_head_loss(self, model: nn.Module, device: torch.device, in_16_bits: bool) -> str | None:
        """Tries the head's loss on a few tokens. Every rank calls this.

        Returns:
            A description of how the loss is computed, or None if there is no choice.
        """
        return None

    def uniform_guess(self, model: nn.Module, class_weights: object) -> tuple[int, str] | None:
        """Returns how many equally likely answers a uniform guess has and what they are, or None without such a guess.

        Args:
            class_weights: as the recipe has them.
        """
        return None
