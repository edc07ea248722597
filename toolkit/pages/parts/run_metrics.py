"""Reads the lines of metrics.jsonl for pages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from toolkit.errors import counted
from toolkit.pages.parts.number_text import number
from toolkit.paths import parse_json

Metrics = list[dict[str, Any]]
"""Lines of metrics.jsonl."""

NOT_A_NUMBER_BY_DESIGN = frozenset({"peak_device_bytes", "planned_peak_bytes", "mfu"})
"""Fields that are null on a healthy run: no device memory on CPU, no known peak FLOP/s."""


def parse_metrics(content: bytes) -> tuple[Metrics, list[int]]:
    """Returns the records of a metrics.jsonl, and the numbers of the lines that are not records, from 1."""
    found, damaged = [], []
    for number_of_line, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        record = _parse_record(line)
        if record is None:
            damaged.append(number_of_line)
        else:
            found.append(record)
    return found, damaged


def _parse_record(line: bytes) -> dict[str, Any] | None:
    """Returns a line of metrics, or None if it is not one."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or record.get("split") not in ("train", "eval"):
        return None
    # A run that learns from its own samples has no held-out loss.
    step, loss = record.get("step"), record.get("loss", "")
    is_loss = loss in (None, "") or isinstance(loss, int | float)
    return record if isinstance(step, int) and step >= 0 and is_loss else None


def damage_in_words(damaged: list[int]) -> str:
    """Returns which lines of metrics.jsonl cannot be read, as a sentence."""
    if len(damaged) == 1:
        return f"metrics.jsonl is damaged: line {damaged[0]} cannot be read and is left out"
    return (
        f"metrics.jsonl is damaged: {counted(len(damaged), 'line')}, first line {damaged[0]}, cannot be read and are "
        "left out"
    )


def split_lines(metrics: Metrics, split: str) -> Metrics:
    """Returns the lines of one split by rising step; of a step that was trained again after a resume, the last."""
    by_step = {line["step"]: line for line in metrics if line.get("split") == split}
    return [by_step[step] for step in sorted(by_step)]


def last_step(metrics: Metrics) -> int:
    """Returns the last step of the records, or 0."""
    return max((line["step"] for line in metrics), default=0)


def column(lines: Metrics, field: str) -> list[float]:
    """Returns a field of each line, or NaN if it is missing, null or not finite."""
    return [number(line.get(field)) for line in lines]


def samples_itself(train: Metrics) -> bool:
    """Returns whether the run learned from its own samples, whose rewards say how it goes, and not its loss."""
    return any("reward" in line for line in train)


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
