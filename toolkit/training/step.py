"""The figures of an optimizer step, and the row in which ranks exchange them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from toolkit.errors import TrainingError
from toolkit.training.usage import Counts


@dataclass(frozen=True)
class Step:
    """One optimizer step, over all ranks.

    Attributes:
        metrics: figures that extensions add to its record.
        rate_factor: the extensions' factor on the schedule's rate.
        learning_rate: the rate of this step; known once the step is counted, as `seconds` is.
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
    rate_factor: float = 1.0
    learning_rate: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class RankStep:
    """One rank's figures of a step before the update, and its requests.

    The ranks exchange it as one row of float64, which counts exactly up to 2^53, so that host and device meet once.

    Attributes:
        loss_sum: the sum over this rank's targets.
        grad_norm: the norm over all ranks, before clipping.
        wants_to_stop: whether this rank wants to end after this step.
        wants_to_save: whether this rank wants a checkpoint after this step.
        rate_factor: this rank's factor on the learning rate.
        next_counts: counts of this rank's part of the next window; zeros after the last.
        figures: the objective's own sums over this rank's part.
    """

    loss_sum: float
    grad_norm: float
    peak_device_bytes: int
    peak_host_bytes: int
    wants_to_stop: bool
    wants_to_save: bool
    rate_factor: float
    next_counts: Counts
    figures: list[float]

    @staticmethod
    def pack(loss_sum: torch.Tensor, grad_norm: torch.Tensor, figures: torch.Tensor, *on_host: float) -> torch.Tensor:
        """Packs the fields into one row, (11 + F,) float64.

        Args:
            loss_sum: scalar, on the device.
            grad_norm: scalar, on the device.
            figures: (F,), on the device.
            on_host: the other nine fields, in order.
        """
        device = loss_sum.device
        on_device = torch.stack([loss_sum.detach().double(), grad_norm.detach().to(device).double()])
        # Not made on the device at once: that would wait for all of backward.
        told = torch.tensor(on_host, dtype=torch.float64).to(device, non_blocking=True)
        return torch.cat([on_device, told, figures.detach().double()])

    @staticmethod
    def unpack(row: list[float]) -> RankStep:
        """Returns the fields of a row that `pack` made."""
        loss_sum, grad_norm, device_bytes, host_bytes, stops, saves, factor, *rest = row
        num_counts = len(fields(Counts))
        next_counts = Counts(*map(int, rest[:num_counts]))
        peaks = (int(device_bytes), int(host_bytes))
        return RankStep(loss_sum, grad_norm, *peaks, stops > 0, saves > 0, factor, next_counts, rest[num_counts:])


def with_figures(record: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
    """Returns a record with the figures of extensions.

    Raises:
        TrainingError: if one has the name of a figure that the record has already.
    """
    if taken := sorted(record.keys() & figures.keys()):
        raise TrainingError(f"an extension's figure has the name {taken[0]!r}, which the run's own has; rename it")
    return {**record, **figures}
