"""Reads the lines of metrics.jsonl for pages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from toolkit.pages.number_text import number

Metrics = list[dict[str, Any]]
"""Lines of metrics.jsonl."""

NOT_A_NUMBER_BY_DESIGN = frozenset({"peak_device_bytes", "planned_peak_bytes", "mfu"})
"""Fields that are null on a healthy run: no device memory on CPU, no known peak FLOP/s."""


def split_lines(metrics: Metrics, split: str) -> Metrics:
    """Returns the lines of one split by rising step; of a step that was trained again after a resume, the last."""
    by_step = {line["step"]: line for line in metrics if line.get("split") == split}
    return [by_step[step] for step in sorted(by_step)]


def column(lines: Metrics, field: str) -> list[float]:
    """Returns a field of each line, or NaN if it is missing, null or not finite."""
    return [number(line.get(field)) for line in lines]


@dataclass(frozen=True)
class NonFinite:
    """A line of the metrics with numbers that are not finite."""

    split: str
    step: int
    fields: tuple[str, ...]


def non_finite(lines: Metrics) -> list[NonFinite]:
    """Returns the lines with numbers that are not finite, by rising step."""
    found = []
    for line in lines:
        fields = tuple(field for field, value in line.items() if _is_non_finite(line, field, value))
        if fields or line.get("non_finite"):
            found.append(NonFinite(line["split"], line["step"], fields))
    return sorted(found, key=lambda item: item.step)


def _is_non_finite(line: dict[str, Any], field: str, value: Any) -> bool:
    # The writer puts null for NaN, which JSON lacks, and marks the line `non_finite`.
    if value is None:
        return (bool(line.get("non_finite")) or field == "loss") and field not in NOT_A_NUMBER_BY_DESIGN
    return isinstance(value, float) and not math.isfinite(value)
