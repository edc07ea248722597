"""The metrics of an evaluation next to its loss, as tile, curves and table, and the confusion matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from toolkit.pages.parts.charts import Chart, Series, drawable
from toolkit.pages.parts.number_text import finite, format_percent, format_short
from toolkit.pages.parts.page import Table, Tile
from toolkit.pages.parts.run_metrics import Metrics, column
from toolkit.recipe.figures import FIGURES, KNOWN, Figure, figure_of
from toolkit.terminal import three_digits

TOGETHER = (
    ("shares", "Accuracy", ("accuracy", "f1_macro", "f1")),
    ("rewards", "Rewards", ("chosen_reward", "rejected_reward")),
    ("answers", "Answers to held-out prompts", ("answer_accuracy", "answer_stopped")),
    ("completion-tokens", "Tokens of a completion", ("completion_tokens", "longest_completion")),
)
"""Charts of several figures: name, title, and the keys of the figures."""

ELSEWHERE = {"loss", "reward", "perplexity", "precision", "recall", *(key for _, _, keys in TOGETHER for key in keys)}
"""Figures without a chart of their own; perplexity and the two of F1 repeat others."""

OF_THE_RUN = frozenset(
    {
        *("step", "epoch", "samples", "tokens", "target_tokens", "rows", "pairs", "loss", "rate_factor", "grad_norm"),
        *("learning_rate", "step_seconds", "peak_device_bytes", "peak_host_bytes", "planned_peak_bytes", "mfu"),
        *("non_finite", "dead_experts", "max_expert_load", "answer_accuracy_normalised", *KNOWN),
    }
)
"""Keys of records that are shown elsewhere on the page, or nowhere."""


def figures_of(evals: Metrics) -> list[Figure]:
    """Returns the figures that the evaluations have besides the loss: those of the table, then by source, then own."""
    return [figure for figure in FIGURES if any(figure.field in line for line in evals)] + _others(evals)


def _others(lines: Metrics) -> list[Figure]:
    """Returns the losses of named sources, and the figures that only the user's extensions know."""
    fields = dict.fromkeys(
        field
        for line in lines
        for field, value in line.items()
        if isinstance(value, int | float) and field not in OF_THE_RUN and not field.startswith("reward/")
    )
    return [figure_of(field) for field in fields if not field.endswith(("_per_second", "_seconds"))]


def written(figure: Figure, value: float) -> str:
    """Returns a value of a figure as pages show it."""
    if not math.isfinite(value):
        return "not finite"
    if figure.form == "share":
        return format_percent(value)
    if figure.form == "perplexity":
        return three_digits(value) if value < 1000 else format_short(value)
    return f"{value:.3g}"


def figure_tile(evals: Metrics, limits: Sequence[str] = ()) -> Tile | None:
    """Returns a tile of the first metric, with the others' last values as its detail, or None without metrics."""
    figures = figures_of(evals)
    if not figures:
        return None
    first, *others = figures
    # The rewards have a chart of their own; the tile has their difference, the margin.
    last = {figure.title: finite(column(evals, figure.field))[-1:] for figure in others if "reward" not in figure.field}
    told = [f"{figure.title} {written(figure, *last[figure.title])}" for figure in others if last.get(figure.title)]
    values = [written(first, value) for value in column(evals, first.field)]
    plain = [*limits, first.plain, f"{first.better} is better" if first.better else ""]
    details = "; ".join(["on held-out data", *told])
    return Tile(f"tile-{first.field}", first.title, values, "; ".join(filter(None, plain)), details)


def figure_charts(train: Metrics, evals: Metrics, x_range: tuple[int, int]) -> list[Chart]:
    """Returns charts of the figures over the steps; those of training steps are faint next to those of evaluations."""
    alone = [*(figure for figure in KNOWN.values() if figure.field not in ELSEWHERE), *_others([*train, *evals])]
    titled = [(f"{one.heading} ({one.plain})" if one.plain else one.heading, one.field) for one in alone]
    charts = []
    for name, title, fields in (*TOGETHER, *((field, title, (field,)) for title, field in titled)):
        series: list[Series] = []
        for number, field in enumerate(fields, 1):
            label = figure_of(field).name if len(fields) > 1 else ""
            held_out = _series(evals, field, f"{label} held out".strip(), f"chart-{number}", "points")
            of_steps, kind = (f"{label} in training".strip(), "faint") if held_out else (label, "line")
            series += [*_series(train, field, of_steps, f"chart-{number}", kind), *held_out]
        if series:
            charts.append(Chart(name.replace("loss/", "loss-of-"), title, series, [], x_range))  # an attribute in HTML
    return charts


def _series(lines: Metrics, field: str, name: str, color: str, kind: str) -> list[Series]:
    """Returns the curve of a field, or none if no line has it."""
    having = [line for line in lines if field in line]
    if not finite(column(having, field)):
        return []
    return [Series(name, [line["step"] for line in having], drawable(column(having, field)), color, kind)]


def confusion_table(evals: Metrics, labels: Sequence[str]) -> Table:
    """Returns the last evaluation's confusion matrix, true classes in rows and predicted in columns, else no rows."""
    counts: list[list[Any]] = next((line["confusion"] for line in reversed(evals) if line.get("confusion")), [])
    names = list(labels) if len(labels) == len(counts) else [str(number) for number in range(len(counts))]
    rows = [(name, *(f"{count:,}" for count in row)) for name, row in zip(names, counts, strict=True)]
    return Table("confusion", "Confusion", ("Is / taken for", *names), rows, remark="rows of the last evaluation")
