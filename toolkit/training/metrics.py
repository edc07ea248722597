"""Writes the records of a run to `metrics.jsonl` and the trackers, and shows its progress."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from toolkit.paths import GIB
from toolkit.recipe.figures import KEPT_KL, KEPT_LOSS, figure_of, steering
from toolkit.terminal import Terminal, clock
from toolkit.training.durable_writes import LinesFile
from toolkit.training.step import with_figures


class Metrics:
    """Writes every record of a run; ranks other than 0 only count.

    Args:
        path: the JSON-lines file; it is created with the first record.
        num_steps: length of the run, for the progress bar.
        every_steps: steps from one line on the console to the next; None if `on_record` shows them instead.
        unit: what the objective counts, for the console.
        planned_peak_bytes: is in each train record next to the measured peak, or None without a plan.
        on_record: called after each record, with all records and the time left (seconds).
        best_by: which figure judges evaluations (`training.best_by`), which the console shows, too.
        limited: adds to a text with figures of held-out rows what limits them.
        to_trackers: called with the split, the numbers and the step of each record.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        path: Path,
        num_steps: int,
        every_steps: int | None,
        unit: str = "targets",
        planned_peak_bytes: int | None = None,
        on_record: Callable[[list[dict[str, Any]], float | None], None] | None = None,
        to_trackers: Callable[[str, dict[str, float], int], None] = lambda split, values, step: None,
        best_by: str = "loss",
        limited: Callable[[str], str] = str,
    ) -> None:
        self._limited = limited
        self._steering = steering(best_by).field
        self._unit = unit
        self._planned_peak_bytes = planned_peak_bytes
        self._on_record = on_record
        self.records: list[dict[str, Any]] = []
        self._accelerator = accelerator
        self._file = LinesFile(path, self.warn)
        self._to_trackers = to_trackers
        self._console = Terminal(quiet=not accelerator.is_main_process)
        self.progress = Progress(self._console, num_steps, every_steps)

    def __enter__(self) -> Metrics:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.progress.stop()
        self.catch_up()

    def resume(self, records: list[dict[str, Any]]) -> None:
        """Continues after these records; later ones in the file are dropped."""
        self.records = list(records)
        self.progress.resume(max((record["step"] for record in records), default=0))
        if self._accelerator.is_main_process:
            self._file.replace([json.dumps(record) + "\n" for record in records])

    def train(self, record: dict[str, Any]) -> None:
        """Writes the record of an optimizer step; adds `split` and the keys of the plan to it."""
        record = with_figures(record, {"planned_peak_bytes": self._planned_peak_bytes})
        self._write(with_figures({"split": "train"}, record))
        self.progress.show(record["step"], _step_figures(record, self._unit, self._steering))

    def evaluation(self, record: dict[str, Any]) -> None:
        """Writes the record of an evaluation: `step`, other figures, and `loss` if there are held-out rows."""
        self._write(with_figures({"split": "eval"}, record))
        loss = [f"held-out loss {record['loss']:.4f}"] if "loss" in record else []
        if figures := [*loss, *_other_figures(record, self._steering, "loss")]:
            self.progress.line(record["step"], self._limited("  ".join(figures)))

    def catch_up(self) -> bool:
        """Writes the records that wait for a full disk. Returns whether none is left."""
        return not self._accelerator.is_main_process or self._file.catch_up()

    def tell(self, message: str) -> None:
        """Shows a line at once."""
        self._console.print(message)

    def warn(self, message: str) -> None:
        """Shows a warning at once."""
        self._console.warn(message)

    def _write(self, record: dict[str, Any]) -> None:
        record = finite_or_null(record)
        self.records.append(record)
        if self._accelerator.is_main_process:
            self._file.append(json.dumps(record) + "\n")
        values = {key: value for key, value in record.items() if isinstance(value, int | float)}
        self._to_trackers(record["split"], values, record["step"])
        if self._on_record is not None:
            self._on_record(self.records, self.progress.seconds_left(record["step"]))


def finite_or_null(record: dict[str, Any]) -> dict[str, Any]:
    """Replaces non-finite numbers by None and adds `non_finite: true` if there are any: JSON has no NaN."""
    cleaned = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()
    }
    marked = with_figures(cleaned, {"non_finite": True})  # no extension's figure has this name
    return marked if cleaned != record else record


