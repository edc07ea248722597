"""What a run tells: a progress bar or lines, `metrics.jsonl`, and Accelerate's trackers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any

from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from toolkit.places import GIB
from toolkit.recipe.schema import LoggingSection
from toolkit.terminal import Terminal

SHARES = {"accuracy": "accuracy", "f1_macro": "F1"}
"""Figures of an evaluation that are shares -> their name on the console."""


class Metrics:
    """Writes every record of a run; does nothing but count on ranks other than 0.

    Args:
        path: the JSON-lines file; made on the first record.
        num_steps: length of the run, for the progress bar.
        unit: what the objective counts, for the console.
        planned_peak_bytes: stands in each train record beside what was measured; None: there is no plan.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        path: Path,
        logging: LoggingSection,
        num_steps: int,
        unit: str = "targets",
        planned_peak_bytes: int | None = None,
    ) -> None:
        self._unit = unit
        self._planned_peak_bytes = planned_peak_bytes
        self.records: list[dict[str, Any]] = []
        self._accelerator = accelerator
        self._path = path
        self._every_steps = logging.every_steps
        self._num_steps = num_steps
        self._console = Terminal(quiet=not accelerator.is_main_process, soft_wrap=False)
        self._bar = _progress_bar(self._console)
        self._task = self._bar.add_task("training", total=num_steps, facts="")

    def __enter__(self) -> Metrics:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def resume(self, records: list[dict[str, Any]]) -> None:
        """Goes on after these records; later ones that the file may hold are dropped."""
        self.records = list(records)
        if self._accelerator.is_main_process:
            text = "".join(json.dumps(record) + "\n" for record in records)
            self._path.write_text(text, encoding="utf-8")

    def train(self, record: dict[str, Any]) -> None:
        """One optimizer step; `record` holds the train keys but `split` and the plan's."""
        self._write({"split": "train", **record, "planned_peak_bytes": self._planned_peak_bytes})
        facts = _train_facts(record, self._unit)
        self._bar.update(self._task, completed=record["step"], facts=facts)
        due = record["step"] % self._every_steps == 0 or record["step"] == self._num_steps
        if due and not self._console.is_terminal:
            self._console.print(f"step {record['step']}/{self._num_steps}  {facts}", soft_wrap=True)

    def evaluation(self, record: dict[str, Any]) -> None:
        """One evaluation: `step`, `loss` and what the objective adds."""
        self._write({"split": "eval", **record})
        figures = "".join(f"  {name} {record[key]:.1%}" for key, name in SHARES.items() if key in record)
        self._console.print(
            f"step {record['step']}/{self._num_steps}  held-out loss {record['loss']:.4f}{figures}", soft_wrap=True
        )

    def warn(self, message: str) -> None:
        """Shows a warning, whatever the console line is due."""
        self._console.warn(message)

    def _write(self, record: dict[str, Any]) -> None:
        record = finite_or_null(record)
        self.records.append(record)
        if self._accelerator.is_main_process:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        split = record["split"]
        values = {f"{split}/{key}": value for key, value in record.items() if isinstance(value, int | float)}
        self._accelerator.log(values, step=record["step"])


def finite_or_null(record: dict[str, Any]) -> dict[str, Any]:
    """The record with non-finite numbers as None and then `non_finite: true`; JSON has no NaN."""
    cleaned = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()
    }
    return {**cleaned, "non_finite": True} if cleaned != record else record


def _progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[facts]}"),
        console=console,
    )


def _train_facts(record: dict[str, Any], unit: str) -> str:
    device_bytes = record["peak_device_bytes"]
    memory = f"{device_bytes / GIB:.2f} GiB" if device_bytes else f"{record['peak_host_bytes'] / GIB:.2f} GiB host"
    mfu = f"  mfu {record['mfu']:.1%}" if record["mfu"] is not None else ""
    return (
        f"loss {record['loss']:.4f}  lr {record['learning_rate']:.2e}  "
        f"{record['tokens_per_second']:,.0f} tokens/s  {record['targets_per_second']:,.0f} {unit}/s  peak {memory}{mfu}"
    )
