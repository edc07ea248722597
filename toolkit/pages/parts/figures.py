"""The metrics of an evaluation beside its loss, as tile, curves and table, and the confusion matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.pages.parts.charts import Chart, Series, drawable
from toolkit.pages.parts.number_text import finite, format_percent, format_short
from toolkit.pages.parts.page import Table, Tile
from toolkit.pages.parts.run_metrics import Metrics, column
from toolkit.terminal import three_digits


@dataclass(frozen=True)
class Figure:
    """A metric of an evaluation: its title, its format, and what it is in plain words.

    Attributes:
        better: lower or higher, or empty if neither is better.
    """

    field: str
    title: str
    written: Callable[[float], str]
    plain: str = ""
    better: str = ""


def format_perplexity(value: float) -> str:
    """Formats a perplexity with three digits, or as `not finite`."""
    if not math.isfinite(value):
        return "not finite"
    return three_digits(value) if value < 1000 else format_short(value)


def _format_share(value: float) -> str:
    return format_percent(value) if math.isfinite(value) else "not finite"


def _signed_number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "not finite"


FIGURES = (
    Figure(
        "perplexity",
        "Perplexity",
        format_perplexity,
        "as many equally likely tokens would be as hard to predict",
        "lower",
    ),
    Figure("accuracy", "Accuracy", _format_share, "share of right answers", "higher"),
    Figure("f1_macro", "F1", _format_share, "rare classes count as much as frequent ones", "higher"),
    Figure("f1", "F1 of entities", _format_share, "entities that are found and right", "higher"),
    Figure("precision", "Precision", _format_share, better="higher"),
    Figure("recall", "Recall", _format_share, better="higher"),
    Figure("margin", "Margin", _signed_number, "how clearly the chosen answer is preferred", "higher"),
    Figure("chosen_reward", "Chosen reward", _signed_number),
    Figure("rejected_reward", "Rejected reward", _signed_number),
    Figure("kl", "KL estimate", _signed_number),
    Figure(
        "divergence",
        "Divergence from the teacher",
        _signed_number,
        "how far the model's predictions are from its teacher's",
        "lower",
    ),
    Figure("cross_entropy", "Cross-entropy", _signed_number, better="lower"),
    Figure("answer_accuracy", "Answers right", _format_share, "share of right answers to held-out prompts", "higher"),
    Figure("answer_stopped", "Answers that stop", _format_share, better="higher"),
    Figure("answer_mean_tokens", "Tokens of an answer", _signed_number),
)
"""Metrics of all objectives, in the order in which they are shown; an evaluation has those of its objective."""

CHARTS = (
    ("shares", "Accuracy", (("accuracy", "accuracy"), ("f1_macro", "F1"), ("f1", "F1 of entities"))),
    ("margin", "Margin of the rewards", (("margin", ""),)),
    ("rewards", "Rewards", (("chosen_reward", "chosen"), ("rejected_reward", "rejected"))),
    ("kl", "KL to the reference, estimated on these completions (below 0: they became less likely)", (("kl", ""),)),
    ("divergence", "Divergence from the teacher", (("divergence", ""),)),
    ("cross-entropy", "Cross-entropy of the labels", (("cross_entropy", ""),)),
    ("answers", "Answers to held-out prompts", (("answer_accuracy", "right"), ("answer_stopped", "that stop"))),
    ("answer-tokens", "Tokens of an answer, on average", (("answer_mean_tokens", ""),)),
    ("cut-completions", "Share of completions that were cut", (("cut", ""),)),
    ("no-signal", "Share of groups whose completions have one reward", (("groups_without_signal", ""),)),
    ("completion-tokens", "Tokens of a completion", (("completion_tokens", "mean"), ("longest_completion", "longest"))),
    ("entropy", "Entropy of the samples (nats a token)", (("entropy", ""),)),
    ("sampler-gap", "Log-probabilities, sampler against training (nats a token)", (("sampler_gap", ""),)),
    ("balance-loss", "Balance loss of the experts", (("balance_loss", ""),)),
    ("expert-entropy", "Entropy of the experts' load (1: even)", (("expert_entropy", ""),)),
)
"""Name and title of a chart, and its curves: field and name. Perplexity has none, because it repeats the loss."""


BY_SOURCE = "loss/"
"""Prefix of the field of a named source's loss."""


def figures_of(evals: Metrics) -> list[Figure]:
    """Returns the metrics that the evaluations have."""
    by_source = [
        Figure(field, f"Loss of {name}", _signed_number, better="lower") for field, name in sources_of(evals).items()
    ]
    return [figure for figure in FIGURES if any(figure.field in line for line in evals)] + by_source


def sources_of(lines: Metrics) -> dict[str, str]:
    """Returns the names of sources by the fields of their losses."""
    return {field: field.removeprefix(BY_SOURCE) for line in lines for field in line if field.startswith(BY_SOURCE)}


def figure_tile(evals: Metrics) -> Tile | None:
    """Returns a tile of the first metric, with the others' last values as its detail, or None without metrics."""
    figures = figures_of(evals)
    if not figures:
        return None
    first, *others = figures
    # The rewards have a chart of their own; the tile has their difference, the margin.
    last = {figure.title: finite(column(evals, figure.field))[-1:] for figure in others if "reward" not in figure.field}
    told = [f"{figure.title} {figure.written(*last[figure.title])}" for figure in others if last.get(figure.title)]
    values = [first.written(value) for value in column(evals, first.field)]
    plain = f"{first.plain}; {first.better} is better" if first.plain and first.better else first.plain
    return Tile(f"tile-{first.field}", first.title, values, plain, "; ".join(["on held-out data", *told]))


def figure_charts(train: Metrics, evals: Metrics, x_range: tuple[int, int]) -> list[Chart]:
    """Returns charts of the metrics over the steps: those of evaluations, and faint ones of training steps if any."""
    charts = []
    by_source = [
        (f"loss-of-{name}", f"Loss of {name}", ((field, ""),)) for field, name in sources_of([*train, *evals]).items()
    ]
    for name, title, curves in (*CHARTS, *by_source):
        series = []
        for (field, label), color in zip(curves, ("chart-1", "chart-2"), strict=False):
            series += _series(train, field, f"{label} in training".strip(), color, "faint")
            series += _series(evals, field, f"{label} held out".strip(), color, "points")
        if series:
            charts.append(Chart(name, title, series, [], x_range))
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
