"""Cross-entropy of a text's class or labels, and the squared error of its number."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from toolkit.data.samples.samples import IGNORED, Batch
from toolkit.errors import BadInputError
from toolkit.model.adapters.adapters import base_of
from toolkit.model.structure.fake_tensors import has_values
from toolkit.objectives.causal_lm import rows_of
from toolkit.objectives.losses.scores import any_places, at_places, places_of, scores_of_tokens
from toolkit.objectives.objective import Ingredients, Objective
from toolkit.recipe.objectives.objective_section import ObjectiveSection

SEVERAL_LABELS = "multi_label_classification"
"""transformers' `problem_type` of a model that says of each label whether it holds."""

CLASSES_SHOWN = 20
"""The most classes for which an evaluation's record has the whole confusion matrix."""


class SequenceClassification(Objective):
    """Cross-entropy of a text's class, (sum over rows of w[y] * CE) / rows.

    Args:
        class_weights: w, one for each class. Each is 1 if this is None.
    """

    unit = "rows"

    def __init__(self, model: nn.Module, num_classes: int, class_weights: list[float] | None = None) -> None:
        accepted = inspect.signature(base_of(model).forward).parameters
        self._inputs = [name for name in ("input_ids", "attention_mask", "token_type_ids") if name in accepted]
        # Jamba's classifier makes a cache that it cannot use.
        self._settings = {"use_cache": False} if "use_cache" in accepted else {}
        self._pad_id = base_of(model).config.get_text_config().pad_token_id
        self.num_classes = num_classes
        self._weights = None if class_weights is None else torch.tensor(class_weights)

    @classmethod
    def build(cls, of: Ingredients) -> Objective:
        several = base_of(of.model).config.problem_type == SEVERAL_LABELS
        if not several and len(of.label_counts) != 1:
            return cls(of.model, len(of.label_counts), class_weights(of.section, of.label_counts))
        if of.section.class_weights is not None:
            raise BadInputError("objective.class_weights has no effect on numbers and on several labels; remove it")
        return (SeveralLabels if several else Number)(of.model, len(of.label_counts))

    def count_targets(self, batch: Batch) -> int:
        return int((batch["labels"] != IGNORED).sum())

    def on_host(self, batch: Batch) -> dict[str, Any]:
        """Adds, if ranks share rows, where the last token of each row is, as transformers' classifiers find it."""
        if "whole_positions" not in batch:
            return batch
        known = {name: value for name, value in batch.items() if name != "whole_ids"}
        return {**known, **self._last_tokens(batch), "shared": False}

    def _last_tokens(self, batch: Batch) -> Batch:
        ids = batch["whole_ids"]
        if not has_values(ids):
            return any_places(len(ids), batch)
        lasts = ((ids != self._pad_id) * torch.arange(ids.shape[1])).argmax(dim=1)
        return places_of(torch.arange(len(ids)), lasts, batch)

    def logits(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns logits (B, C) of C classes."""
        if "whole_positions" in batch:
            if "ends" not in batch:
                batch = self.on_host(batch)
            return at_places(scores_of_tokens(model, lambda: self._logits(model, batch)), batch)
        return self._logits(model, batch)

    def _logits(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        names = self._inputs
        if "whole_positions" in batch:  # no token of a decoder sees the padding after it
            names = [*(name for name in names if name != "attention_mask"), "position_ids"]
        with rows_of(batch):
            given = {name: batch[name] for name in names if name in batch}
            return model(**given, **self._settings).logits  # type: ignore[no-any-return]

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return self._loss_sum(self.logits(model, batch), batch["labels"])

    def training_sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the summed loss, 0-dim, and an empty tensor (0,)."""
        loss = self.loss_sum(model, batch)
        return loss, loss.new_empty(0)

    def _loss_sum(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        weights = None if self._weights is None else self._weights.to(logits.device, non_blocking=True)
        return F.cross_entropy(logits.float(), labels, weight=weights, ignore_index=IGNORED, reduction="sum")

    def uniform_guess(self, model: nn.Module, class_weights: object) -> tuple[int, str] | None:
        # Weights that the user sets scale the loss; balanced ones are 1 in the mean over the rows.
        return (self.num_classes, "classes") if class_weights in (None, "balanced") else None

    def evaluation_sums(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns the loss and then the confusion matrix, true class first, (1 + C^2,), float64."""
        logits, labels = self.logits(model, batch), batch["labels"]
        # Indexing by a mask and `bincount` would both make the host wait for the device; `index_add_` does not.
        counted = (labels != IGNORED).double()
        pairs = labels.clamp_min(0) * self.num_classes + logits.argmax(dim=-1)
        confusion = counted.new_zeros(self.num_classes**2).index_add_(0, pairs, counted)
        return torch.cat([self._loss_sum(logits, labels).double().view(1), confusion])

    def evaluation_record(self, sums: list[float]) -> dict[str, Any]:
        """Returns the loss, accuracy, F1 averaged over the classes that occur or are predicted, and `confusion`."""
        confusion = torch.tensor(sums[1:], dtype=torch.float64).view(self.num_classes, -1)
        rows, hits = confusion.sum().item(), confusion.diagonal()
        # F1 = 2 TP / (2 TP + FP + FN), and a class's row and column together are 2 TP + FP + FN.
        support = confusion.sum(dim=0) + confusion.sum(dim=1)
        f1 = (2 * hits / support.clamp_min(1.0))[support > 0]
        return {
            "loss": sums[0] / max(1.0, rows),
            "samples": int(rows),
            "accuracy": hits.sum().item() / max(1.0, rows),
            "f1_macro": f1.mean().item() if len(f1) else 0.0,
            **({"confusion": confusion.long().tolist()} if self.num_classes <= CLASSES_SHOWN else {}),
        }

    def judged(self, logits: torch.Tensor, batch: Batch, names: Sequence[str]) -> list[dict[str, Any]]:
        chances, said = logits.float().softmax(dim=-1).max(dim=-1)
        found = zip(batch["labels"].tolist(), said.tolist(), chances.tolist(), strict=True)
        return [{"label": names[true], "predicted": names[one], "score": chance} for true, one, chance in found]

    def parts(self, labels: Any) -> set[tuple[Any, ...]]:
        return {(labels,)}


class Number(SequenceClassification):
    """The squared error of a text's number, as transformers' problem_type `regression`."""

    def _loss_sum(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (logits[:, 0].float() - labels).square().masked_fill(labels == IGNORED, 0.0).sum()

    def uniform_guess(self, model: nn.Module, class_weights: object) -> tuple[int, str] | None:
        return None

    def evaluation_sums(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns sums (8,), float64: loss, rows, errors, and of numbers said x and right y: x, y, x^2, y^2, x y."""
        logits, y = self.logits(model, batch), batch["labels"].double()
        x = logits[:, 0].double()
        moments = torch.stack([torch.ones_like(y), (x - y).abs(), x, y, x * x, y * y, x * y])
        counted = (y != IGNORED).double()
        return torch.cat([self._loss_sum(logits, batch["labels"]).double().view(1), (moments * counted).sum(dim=1)])

    def evaluation_record(self, sums: list[float]) -> dict[str, Any]:
        """Returns the loss, the mean absolute error, and Pearson's correlation, which is 0 for equal numbers."""
        loss, _, error, *moments = (value / max(1.0, sums[1]) for value in sums)
        x, y, xx, yy, xy = moments
        spread = (max(0.0, xx - x * x) * max(0.0, yy - y * y)) ** 0.5
        pearson = (xy - x * y) / spread if spread else 0.0
        return {"loss": loss, "samples": int(sums[1]), "mean_absolute_error": error, "pearson": pearson}

    def judged(self, logits: torch.Tensor, batch: Batch, names: Sequence[str]) -> list[dict[str, Any]]:
        found = zip(batch["labels"].tolist(), logits[:, 0].tolist(), strict=True)
        return [{"label": true, "predicted": said} for true, said in found]

    def parts(self, labels: Any) -> set[tuple[Any, ...]]:
        return set()


class SeveralLabels(SequenceClassification):
    """The mean binary cross-entropy of a text's labels, as transformers' problem_type `multi_label_classification`."""

    def count_targets(self, batch: Batch) -> int:
        return int((batch["labels"].view(len(batch["labels"]), -1)[:, 0] != IGNORED).sum())

    def _loss_sum(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        labels = labels.view(len(labels), -1).expand_as(logits).float()  # a plan knows the number of rows alone
        losses = F.binary_cross_entropy_with_logits(logits.float(), labels, reduction="none").mean(dim=1)
        return losses.masked_fill(labels[:, 0] == IGNORED, 0.0).sum()

    def uniform_guess(self, model: nn.Module, class_weights: object) -> tuple[int, str] | None:
        return None

    def evaluation_sums(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns loss, rows, rows with all labels right, and of each label those found and right, and both sides'.

        They are (3 + 2 C,), float64.
        """
        logits, labels = self.logits(model, batch), batch["labels"]
        said, true, counted = logits > 0, labels == 1, labels[:, :1] != IGNORED
        exact = (said == true).all(dim=1, keepdim=True) & counted
        sides = [counted, exact, said & true & counted, said.int() * counted + true.int()]
        sums = torch.cat([side.double() for side in sides], dim=1).sum(dim=0)
        return torch.cat([self._loss_sum(logits, labels).double().view(1), sums])

    def evaluation_record(self, sums: list[float]) -> dict[str, Any]:
        """Returns the loss, the accuracy of whole rows, and F1 averaged over the labels that occur or are predicted."""
        rows, hits, support = max(1.0, sums[1]), *torch.tensor(sums[3:], dtype=torch.float64).view(2, -1)
        f1 = (2 * hits / support.clamp_min(1.0))[support > 0]
        shares = {"accuracy": sums[2] / rows, "f1_macro": f1.mean().item() if len(f1) else 0.0}
        return {"loss": sums[0] / rows, "samples": int(sums[1]), **shares}

    def judged(self, logits: torch.Tensor, batch: Batch, names: Sequence[str]) -> list[dict[str, Any]]:
        found = []
        for true, chances in zip(batch["labels"].tolist(), logits.float().sigmoid().tolist(), strict=True):
            sides = {"label": true, "predicted": chances}
            held = {
                side: [name for name, of in zip(names, each, strict=True) if of > 0.5] for side, each in sides.items()
            }
            found.append({**held, "scores": dict(zip(names, chances, strict=True))})
        return found

    def parts(self, labels: Any) -> set[tuple[Any, ...]]:
        return {(name,) for name in labels}


def class_weights(section: ObjectiveSection, counts: dict[str, int]) -> list[float] | None:
    """Returns the weight of each class, or None if every class weighs 1.

    Raises:
        BadInputError: if the number of weights is not the number of classes.
    """
    weights = section.class_weights
    if weights is None:
        return None
    # rows / (classes * rows of the class), as scikit-learn's class_weight="balanced".
    if weights == "balanced":
        return [sum(counts.values()) / (len(counts) * max(1, count)) for count in counts.values()]
    if len(weights) != len(counts):
        raise BadInputError(
            f"objective.class_weights: {len(weights)} weights for {len(counts)} classes ({', '.join(counts)}); "
            "give one for each, in this order"
        )
    return [float(weight) for weight in weights]
