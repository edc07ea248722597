"""What is known of an optimizer step, and what the ranks tell each other of it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from toolkit.training.usage import Counts


@dataclass(frozen=True)
class Step:
    """One optimizer step, over all ranks.

    Attributes:
        metrics: what extensions add to its record.
        learning_rate: with which it was taken; known once the step is counted, as `seconds` is.
    """

    loss: float
    grad_norm: float
    counts: Counts
    peak_device_bytes: int
    peak_host_bytes: int
    non_finite_ranks: list[int]
    figures: list[float]
    skipped: bool
    stop: str | None
    save: bool
    metrics: dict[str, Any]
    learning_rate: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class RankStep:
    """What one rank found in a step before the update, and what it has to say.

    The ranks exchange it as one row of float64, which counts exactly up to 2^53, so that host and device meet once.

    Attributes:
        loss_sum: over this rank's targets.
        grad_norm: over all ranks, before clipping.
        wants_to_stop: after this step.
        wants_to_save: after this step.
        next_counts: of this rank's part of the next window; 0 if there is none.
        figures: the objective's own, sums over this rank's part.
    """

    loss_sum: float
    grad_norm: float
    peak_device_bytes: int
    peak_host_bytes: int
    wants_to_stop: bool
    wants_to_save: bool
    next_counts: Counts
    figures: list[float]

    @staticmethod
    def pack(loss_sum: torch.Tensor, grad_norm: torch.Tensor, figures: torch.Tensor, *on_host: float) -> torch.Tensor:
        """The row, (10 + F,): the first two fields, which are on the device, what is on the host, and F figures."""
        device = loss_sum.device
        on_device = torch.stack([loss_sum.detach().double(), grad_norm.detach().to(device).double()])
        # Not made on the device at once: that would wait for all of backward.
        told = torch.tensor(on_host, dtype=torch.float64).to(device, non_blocking=True)
        return torch.cat([on_device, told, figures.detach().double()])

    @staticmethod
    def unpack(row: list[float]) -> RankStep:
        """The fields of a row that `pack` made."""
        loss_sum, grad_norm, device_bytes, host_bytes, stops, saves, *rest = row
        num_counts = len(fields(Counts))
        next_counts = Counts(*map(int, rest[:num_counts]))
        peaks = (int(device_bytes), int(host_bytes))
        return RankStep(loss_sum, grad_norm, *peaks, stops > 0, saves > 0, next_counts, rest[num_counts:])
