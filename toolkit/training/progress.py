"""Shows the progress of a run: a bar in a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from toolkit.terminal import Terminal, clock

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