def _step_figures(record: dict[str, Any], unit: str, steering: str) -> list[str]:
    """Returns the figures of a step for the console, the most important first."""
    device_bytes = record["peak_device_bytes"]
    memory = f"{device_bytes / GIB:.2f} GiB" if device_bytes else f"{record['peak_host_bytes'] / GIB:.2f} GiB host"
    main, form = ("reward", ".3f") if "reward" in record else ("loss", ".4f")
    return [
        f"{main} {record[main]:{form}}",
        *_other_figures(record, steering, main),
        f"lr {record['learning_rate']:.2e}",
        f"{format_rate(record['tokens_per_second'])} tokens/s",
        f"{format_rate(record[f'{unit}_per_second'])} {unit}/s",
        f"peak {memory}",
        *([f"mfu {record['mfu']:.1%}"] if record["mfu"] is not None else []),
    ]


def _other_figures(record: dict[str, Any], steering: str, main: str) -> list[str]:
    """Returns the shares, the losses of sources, what was kept, and the figure that judges evaluations; not `main`."""
    known = [figure_of(key) for key, value in record.items() if isinstance(value, int | float) and key != main]
    told = (steering, KEPT_LOSS.field, KEPT_KL.field)
    shown = [one for one in known if one.form == "share" or one.field.startswith("loss/") or one.field in told]
    return [f"{one.name} {one.in_short(record[one.field])}" for one in shown]


def format_rate(value: float) -> str:
    """Formats a rate without decimals from 10 on, and with them below, so that 0.3 is not shown as 0."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


# ---- Shows the progress of a run: a bar in a terminal, lines elsewhere ----

BAR_WIDTH = 12
"""Columns of the bar in a terminal: count, time left and loss need the rest of 80 columns."""

TIME_WIDTH = 8
"""Columns of the time left; a day and more is wider, and then the last figure is left out."""


class Progress:
    """Shows the steps of a run.

    Args:
        console: silent on ranks other than 0.
        num_steps: length of the run.
        every_steps: without a bar, a line is shown every N steps; None if something else shows the steps.
    """

    def __init__(self, console: Console, num_steps: int, every_steps: int | None) -> None:
        self._console = console
        self._num_steps = num_steps
        self._every_steps = every_steps
        self._first_step = 0
        self._started = time.monotonic()
        self._bar = _TerminalBar(console, num_steps) if console.is_terminal and not console.quiet else None

    def start(self) -> None:
        self._started = time.monotonic()
        if self._bar is not None:
            self._bar.start()

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def resume(self, step: int) -> None:
        """Continues after `step` steps, which took no time of this process."""
        self._first_step = step

    def seconds_left(self, step: int) -> float | None:
        """Returns the seconds left at the run's mean pace, with evaluations and saves; None before a first step."""
        done = step - self._first_step
        return (time.monotonic() - self._started) / done * (self._num_steps - step) if done > 0 else None

    def show(self, step: int, figures: Sequence[str]) -> None:
        """Shows one optimizer step and its figures."""
        left = self.seconds_left(step)
        if self._bar is not None:
            self._bar.show(step, figures)
        elif self._every_steps is not None and (step % self._every_steps == 0 or step == self._num_steps):
            self.line(step, *([f"{clock(left)} left"] if left else []), *figures)

    def line(self, step: int, *figures: str) -> None:
        """Shows a separate line, above the bar if there is one."""
        if self._every_steps is None:
            return
        self._console.print("  ".join([f"step {step}/{self._num_steps}", *figures]))


class _TerminalBar:
    def __init__(self, console: Console, num_steps: int) -> None:
        columns = (MofNCompleteColumn(), TimeRemainingColumn(), BarColumn(BAR_WIDTH), _Figures(console))
        self._progress = RichProgress(*columns, console=console)
        self._task = self._progress.add_task("training", total=num_steps, figures=())

    def start(self) -> None:
        Terminal.with_bar = self._progress.console
        self._progress.start()

    def stop(self) -> None:
        Terminal.with_bar = None
        self._progress.stop()

    def show(self, step: int, figures: Sequence[str]) -> None:
        self._progress.update(self._task, completed=step, figures=figures)


class _Figures(ProgressColumn):
    """A column with as many figures as fit next to the other columns; none is cut."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def render(self, task: Task) -> Text:
        count = 2 * len(f"{task.total:.0f}") + 1
        room = self._console.width - count - TIME_WIDTH - BAR_WIDTH - 4  # and a space between two columns
        return Text(fitting(task.fields["figures"], room), no_wrap=True)


def fitting(figures: Sequence[str], room: int) -> str:
    """Joins the first figures that fit into a line of `room` columns."""
    line = ""
    for figure in figures:
        longer = f"{line}  {figure}" if line else figure
        if len(longer) > room:
            break
        line = longer
    return line
