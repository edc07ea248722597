"""Cross-entropy of a text's class."""

from __future__ import annotations

import inspect
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
        return cls(of.model, len(of.label_counts), class_weights(of.section, of.label_counts))

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
