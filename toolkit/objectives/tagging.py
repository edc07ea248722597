"""Cross-entropy of words' tags, and the F1 of the entities that they make up."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from toolkit.data.samples.samples import IGNORED, Batch
from toolkit.objectives.classification import SequenceClassification, class_weights
from toolkit.objectives.objective import Ingredients, Objective
from toolkit.sharding.parallel.sequence_parallel import whole_rows

Entity = tuple[int, int, str]
"""First word, the word after the last, and kind."""


class TokenClassification(SequenceClassification):
    """Cross-entropy of words' tags, (sum over words of w[y] * CE) / words, taken at the first token of each word.

    If the tags are in IOB2 or IOBES (`B-PER`), evaluation finds precision, recall and F1 of whole entities over all
    kinds together, as seqeval does by default.
    """

    unit = "targets"

    def __init__(self, model: nn.Module, names: Sequence[str], class_weights: list[float] | None = None) -> None:
        super().__init__(model, len(names), class_weights)
        self._names = list(names)
        self._has_entities = all(re.match(r"O$|[BIES]-.", name) for name in names)

    @classmethod
    def build(cls, of: Ingredients) -> Objective:
        return cls(of.model, list(of.label_counts), class_weights(of.section, of.label_counts))

    def logits(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns logits (B, T, C) of C tags."""
        return self._logits(model, batch)

    def _loss_sum(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super()._loss_sum(logits.flatten(0, 1), labels.flatten())

    def evaluation_sums(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns sums (6,), float64.

        These are the loss, the words, the words with the right tag, and the entities that are predicted, true and both.
        """
        logits, labels = self.logits(model, batch), batch["labels"]
        loss = self._loss_sum(logits, labels).double().cpu()
        tags = logits.argmax(dim=-1)
        if "whole_positions" in batch:  # an entity may lie on several ranks; the first counts it
            parts = batch["whole_positions"].shape[1] // tags.shape[1]
            tags, labels = whole_rows(tags, parts), whole_rows(labels, parts)
            labels = labels.masked_fill(batch["part"] != 0, IGNORED)
        counts = torch.zeros(5, dtype=torch.float64)
        for chosen, right in zip(tags.tolist(), labels.tolist(), strict=True):
            words = [(self._names[a], self._names[b]) for a, b in zip(chosen, right, strict=True) if b != IGNORED]
            found, true = (entities([pair[side] for pair in words]) if self._has_entities else set() for side in (0, 1))
            hits = sum(a == b for a, b in words)
            counts += torch.tensor([len(words), hits, len(found), len(true), len(found & true)])
        return torch.cat([loss.view(1), counts]).to(logits.device)

    def evaluation_record(self, sums: list[float]) -> dict[str, Any]:
        """Returns the loss, the accuracy of words, and precision, recall and F1 of entities."""
        loss, words, hits, found, true, right = sums
        record = {"loss": loss / max(1.0, words), "samples": int(words), "accuracy": hits / max(1.0, words)}
        if not self._has_entities:
            return record
        precision, recall = right / max(1.0, found), right / max(1.0, true)
        return {**record, "precision": precision, "recall": recall, "f1": 2 * right / max(1.0, found + true)}

    def judged(self, logits: torch.Tensor, batch: Batch, names: Sequence[str]) -> list[dict[str, Any]]:
        """Returns the tags of each row's words; `score` is the least sure one's."""
        chances, said = logits.float().softmax(dim=-1).max(dim=-1)
        found = []
        for right, chosen, sure in zip(batch["labels"], said, chances, strict=True):
            words = right != IGNORED
            both = ([names[number] for number in tags[words].tolist()] for tags in (right, chosen))
            found.append({**dict(zip(("label", "predicted"), both, strict=True)), "score": sure[words].min().item()})
        return found

    def parts(self, labels: Any) -> set[tuple[Any, ...]]:
        return set(entities(labels)) if self._has_entities else set(enumerate(labels))


def entities(tags: Sequence[str]) -> set[Entity]:
    """Returns the entities of a sentence as CoNLL's evaluation and seqeval read them: one may begin with `I-`."""
    found: set[Entity] = set()
    begin, last, kind_before = -1, "O", ""
    for word, tag in enumerate([*tags, "O"]):
        prefix, _, kind = tag.partition("-")
        if begin >= 0 and (prefix in "OBS" or last in "ES" or kind != kind_before):
            found.add((begin, word, kind_before))
            begin = -1
        if prefix != "O" and begin < 0:
            begin = word
        last, kind_before = prefix, kind
    return found
