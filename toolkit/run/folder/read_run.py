"""Reads a run from its folder, finished or not, whole or not. It imports no torch."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.checkpoint.manifest import METRICS, latest, read_file
from toolkit.errors import first_line
from toolkit.pages.parts.run_metrics import Metrics, damage_in_words, parse_metrics, split_lines
from toolkit.pages.status import Status, status_in
from toolkit.recipe.recipe import dotted
from toolkit.recipe.yaml_values import NOT_YAML, yaml_value
from toolkit.run.folder.finished import is_finished
from toolkit.supervise.rank_status import GONE_SECONDS, REPORT, read_statuses

RECIPE = "recipe.yaml"


@dataclass(frozen=True)
class RunState:
    """How far a run is, or how it ended.

    Attributes:
        state: finished, running, stopped, failed, killed, stalled or unfinished.
        metrics: the lines of metrics.jsonl that can be read.
        recipe: key -> value of the settings; empty if no recipe can be read.
        num_steps: steps of the run, if they are known.
        why: why a run that is not finished ended, if that is known.
        problems: sentences about what is missing or damaged.
        saved_step: the step of its last complete checkpoint, if it has one.
        seconds_per_step: of a running run, with its evaluations and saves, if they are known.
    """

    state: str
    metrics: Metrics
    recipe: dict[str, Any]
    num_steps: int | None = None
    why: str = ""
    problems: list[str] = field(default_factory=list)
    saved_step: int | None = None
    seconds_per_step: float | None = None

    @property
    def train(self) -> Metrics:
        return split_lines(self.metrics, "train")

    @property
    def evals(self) -> Metrics:
        return split_lines(self.metrics, "eval")

    @property
    def step(self) -> int:
        """The last step in its metrics."""
        return max((line["step"] for line in self.metrics), default=0)


def read_run(run: Path) -> RunState:
    """Reads what there is of a run in its folder."""
    checkpoint, problems = latest(run), list[str]()
    state, status = _read_state(run)
    recipe = _read_recipe(run, problems)
    num_steps = recipe.get("training.max_steps") if status is None else status.num_steps
    return RunState(
        state,
        _read_metrics(run, state, problems),
        recipe,
        num_steps if isinstance(num_steps, int) else None,
        "" if status is None or state == "running" else status.problem,
        problems,
        None if checkpoint is None else checkpoint.step,
        _pace(status) if state == "running" else None,
    )


def _read_state(run: Path) -> tuple[str, Status | None]:
    """Returns a run's state, and what its report says of a run that is not finished."""
    if is_finished(run):
        return "finished", None
    try:
        status = status_in(read_file(run / REPORT).decode("utf-8", errors="replace"))
    except OSError:
        status = None
    state = "unfinished" if status is None else status.state
    ranks = read_statuses(run, time.time())
    is_live = bool(ranks) and min(rank.silent_seconds for rank in ranks) <= GONE_SECONDS
    return "running" if is_live else "killed" if state == "running" else state, status


def _pace(status: Status | None) -> float | None:
    """Returns the seconds per step that a running run's report expects, evaluations and saves included."""
    if status is None or status.seconds_left is None or status.num_steps <= status.step:
        return None
    return status.seconds_left / (status.num_steps - status.step)


def _read_recipe(run: Path, problems: list[str]) -> dict[str, Any]:
    """Returns the recipe's settings; null is not set."""
    values: Any = None
    try:
        values = yaml_value(read_file(run / RECIPE).decode("utf-8"))
        if not isinstance(values, dict):
            problems.append(f"{RECIPE} is not a mapping of sections")
    except OSError as error:
        problems.append(f"{RECIPE} cannot be read: {first_line(error)}")
    except NOT_YAML:
        problems.append(f"{RECIPE} is damaged: it is not readable as YAML")
    found = dotted({str(key): value for key, value in values.items()} if isinstance(values, dict) else {})
    return {key: value for key, value in found.items() if value is not None}


def _read_metrics(run: Path, state: str, problems: list[str]) -> Metrics:
    """Returns the lines of the run's metrics."""
    try:
        content = read_file(run / METRICS)
    except OSError as error:
        if state != "running":  # it writes the first line after its first evaluation or step
            problems.append(f"{METRICS} cannot be read, so that nothing is known of its steps: {first_line(error)}")
        return []
    if state == "running":
        content = content[: content.rfind(b"\n") + 1]  # the last line is being written; of an ended run it was cut off
    found, damaged = parse_metrics(content)
    if damaged:
        problems.append(damage_in_words(damaged))
    elif not found and state != "running":
        problems.append(f"{METRICS} is empty: no step is done yet")
    return found
