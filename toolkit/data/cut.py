"""A rank's part of rows that a group of ranks shares."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from toolkit.data.samples import IGNORED, Batch


@dataclass(frozen=True)
class Part:
    """One of `count` equal parts of every row, from `index` 0."""

    index: int = 0
    count: int = 1

    def of(self, batch: Batch) -> Batch:
        """This part of rows (B, T), which are padded to a multiple of `count`; the batch itself where there is one.

        What a token predicts may be in the next part, and who it sees in any other: so there are `targets` (B, T / n),
        shifted before the cut, and `whole_positions` (B, T). Preferences keep their `labels` and `segments` whole, and
        have `owners` (B, T / n), too.
        """
        if self.count == 1:
            return batch
        positions = _padded(batch["position_ids"], self.count, None)
        targets, owners = predictions_of(batch)
        length = positions.shape[1] // self.count
        mine = slice(self.index * length, (self.index + 1) * length)
        cut = {
            "input_ids": _padded(batch["input_ids"], self.count, 0)[:, mine],
            "position_ids": positions[:, mine],
            "targets": _padded(targets, self.count, IGNORED)[:, mine],
            "whole_positions": positions,
            "lengths": (batch["lengths"] - mine.start).clamp(0, length),
        }
        if owners is not None:
            cut["owners"] = _padded(owners, self.count, -1)[:, mine]
            cut |= {name: batch[name] for name in ("labels", "segments", "reference")}
            cut["part"] = torch.tensor(self.index)
        return {name: tensor.contiguous() for name, tensor in cut.items()}


WHOLE = Part()
"""Of rows that no ranks share."""


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
