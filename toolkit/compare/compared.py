"""Compares runs: their results and what differs, for the terminal, for programs and for a page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolkit.errors import listed
from toolkit.pages.parts.figures import Figure, figures_of
from toolkit.pages.parts.number_text import (
    MISSING,
    finite,
    format_count,
    format_seconds,
    format_short,
)
from toolkit.pages.parts.page import Table
from toolkit.pages.parts.run_metrics import Metrics, column, split_lines
from toolkit.paths import source_name
from toolkit.terminal import format_bytes

OF_THE_RUN_ITSELF = ("description", "training.output_dir")
"""Settings that name a run and do not change it."""

SOURCES_SHOWN = 3


@dataclass(frozen=True)
class ComparedRun:
    """A run as read for the comparison.

    Attributes:
        name: a short name that no other compared run has.
        place: folder or address.
        state: finished, running, stopped, failed, killed, stalled or unfinished.
        metrics: the lines of metrics.jsonl that can be read.
        recipe: key -> value of the settings; empty if no recipe can be read.
        made_with: ranks, strategy, precision, machine and versions, as far as they are known.
        num_steps: steps of the whole run, if they are known.
        why: why a run that is not finished ended, if that is known.
        problems: sentences about what is missing or damaged.
        saved_step: the step of its last whole checkpoint, if it has one.
        seconds_per_step: of a running run, with its evaluations and saves, if they are known.
        answers: held-out prompt -> what the model wrote last, and what the data has.
    """

    name: str
    place: str
    state: str
    metrics: Metrics = field(default_factory=list)
    recipe: dict[str, Any] = field(default_factory=dict)
    made_with: dict[str, str] = field(default_factory=dict)
    num_steps: int | None = None
    why: str = ""
    problems: Sequence[str] = ()
    saved_step: int | None = None
    seconds_per_step: float | None = None
    answers: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def train(self) -> Metrics:
        return split_lines(self.metrics, "train")

    @property
    def evals(self) -> Metrics:
        return split_lines(self.metrics, "eval")

    @property
    def all_problems(self) -> list[str]:
        """Returns why the run ended, and what is missing or damaged."""
        return [*([f"{self.state}: {self.why}"] if self.why else []), *self.problems]


@dataclass(frozen=True)
class Best:
    """A value over the evaluations; `best` and `step` are None if neither direction is better."""

    last: float
    best: float | None
    step: int | None


# ---- of one run ----


def step_of(run: ComparedRun) -> int:
    """Returns the last step in its metrics."""
    return max((line["step"] for line in run.metrics), default=0)


def held_out(run: ComparedRun, name: str, better: str) -> Best | None:
    """Returns the last and the best value of a field of the evaluations, or None if no value is finite.

    Args:
        better: lower or higher, or empty for neither.
    """
    found = [
        (value, line["step"])
        for value, line in zip(column(run.evals, name), run.evals, strict=True)
        if math.isfinite(value)
    ]
    if not found:
        return None
    if not better:
        return Best(found[-1][0], None, None)
    sign = -1 if better == "higher" else 1
    best, step = min(found, key=lambda pair: (sign * pair[0], pair[1]))
    return Best(found[-1][0], best, step)


def training_loss(run: ComparedRun) -> float | None:
    """Returns the median of the last tenth, because single steps are noisy."""
    losses = finite(column(run.train, "loss"))
    return statistics.median(losses[-max(1, len(losses) // 10) :]) if losses else None


def _last_training_value(run: ComparedRun, name: str) -> float | None:
    return next(iter(finite(column(run.train, name))[-1:]), None)


def _median_training_value(run: ComparedRun, name: str) -> float | None:
    values = finite(column(run.train, name))
    return statistics.median(values) if values else None


def _training_seconds(run: ComparedRun) -> float | None:
    seconds = finite(column(run.train, "step_seconds"))
    return math.fsum(seconds) if seconds else None


def peak_memory(run: ComparedRun) -> tuple[float, str] | None:
    """Returns the bytes of the rank that used most, and whether on its device or, for CPU ranks, its host process."""
    for name, of in (("peak_device_bytes", "device"), ("peak_host_bytes", "host")):
        values = finite(column(run.train, name))
        if values:
            return max(values), of
    return None


def model_of(run: ComparedRun) -> str:
    name, kind = run.recipe.get("model.name_or_path"), run.recipe.get("model.config.model_type")
    if isinstance(name, str):
        return source_name(name)
    return f"{kind}, random weights" if isinstance(kind, str) else ""


def data_of(run: ComparedRun) -> str:
    sources = run.recipe.get("data.train")
    paths = [
        str(item.get("path", "")) if isinstance(item, dict) else str(item or "")
        for item in (sources if isinstance(sources, list) else [sources])
    ]
    names = [source_name(path) for path in paths if path]
    return listed(names, SOURCES_SHOWN)


def method_of(run: ComparedRun) -> str:
    """Returns the objective, and what is trained."""
    kind, adapter = run.recipe.get("objective.kind"), run.recipe.get("adapter.kind")
    if kind is None:
        return ""
    if adapter in (None, "none"):
        return f"{kind}, full"
    rank, bits = run.recipe.get("adapter.r"), run.recipe.get("adapter.quantize")
    base = f", base in {bits}" if bits not in (None, "none") else ""
    return f"{kind}, {adapter}{f' of rank {rank}' if rank else ''}{base}"


def _state_and_steps(run: ComparedRun) -> tuple[str, str]:
    step = step_of(run)
    total = f" of {run.num_steps:,}" if run.num_steps is not None and run.num_steps != step else ""
    return run.state, f"{step:,}{total}"


# ---- beside each other ----

Row = tuple[str, ...]


def result_table(runs: Sequence[ComparedRun]) -> Table:
    """Returns a table of the runs and their results, a column for each, without rows that are empty for all."""
    rows = [
        ("model", *map(model_of, runs)),
        ("data", *map(data_of, runs)),
        ("method", *map(method_of, runs)),
        *zip(("state", "steps"), *map(_state_and_steps, runs), strict=True),
        ("tokens", *(_formatted(_last_training_value(run, "tokens"), format_short) for run in runs)),
        ("training loss", *(_formatted(training_loss(run), format_loss) for run in runs)),
        *_held_out_rows(runs, "held-out loss", "loss", "lower", format_loss),
    ]
    for figure in figures_of_all(runs):
        rows += _held_out_rows(runs, figure.title, figure.field, figure.better, figure.written)
    rows += [
        (
            "seconds per step",
            *(_formatted(_median_training_value(run, "step_seconds"), lambda value: f"{value:.3g}") for run in runs),
        ),
        (
            "tokens per second",
            *(_formatted(_median_training_value(run, "tokens_per_second"), format_short) for run in runs),
        ),
        ("time of the steps", *(_formatted(_training_seconds(run), format_seconds) for run in runs)),
        ("memory peak", *map(_memory_cell, runs)),
    ]
    return _table("results", "Results", runs, rows)


def figures_of_all(runs: Sequence[ComparedRun]) -> list[Figure]:
    """Returns the metrics that any of the runs has."""
    return figures_of([line for run in runs for line in run.evals])


def _held_out_rows(
    runs: Sequence[ComparedRun], title: str, name: str, better: str, written: Callable[[float], str]
) -> list[Row]:
    found = [held_out(run, name, better) for run in runs]
    title = title[:1].lower() + title[1:]
    last = (f"{title}, last", *(MISSING if each is None else written(each.last) for each in found))
    if not better:
        return [(title, *last[1:])]
    cells = [
        MISSING if each is None or each.best is None else f"{written(each.best)} at step {each.step:,}"
        for each in found
    ]
    return [(f"{title}, best", *cells), last]


def difference_table(runs: Sequence[ComparedRun]) -> Table:
    """Returns a table of the settings whose values differ."""
    rows = [(key, *map(_setting_text, values)) for key, values in differences(runs).items()]
    rows = [(key, *(_names_that_differ(cells))) for key, *cells in rows]
    return _table("differences", "What differs in the recipes", runs, rows)


def differences(runs: Sequence[ComparedRun]) -> dict[str, list[Any]]:
    """Returns the values of each run by setting, for settings that are not the same in all; None is not set.

    A run whose recipe cannot be read counts as no difference, and has None.
    """
    known = [run.recipe for run in runs if run.recipe]
    keys = dict.fromkeys(key for recipe in known for key in recipe if key not in OF_THE_RUN_ITSELF)
    return {
        key: [run.recipe.get(key) for run in runs]
        for key in keys
        if any(recipe.get(key) != known[0].get(key) for recipe in known)
    }


def setup_table(runs: Sequence[ComparedRun]) -> Table:
    """Returns a table of ranks, versions and machines that differ."""
    known = [run.made_with for run in runs if run.made_with]
    names = dict.fromkeys(name for made_with in known for name in made_with)
    rows = [
        (name, *(run.made_with.get(name, MISSING) for run in runs))
        for name in names
        if any(made_with.get(name) != known[0].get(name) for made_with in known)
    ]
    return _table("setup", "What differs in versions and machines", runs, rows)


def problem_lines(runs: Sequence[ComparedRun]) -> list[str]:
    """Returns a line for everything that is missing, damaged or went wrong."""
    return [f"{run.name}: {problem}" for run in runs for problem in run.all_problems]


def as_values(runs: Sequence[ComparedRun]) -> dict[str, Any]:
    """Returns the comparison as JSON values; null is an unknown value."""
    figures = figures_of_all(runs)
    return {"runs": [_values(run, figures) for run in runs], "differences": differences(runs)}


def _values(run: ComparedRun, figures: Sequence[Figure]) -> dict[str, Any]:
    peak = peak_memory(run)
    fields = [("loss", "lower"), *((figure.field, figure.better) for figure in figures)]
    found = {name: held_out(run, name, better) for name, better in fields}
    return {
        "name": run.name,
        "place": run.place,
        "model": model_of(run),
        "data": data_of(run),
        "method": method_of(run),
        "state": run.state,
        "step": step_of(run),
        "num_steps": run.num_steps,
        "tokens": _last_training_value(run, "tokens"),
        "training_loss": training_loss(run),
        "held_out": {name: None if best is None else vars(best) for name, best in found.items()},
        "step_seconds": _median_training_value(run, "step_seconds"),
        "tokens_per_second": _median_training_value(run, "tokens_per_second"),
        "seconds": _training_seconds(run),
        "peak_bytes": None if peak is None else peak[0],
        "peak_of": None if peak is None else peak[1],
        "made_with": run.made_with,
        "problems": run.all_problems,
    }


def short_names(places: Sequence[str]) -> list[str]:
    """Returns the shortest endings of the places, of equal length, that differ from each other."""
    parts = [place.rstrip("/").split("/") for place in places]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return list(places)


# ---- plain values as text ----


def _table(name: str, title: str, runs: Sequence[ComparedRun], rows: Sequence[Row]) -> Table:
    filled = [(head, *(cell or MISSING for cell in cells)) for head, *cells in rows]
    shown = [row for row in filled if set(row[1:]) != {MISSING}]
    return Table(name, title, ("", *(run.name for run in runs)), shown, "names")


def _formatted(value: float | None, form: Callable[[float], str]) -> str:
    return MISSING if value is None else form(value)


def format_loss(value: float) -> str:
    return f"{value:.4f}" if value == 0 or 0.01 <= abs(value) < 1e4 else f"{value:.3g}"


def _memory_cell(run: ComparedRun) -> str:
    peak = peak_memory(run)
    return MISSING if peak is None else f"{format_bytes(peak[0])} ({peak[1]})"


def _setting_text(value: Any) -> str:
    """Returns a setting's value on one line."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(map(_setting_text, value))
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_setting_text(item)}" for key, item in value.items())
    if isinstance(value, int):
        return str(value) if abs(value) < 10_000 else format_count(value)
    return f"{value:g}" if isinstance(value, float) else str(value).replace("\n", "\N{RETURN SYMBOL}")


def _names_that_differ(cells: Sequence[str]) -> Sequence[str]:
    """Shortens paths to their names if these differ."""
    if not all(cell.startswith("/") or cell == MISSING for cell in cells):
        return cells
    return short_names(cells) if len(set(cells)) == len(cells) else cells


def shared_answers(runs: Sequence[ComparedRun]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Returns each held-out prompt that several runs have answered, with their answers and the data's."""
    prompts = dict.fromkeys(prompt for run in runs for prompt in run.answers)
    found = []
    for prompt in prompts:
        answered = [(run.name, run.answers[prompt]) for run in runs if prompt in run.answers]
        if len(answered) > 1:
            texts = [(name, after) for name, (after, _) in answered]
            found.append((prompt, [*texts, ("In the data", answered[0][1][1])]))
    return found
