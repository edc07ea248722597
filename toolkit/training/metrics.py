"""What a run tells: its progress, `metrics.jsonl`, and Accelerate's trackers."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from accelerate import Accelerator

from toolkit.paths import GIB
from toolkit.recipe.schema import LoggingSection
from toolkit.terminal import Terminal
from toolkit.training.durable_writes import TELL_SECONDS, LinesFile
from toolkit.training.progress import Progress

SHARES = {
    "accuracy": "accuracy",
    "f1_macro": "F1",
    "f1": "F1 of entities",
    "answer_accuracy": "answers right",
    "answer_stopped": "answers that stop",
}
"""Figures of an evaluation that are shares -> their name on the console."""


class Metrics:
    """Writes every record of a run; does nothing but count on ranks other than 0.

    Args:
        path: the JSON-lines file; made on the first record.
        num_steps: length of the run, for the progress bar.
        unit: what the objective counts, for the console.
        planned_peak_bytes: stands in each train record beside what was measured; None: there is no plan.
        on_record: called with all records and the time left (seconds) after each record.
        shows_steps: on the console; False: `on_record` shows them.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        path: Path,
        logging: LoggingSection,
        num_steps: int,
        unit: str = "targets",
        planned_peak_bytes: int | None = None,
        on_record: Callable[[list[dict[str, Any]], float | None], None] | None = None,
        shows_steps: bool = True,
    ) -> None:
        self._unit = unit
        self._planned_peak_bytes = planned_peak_bytes
        self._on_record = on_record
        self.records: list[dict[str, Any]] = []
        self._accelerator = accelerator
        self._file = LinesFile(path, self.warn)
        self._told_trackers = -TELL_SECONDS
        self._console = Terminal(quiet=not accelerator.is_main_process)
        self.progress = Progress(self._console, num_steps, logging.every_steps if shows_steps else None)

    def __enter__(self) -> Metrics:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.progress.stop()
        self.catch_up()

    def resume(self, records: list[dict[str, Any]]) -> None:
        """Goes on after these records; later ones that the file may hold are dropped."""
        self.records = list(records)
        self.progress.resume(max((record["step"] for record in records), default=0))
        if self._accelerator.is_main_process:
            self._file.replace([json.dumps(record) + "\n" for record in records])

    def train(self, record: dict[str, Any]) -> None:
        """One optimizer step; `record` holds the train keys but `split` and the plan's."""
        self._write({"split": "train", **record, "planned_peak_bytes": self._planned_peak_bytes})
        self.progress.show(record["step"], _train_figures(record, self._unit))

    def evaluation(self, record: dict[str, Any]) -> None:
        """One evaluation: `step`, `loss` and what the objective adds."""
        self._write({"split": "eval", **record})
        self.progress.line(record["step"], f"held-out loss {record['loss']:.4f}", *_shares(record), *_by_source(record))

    def catch_up(self) -> bool:
        """Writes the records that a full disk has kept waiting; whether none is left."""
        return not self._accelerator.is_main_process or self._file.catch_up()

    def tell(self, message: str) -> None:
        """Shows a line, whether one is due or not."""
        self._console.print(message)

    def warn(self, message: str) -> None:
        """Shows a warning, whether a line is due or not."""
        self._console.warn(message)

    def _write(self, record: dict[str, Any]) -> None:
        record = finite_or_null(record)
        self.records.append(record)
        if self._accelerator.is_main_process:
            self._file.append(json.dumps(record) + "\n")
        split = record["split"]
        values = {f"{split}/{key}": value for key, value in record.items() if isinstance(value, int | float)}
        self._track(values, record["step"])
        if self._on_record is not None:
            self._on_record(self.records, self.progress.seconds_left(record["step"]))

    def _track(self, values: dict[str, Any], step: int) -> None:
        try:
            self._accelerator.log(values, step=step)
        except OSError as error:
            if time.monotonic() - self._told_trackers >= TELL_SECONDS:
                self._told_trackers = time.monotonic()
                self.warn(f"a tracker (logging.trackers) cannot write ({error.strerror}), and lacks records")


def finite_or_null(record: dict[str, Any]) -> dict[str, Any]:
    """The record with non-finite numbers as None and then `non_finite: true`; JSON has no NaN."""
    cleaned = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()
    }
    return {**cleaned, "non_finite": True} if cleaned != record else record


def _train_figures(record: dict[str, Any], unit: str) -> list[str]:
    """What a line says of a step, the most important first."""
    device_bytes = record["peak_device_bytes"]
    memory = f"{device_bytes / GIB:.2f} GiB" if device_bytes else f"{record['peak_host_bytes'] / GIB:.2f} GiB host"
    return [
        f"loss {record['loss']:.4f}",
        *_shares(record),
        *_by_source(record),
        f"lr {record['learning_rate']:.2e}",
        f"{format_rate(record['tokens_per_second'])} tokens/s",
        f"{format_rate(record[f'{unit}_per_second'])} {unit}/s",
        f"peak {memory}",
        *([f"mfu {record['mfu']:.1%}"] if record["mfu"] is not None else []),
    ]


def _shares(record: dict[str, Any]) -> list[str]:
    return [f"{name} {record[key]:.1%}" for key, name in SHARES.items() if key in record]


def _by_source(record: dict[str, Any]) -> list[str]:
    losses = {key: value for key, value in record.items() if key.startswith("loss/") and value is not None}
    return [f"{key.removeprefix('loss/')} {value:.4f}" for key, value in losses.items()]


def format_rate(value: float) -> str:
    """Whole from 10 on; below that with decimals, since a rate of 0.3 is not none."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
