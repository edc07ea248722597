"""Cuts a rank's part of rows that a group of ranks shares (sequence parallel)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from toolkit.data.samples.samples import IGNORED, Batch

KL_PREFIX = "kl_"
"""Key prefix of the mismatched (KL) completions in a KTO batch: prompts with completions of other rows."""


@dataclass(frozen=True)
class Part:
    """One of `count` equal parts of every row, from `index` 0."""

    index: int = 0
    count: int = 1

    def of(self, batch: Batch) -> Batch:
        """Returns this part of rows (B, T), padded to a multiple of n = `count`; the batch itself if n is 1.

        A token's target may be in the next part, and the tokens that it sees in any other. So there are `targets`
        (B, T / n), shifted before the cut, and `whole_positions` (B, T). Tensors of documents or rows stay whole, with
        the number of this `part`: preferences keep their `labels` and `segments` and get `owners` (B, T / n);
        classification and rewards get `whole_ids` (B, T), and the labels of rows are only in the first part.
        """
        if self.count == 1:
            return batch
        others = {name.removeprefix(KL_PREFIX): value for name, value in batch.items() if name.startswith(KL_PREFIX)}
        cut = self._part_of_rows({name: value for name, value in batch.items() if not name.startswith(KL_PREFIX)})
        if others:
            cut |= {f"{KL_PREFIX}{name}": value for name, value in self._part_of_rows(others).items()}
        return {name: tensor.contiguous() for name, tensor in cut.items()}

    def _part_of_rows(self, batch: Batch) -> Batch:
        ids = batch["input_ids"]
        positions = batch["position_ids"] if "position_ids" in batch else torch.arange(ids.shape[1]).expand_as(ids)
        positions = _padded_to_multiple(positions, self.count, None)
        length = positions.shape[1] // self.count
        mine = slice(self.index * length, (self.index + 1) * length)
        # With the row's first token: token 0 is often the one whose embedding transformers keeps at zero. Alone in its
        # document it stays zero through all layers, and Gemma 3n's gradient there, of a root, is not a number.
        padded = torch.cat([ids, ids[:, :1].expand(-1, -ids.shape[1] % self.count)], dim=1)
        cut = {
            "input_ids": padded[:, mine],
            "position_ids": positions[:, mine],
            "whole_positions": positions,
            "lengths": (batch["lengths"] - mine.start).clamp(0, length),
        }
        if "attention_mask" in batch:
            return cut | self._labels_of_part(batch, mine)
        if "sources" in batch:
            cut["sources"] = _padded_to_multiple(batch["sources"], self.count, -1)[:, mine]
        targets, owners = predictions_of(batch)
        cut["targets"] = _padded_to_multiple(targets, self.count, IGNORED)[:, mine]
        if owners is None:
            return cut
        cut["owners"] = _padded_to_multiple(owners, self.count, -1)[:, mine]
        cut["part"] = torch.tensor(self.index)
        if "margin" in batch:
            cut["whole_ids"] = ids
        return {**batch, **cut}

    def _labels_of_part(self, batch: Batch, mine: slice) -> Batch:
        """Returns the tensors next to the tokens of a batch whose rows, or words, have classes.

        The attention mask is left out: padding is after the text, where no token of a decoder sees it.
        """
        labels = batch["labels"]
        if labels.dim() == 2 and not labels.is_floating_point():
            labels = _padded_to_multiple(labels, self.count, IGNORED)[:, mine]
        elif self.index:  # the class of a row counts once
            labels = torch.full_like(labels, IGNORED)
        found = {"labels": labels, "whole_ids": batch["input_ids"], "part": torch.tensor(self.index)}
        if "token_type_ids" in batch:
            found["token_type_ids"] = _padded_to_multiple(batch["token_type_ids"], self.count, 0)[:, mine]
        return found


WHOLE = Part()
"""The part of rows that ranks do not share."""


def counts_here(batch: Batch) -> bool:
    """Returns whether values of whole documents or rows count on this rank: the first of those that share rows."""
    return "part" not in batch or int(batch["part"]) == 0


def predictions_of(batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns what each position predicts and, if there are `segments`, the document of that; both (B, T), int64."""
    if "targets" in batch:
        return batch["targets"], batch.get("owners")
    if "segments" in batch:
        return predicted(batch["labels"], batch["segments"])
    return F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED), None


def predicted(labels: torch.Tensor, segments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what each position predicts and its document, both (B, T): `IGNORED` and -1 without a target.

    The label at t is predicted at t - 1, so a document's first token is never a target.

    Args:
        labels: (B, T), aligned with the tokens.
        segments: (B, T), the document of each token; -1 for padding.
    """
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    owners = F.pad(segments[:, 1:], (0, 1), value=-1)
    nothing = (targets == IGNORED) | (owners != segments)
    return targets.masked_fill(nothing, IGNORED), owners.masked_fill(nothing, -1)


def _padded_to_multiple(tensor: torch.Tensor, multiple: int, value: int | None) -> torch.Tensor:
    """Pads (B, T) to a multiple in T, with `value` or, if it is None, with positions from 0: a document of its own."""
    missing = -tensor.shape[1] % multiple
    if value is not None or not missing:
        return F.pad(tensor, (0, missing), value=value or 0)
    return torch.cat([tensor, torch.arange(missing).expand(len(tensor), -1)], dim=1)
