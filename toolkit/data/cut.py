"""A rank's part of rows that a group of ranks shares."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from toolkit.data.samples import IGNORED, Batch
from toolkit.objectives.specs.batches import KL_PREFIX


@dataclass(frozen=True)
class Part:
    """One of `count` equal parts of every row, from `index` 0."""

    index: int = 0
    count: int = 1

    def of(self, batch: Batch) -> Batch:
        """This part of rows (B, T), which are padded to a multiple of `count`; the batch itself where there is one.

        What a token predicts may be in the next part, and who it sees in any other: so there are `targets` (B, T / n),
        shifted before the cut, and `whole_positions` (B, T). What belongs to documents or rows and not to tokens stays
        whole, with the number of this `part`: preferences keep their `labels` and `segments`, and have `owners`
        (B, T / n), too; classification and rewards have `whole_ids` (B, T), and the labels of rows are in the first
        part alone.
        """
        if self.count == 1:
            return batch
        others = {name.removeprefix(KL_PREFIX): value for name, value in batch.items() if name.startswith(KL_PREFIX)}
        cut = self._of({name: value for name, value in batch.items() if not name.startswith(KL_PREFIX)})
        if others:
            cut |= {f"{KL_PREFIX}{name}": value for name, value in self._of(others).items()}
        return {name: tensor.contiguous() for name, tensor in cut.items()}

    def _of(self, batch: Batch) -> Batch:
        ids = batch["input_ids"]
        positions = batch["position_ids"] if "position_ids" in batch else torch.arange(ids.shape[1]).expand_as(ids)
        positions = _padded(positions, self.count, None)
        length = positions.shape[1] // self.count
        mine = slice(self.index * length, (self.index + 1) * length)
        cut = {
            "input_ids": _padded(ids, self.count, 0)[:, mine],
            "position_ids": positions[:, mine],
            "whole_positions": positions,
            "lengths": (batch["lengths"] - mine.start).clamp(0, length),
        }
        if "attention_mask" in batch:
            return cut | self._classified(batch, mine)
        if "sources" in batch:
            cut["sources"] = _padded(batch["sources"], self.count, -1)[:, mine]
        targets, owners = predictions_of(batch)
        cut["targets"] = _padded(targets, self.count, IGNORED)[:, mine]
        if owners is None:
            return cut
        cut["owners"] = _padded(owners, self.count, -1)[:, mine]
        cut["part"] = torch.tensor(self.index)
        if "margin" in batch:
            cut["whole_ids"] = ids
        return {**batch, **cut}

    def _classified(self, batch: Batch, mine: slice) -> Batch:
        """What a batch has beside its tokens where rows, or words, have classes.

        Without the mask of padding, which is behind the text and which no token of a decoder sees.
        """
        labels = batch["labels"]
        if labels.dim() == 2:
            labels = _padded(labels, self.count, IGNORED)[:, mine]
        elif self.index:  # the class of a row counts once
            labels = torch.full_like(labels, IGNORED)
        found = {"labels": labels, "whole_ids": batch["input_ids"], "part": torch.tensor(self.index)}
        if "token_type_ids" in batch:
            found["token_type_ids"] = _padded(batch["token_type_ids"], self.count, 0)[:, mine]
        return found


WHOLE = Part()
"""Of rows that no ranks share."""


def counts_here(batch: Batch) -> bool:
    """Whether what belongs to whole documents or rows counts on this rank: of those that share rows, on the first."""
    return "part" not in batch or int(batch["part"]) == 0


def predictions_of(batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What each position of a micro-batch predicts, and of whose document where `segments` tell; both (B, T)."""
    if "targets" in batch:
        return batch["targets"], batch.get("owners")
    if "segments" in batch:
        return predicted(batch["labels"], batch["segments"])
    return F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED), None


def predicted(labels: torch.Tensor, segments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What each position predicts, `IGNORED` for nothing, and whose document that is in, -1 then; both (B, T).

    The label at t is predicted at t - 1, so a document's first token is never a target.
    """
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    owners = F.pad(segments[:, 1:], (0, 1), value=-1)
    nothing = (targets == IGNORED) | (owners != segments)
    return targets.masked_fill(nothing, IGNORED), owners.masked_fill(nothing, -1)


def _padded(tensor: torch.Tensor, multiple: int, value: int | None) -> torch.Tensor:
    """(B, T) with T a multiple; filled with `value`, or with positions from 0: a document of its own."""
    missing = -tensor.shape[1] % multiple
    if value is not None or not missing:
        return F.pad(tensor, (0, missing), value=value or 0)
    return torch.cat([tensor, torch.arange(missing).expand(len(tensor), -1)], dim=1)
