"""A page that compares runs: their curves in shared charts, and tables of their results and differences."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from toolkit.compare.compared import (
    ComparedRun,
    difference_table,
    figures_of_all,
    problem_lines,
    result_table,
    setup_table,
    shared_answers,
    step_of,
)
from toolkit.errors import listed
from toolkit.pages.parts.charts import Chart, Series, drawable, smoothed
from toolkit.pages.parts.curves import SCRIPT, curve_card
from toolkit.pages.parts.number_text import finite
from toolkit.pages.parts.page import ChartCard, Key, Note, Table, render, script, script_policy, write_page
from toolkit.pages.parts.run_metrics import Metrics, column
from toolkit.pages.parts.side_by_side import LONGEST
from toolkit.pages.parts.svg import NARROW_PX, WIDE_PX
from toolkit.terminal import format_time

COLORS = tuple(f"chart-{number}" for number in range(1, 9))
"""Colors of the runs in turn; the ninth run has the color of the first."""

NAMED = 4
"""The most runs that the title names."""


def write_comparison(path: Path, runs: Sequence[ComparedRun]) -> None:
    """Writes the page to `path` atomically."""
    write_page(path, render_comparison(runs, time.time()))


def render_comparison(runs: Sequence[ComparedRun], written: float) -> str:
    """Returns the whole page as HTML text; `written` is in seconds since 1970."""
    wide, small = _charts(runs)
    names, problems = [run.name for run in runs], problem_lines(runs)
    return render(
        "compare.html.jinja",
        title=listed(names, NAMED),
        written=format_time(written),
        runs=[_legend_entry(run, color) for run, color in _with_colors(runs)],
        problems=Note("problems", "Check these runs.", "", problems) if problems else None,
        wide_charts=wide,
        small_charts=small,
        results=result_table(runs),
        answers=[(prompt[-LONGEST:], texts) for prompt, texts in shared_answers(runs)],
        tables=[difference_table(runs), setup_table(runs)],
        policy=script_policy(SCRIPT) if wide else "",
        script=script(SCRIPT) if wide else "",
    )


def _with_colors(runs: Sequence[ComparedRun]) -> list[tuple[ComparedRun, str]]:
    return [(run, COLORS[number % len(COLORS)]) for number, run in enumerate(runs)]


def _legend_entry(run: ComparedRun, color: str) -> Key:
    return "line", color, f"{run.name}: {run.state}, step {step_of(run):,}"


def _charts(runs: Sequence[ComparedRun]) -> tuple[list[ChartCard], list[ChartCard]]:
    """Returns the charts with values: those as wide as the page, the first of them on top, and those side by side."""
    steps = [line["step"] for run in runs for line in run.metrics]
    if not steps:
        return [], []
    x_range = (min(steps), max(steps))
    charts = [
        _chart(runs, "training-loss", "Training loss", "loss", _training_curves, x_range, from_zero=False),
        _chart(runs, "held-out-loss", "Held-out loss", "loss", _evaluation_curves, x_range, from_zero=False),
        _chart(runs, "learning-rate", "Learning rate", "learning_rate", _step_curves, x_range),
    ]
    for number, figure in enumerate(figures_of_all(runs)):
        if figure.field != "perplexity":  # the loss once more
            charts.append(_chart(runs, f"figure-{number}", figure.title, figure.field, _evaluation_curves, x_range))
    charts += [
        _chart(runs, "grad-norm", "Gradient norm", "grad_norm", _training_curves, x_range, from_zero=False),
        _chart(runs, "throughput", "Tokens per second", "tokens_per_second", _training_curves, x_range),
    ]
    small = [chart for chart in charts if chart.values()]
    wide = [small.pop(0)] if small else []
    wide += [small.pop()] if len(small) % 2 else []  # it would leave a hole beside it
    wide = [replace(chart, sizes=(WIDE_PX, NARROW_PX)) for chart in wide]
    return [_card(chart) for chart in wide], [_card(chart) for chart in small]


def _card(chart: Chart) -> ChartCard:
    # Runs log at different steps, so a table of values would be mostly gaps.
    return replace(curve_card(chart), table=Table("", "", (), ()))


def _chart(
    runs: Sequence[ComparedRun],
    name: str,
    title: str,
    field: str,
    curves: Callable[[ComparedRun, str, str], list[Series]],
    x_range: tuple[int, int],
    *,
    from_zero: bool = True,
) -> Chart:
    series = [each for run, color in _with_colors(runs) for each in curves(run, field, color) if finite(each.ys)]
    return Chart(name, title, series, [], x_range, from_zero)


def _training_curves(run: ComparedRun, field: str, color: str) -> list[Series]:
    """Returns the raw curve, faint and without a name, and the smoothed one."""
    raw, *smooth = smoothed(_series(run, run.train, field, color, "line"))
    if not smooth:
        return [raw]
    nameless = replace(raw, name="")
    return [nameless, replace(smooth[0], name=run.name, raw=nameless)]


def _step_curves(run: ComparedRun, field: str, color: str) -> list[Series]:
    return [_series(run, run.train, field, color, "line")]


def _evaluation_curves(run: ComparedRun, field: str, color: str) -> list[Series]:
    return [_series(run, [line for line in run.evals if field in line], field, color, "points")]


def _series(run: ComparedRun, lines: Metrics, field: str, color: str, kind: str) -> Series:
    return Series(run.name, [line["step"] for line in lines], drawable(column(lines, field)), color, kind)
