"""What is minimised: a sum of losses over targets, and how many of them there are.

A sum and a count, not a mean: the trainer divides by the count over all ranks and micro-batches of an
optimizer step, so that the loss does not depend on how the batch is split (transformers#34191).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any, Protocol

import peft
import torch
import torch.nn.functional as F
from torch import nn

from toolkit.data.samples import IGNORED, Batch
from toolkit.errors import BadInputError
from toolkit.model.adapters import adapters_off, base_of
from toolkit.model.load import attention_of
from toolkit.objectives.head_loss import HeadLoss, find_head_loss
from toolkit.objectives.preference_losses import (
    LOSSES,
    Loss,
    Pairs,
    predicted,
    sequence_log_probabilities,
    summed_by_document,
)
from toolkit.recipe.schema import ObjectiveSection


class Objective(Protocol):
    """One kind of training. `unit`: what it counts."""

    @property
    def unit(self) -> str: ...

    def count_targets(self, batch: Batch) -> int:
        """Terms of the loss's sum in a micro-batch."""

    def logits(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """What the model makes of a micro-batch."""

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The summed loss of a micro-batch, float32, with a graph to the parameters."""

    def evaluation_sums(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Numbers to add up over a held-out data set, float64, equally many for each batch; the loss first."""

    def evaluation_record(self, sums: list[float]) -> dict[str, Any]:
        """`loss` and the objective's own figures, from the numbers added up over all batches and ranks."""


class CausalLM:
    """Next-token cross-entropy. `labels` are aligned with `input_ids`, as transformers has them.

    Its losses come from the head's inputs, without whole logits, where the model allows for that.

    Args:
        packed: whether documents share samples.

    Attributes:
        head_loss: what the losses come from; where that is whole logits, the reason.
    """

    unit = "tokens"

    def __init__(self, model: nn.Module, packed: bool = True) -> None:
        self._takes_positions = "position_ids" in inspect.signature(base_of(model).forward).parameters
        if packed and not self._takes_positions:
            raise BadInputError(
                f"data.packing: {type(model).__name__} takes no position_ids, so rows that share a sample would see "
                "each other; set data.packing=false"
            )
        # Its kernels tell documents apart in a single row only; in several they would leak.
        self._in_one_row = packed and attention_of(model).startswith("flash")
        self.head_loss = find_head_loss(model)

    def count_targets(self, batch: Batch) -> int:
        return int((batch["labels"][:, 1:] != IGNORED).sum())

    def logits(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """(B, T, V)."""
        logits = model(**self._inputs(batch)).logits
        return logits.view(*batch["input_ids"].shape, -1)  # type: ignore[no-any-return]

    def _inputs(self, batch: Batch) -> dict[str, Any]:
        # No attention mask and no cache: only then do restarting positions keep documents apart.
        names = ("input_ids", "position_ids") if self._takes_positions else ("input_ids",)
        return {name: batch[name].view(1, -1) if self._in_one_row else batch[name] for name in names} | {
            "use_cache": False
        }

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        if isinstance(self.head_loss, HeadLoss):
            targets = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
            return self.head_loss.summed(model, self._inputs(batch), targets.flatten())
        return self._sum_of_logits(model, batch)

    def _sum_of_logits(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        logits = self.logits(model, batch)
        targets = batch["labels"][:, 1:]  # (B, T - 1)
        return F.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )

    def log_probabilities(self, model: nn.Module, batch: Batch, num_segments: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each document of `batch["segments"]`; see `sequence_log_probabilities`."""
        if not isinstance(self.head_loss, HeadLoss):
            logits = self.logits(model, batch)
            return sequence_log_probabilities(logits, batch["labels"], batch["segments"], num_segments)
        targets, owners = predicted(batch["labels"], batch["segments"])
        losses = self.head_loss.by_token(model, self._inputs(batch), targets)
        return summed_by_document(-losses, owners, num_segments)

    @torch.no_grad()
    def check_head_loss(self, model: nn.Module, device: torch.device, in_16_bits: bool) -> str:
        """Tries the loss on a few tokens, and goes by whole logits where these give another. Every rank calls this.

        Returns:
            How the loss is made, to be told.
        """
        if isinstance(self.head_loss, HeadLoss):
            was_training = model.training
            model.eval()
            batch = _few_tokens(self.head_loss.vocabulary, device)
            found, whole = self.loss_sum(model, batch).item(), self._sum_of_logits(model, batch).item()
            model.train(was_training)
            if math.isfinite(whole) and not abs(found - whole) <= HEAD_LOSS_TOLERANCE[in_16_bits] * abs(whole):
                self.head_loss = f"on a few tokens the head's inputs give {found:.6g}, and whole logits {whole:.6g}"
        if isinstance(self.head_loss, str):
            return f"from whole logits: {self.head_loss}"
        return f"from the head's inputs, logits of {self.head_loss.chunk_tokens:,} tokens at a time"

    def evaluation_sums(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        loss = self.loss_sum(model, batch).double()
        return torch.stack([loss, loss.new_tensor(self.count_targets(batch))])

    def evaluation_record(self, sums: list[float]) -> dict[str, Any]:
        loss = sums[0] / max(1.0, sums[1])
        perplexity = math.exp(loss) if loss < 700 else math.inf
        return {"loss": loss, "target_tokens": int(sums[1]), "perplexity": perplexity}


HEAD_LOSS_TOLERANCE = {False: 1e-5, True: 1e-2}
"""By whether compute is in 16 bits: the largest difference from whole logits' loss, as a share of it."""


def _few_tokens(vocabulary: int, device: torch.device) -> Batch:
    ids = torch.arange(1, 17, device=device)[None] % vocabulary
    return {"input_ids": ids, "labels": ids, "position_ids": torch.arange(16, device=device)[None]}


class SequenceClassification:
    """Cross-entropy of a text's class, (sum over rows of w[y] * CE) / rows.

    Args:
        class_weights: w, one for each class; None: 1.
    """

    unit = "rows"

    def __init__(self, model: nn.Module, num_classes: int, class_weights: list[float] | None = None) -> None:
        accepted = inspect.signature(base_of(model).forward).parameters
        self._inputs = [name for name in ("input_ids", "attention_mask", "token_type_ids") if name in accepted]
        self._num_classes = num_classes
        self._weights = None if class_weights is None else torch.tensor(class_weights)

    def count_targets(self, batch: Batch) -> int:
        return int((batch["labels"] != IGNORED).sum())

    def logits(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """(B, number of classes)."""
        return model(**{name: batch[name] for name in self._inputs}).logits  # type: ignore[no-any-return]

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return self._loss_sum(self.logits(model, batch), batch["labels"])

    def _loss_sum(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        weights = None if self._weights is None else self._weights.to(logits.device)
        return F.cross_entropy(logits.float(), labels, weight=weights, ignore_index=IGNORED, reduction="sum")

    def evaluation_sums(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The loss, and how many rows of each class (major) were taken for each class."""
        logits, labels = self.logits(model, batch), batch["labels"]
        counted = labels != IGNORED
        pairs = labels[counted] * self._num_classes + logits.argmax(dim=-1)[counted]
        confusion = torch.bincount(pairs, minlength=self._num_classes**2).double()
        return torch.cat([self._loss_sum(logits, labels).double().view(1), confusion])

    def evaluation_record(self, sums: list[float]) -> dict[str, Any]:
        """Loss, accuracy, and F1 averaged over the classes that occur or are predicted."""
        confusion = torch.tensor(sums[1:], dtype=torch.float64).view(self._num_classes, -1)
        rows, hits = confusion.sum().item(), confusion.diagonal()
        support = confusion.sum(dim=0) + confusion.sum(dim=1)
        f1 = (2 * hits / support.clamp_min(1.0))[support > 0]
        return {
            "loss": sums[0] / max(1.0, rows),
            "samples": int(rows),
            "accuracy": hits.sum().item() / max(1.0, rows),
            "f1_macro": f1.mean().item() if len(f1) else 0.0,
        }


class Preference:
    """Chosen completions over rejected ones; the loss of `toolkit.objectives.preference_losses` summed over the pairs.

    The reference's log-probabilities come with the batch, or are those of the model with its adapters off.
    """

    unit = "pairs"

    def __init__(self, model: nn.Module, loss: Loss, settings: Mapping[str, float | None], packed: bool) -> None:
        self.loss = loss
        self._settings = settings
        self._causal = CausalLM(model, packed)
        self._adapted = model if isinstance(model, peft.PeftModel) else None

    @property
    def needs_references(self) -> bool:
        """Whether the reference's log-probabilities must come with each batch."""
        return self.loss.needs_reference and self._adapted is None

    def count_targets(self, batch: Batch) -> int:
        """Pairs with something to learn."""
        return int(torch.unique(batch["segments"][batch["labels"] != IGNORED] // 2).numel())

    def logits(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """(B, T, V)."""
        return self._causal.logits(model, batch)

    def check_head_loss(self, model: nn.Module, device: torch.device, in_16_bits: bool) -> str:
        """As `CausalLM` does."""
        return self._causal.check_head_loss(model, device, in_16_bits)

    def log_probabilities(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the chosen and the rejected completion of each pair, and their target tokens, each (P, 2)."""
        num_segments = 2 * len(batch["reference"])
        sums, counts = self._causal.log_probabilities(model, batch, num_segments)
        return sums.view(-1, 2), counts.view(-1, 2)

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        losses, _, counted = self._compared(model, batch)
        return losses.masked_fill(~counted, 0.0).sum()

    def _compared(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
        """Losses, figures and which pairs count, each (P,)."""
        reference = self._reference(model, batch)
        sums, counts = self.log_probabilities(model, batch)
        of_reference = () if reference is None else (reference[:, 0], reference[:, 1])
        pairs = Pairs(sums[:, 0], sums[:, 1], counts[:, 0], counts[:, 1], *of_reference)
        losses, figures = self.loss(pairs, self._settings)
        return losses, figures, (counts > 0).all(dim=1)

    def _reference(self, model: nn.Module, batch: Batch) -> torch.Tensor | None:
        """Log-probabilities (P, 2); None where the loss needs none."""
        if not self.loss.needs_reference:
            return None
        if self._adapted is None:
            return batch["reference"]
        was_training = model.training
        with torch.no_grad(), adapters_off(self._adapted):
            sums, _ = self.log_probabilities(model.eval(), batch)
        model.train(was_training)
        return sums

    def evaluation_sums(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        losses, figures, counted = self._compared(model, batch)
        kept = [losses, counted.float(), *(figures[name] for name in FIGURES if name in figures)]
        return torch.stack([values.double().masked_fill(~counted, 0.0).sum() for values in kept])

    def evaluation_record(self, sums: list[float]) -> dict[str, Any]:
        """Means over the pairs: loss, rewards, their margin, how often it is positive, and KL to the reference."""
        pairs = max(1.0, sums[1])
        names = FIGURES if self.loss.needs_reference else FIGURES[:-1]
        figures = {name: value / pairs for name, value in zip(names, sums[2:], strict=True)}
        return {"loss": sums[0] / pairs, "pairs": int(sums[1]), **figures}


FIGURES = ("accuracy", "margin", "chosen_reward", "rejected_reward", "kl")
"""Figures of an evaluation of preferences; the last where there is a reference."""


def build_objective(
    section: ObjectiveSection, model: nn.Module, packed: bool, label_counts: dict[str, int] | None
) -> CausalLM | SequenceClassification | Preference:
    """The recipe's objective.

    Args:
        packed: whether documents share samples.
        label_counts: rows of each class to train on, in the order of the classes; None: no classification.

    Raises:
        BadInputError: a model that cannot be trained so, or class weights of another number than classes.
    """
    if section.kind == "preference":
        given = {key: getattr(section, key) for key in ("beta", "label_smoothing", "gamma", "odds_weight")}
        return Preference(model, LOSSES[section.loss or "dpo"], given, packed)
    if label_counts is None:
        return CausalLM(model, packed)
    return SequenceClassification(model, len(label_counts), _class_weights(section, label_counts))


def _class_weights(section: ObjectiveSection, counts: dict[str, int]) -> list[float] | None:
    weights = section.class_weights
    if weights is None:
        return None
    if weights == "balanced":
        return [sum(counts.values()) / (len(counts) * max(1, count)) for count in counts.values()]
    if len(weights) != len(counts):
        raise BadInputError(
            f"objective.class_weights: {len(weights)} weights for {len(counts)} classes ({', '.join(counts)}); "
            "give one for each, in this order"
        )
    return [float(weight) for weight in weights]
