"""What a notebook shows of a run: a bar and the curve of the loss while it runs, and its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from toolkit.pages.parts.charts import polylines
from toolkit.pages.parts.page import render
from toolkit.pages.parts.run_metrics import Metrics, last_step, split_lines
from toolkit.pages.parts.story import read_story
from toolkit.pages.run_page import lead_of, main_chart, progress_of
from toolkit.terminal import clock

SIZE_PX = (700, 220)
"""Width and height of the curve (CSS pixels)."""

Output = dict[str, str]
"""An output as text and as HTML, by MIME type."""

Told = Callable[[Metrics], list[str]]
"""What a run's records say last."""


def curve_of(metrics: Metrics) -> dict[str, Any] | None:
    """Returns the curve of what says how the run goes, as `notebook.html.jinja` takes it; None before there is any."""
    train, evals = split_lines(metrics, "train"), split_lines(metrics, "eval")
    chart = main_chart(train, evals) if train or evals else None
    if chart is None or not chart.values():
        return None
    lines = [
        (series.variable, series.kind == "faint", " ".join(f"{x:g},{y:g}" for x, y in piece))
        for series in chart.series
        for piece in polylines(chart, series, SIZE_PX)
    ]
    legend = [(series.variable, series.name) for series in chart.series]
    ends = [f"{value:.4g}" for value in (max(chart.values()), min(chart.values()))]
    told = {"title": chart.title, "legend": legend, "ends": ends, "steps": chart.x_range}
    return {**told, "size": SIZE_PX, "lines": lines}


def progress_output(
    metrics: Metrics, num_steps: int, left: float | None, curve: Any, summary: str = "", told_of: Told = progress_of
) -> Output:
    """Returns a run's progress and its last losses.

    Args:
        left: seconds to its end, if they are known.
        curve: that of `curve_of`.
        summary: what it printed before its first step.
        told_of: returns the last figures.
    """
    step = last_step(metrics)
    told = [f"step {step:,} of {num_steps:,}"]
    told += [f"{clock(left)} left"] if left else []
    text = ", ".join([*told, *told_of(metrics)])
    return _output(text, text=text, step=step, num_steps=num_steps, curve=curve, summary=summary)


def result_output(
    metrics: Metrics, output_dir: Path, export_dir: Path | None, doubts: Sequence[str], summary: str = ""
) -> Output:
    """Returns the result of a run: its losses, warnings, and the paths of report and export."""
    story = read_story(output_dir)
    doubts = list(dict.fromkeys([*doubts, *story.told()]))
    weights = [f"{name}: {told}" for name, told in story.weights().items()]
    lead = "\n".join(filter(None, [lead_of(metrics, story.outcome, story.limits), *weights]))
    places = [("report", str(output_dir / "report.html")), ("model", str(export_dir or ""))]
    found = [(name, path) for name, path in places if path]
    text = "\n".join(filter(None, [lead, *doubts, *(f"{name}: {path}" for name, path in found)]))
    return _output(text, text=lead, curve=curve_of(metrics), doubts=doubts, places=found, summary=summary)


def _output(plain: str, **values: Any) -> Output:
    summary = values.setdefault("summary", "")
    # Warnings are shown without a click.
    warnings = [line.strip() for line in summary.splitlines() if line.lstrip().startswith("warning:")]
    shown = {"step": None, "num_steps": 0, "doubts": (), "places": (), "warnings": warnings, **values}
    return {"text/plain": plain, "text/html": render("notebook.html.jinja", **shown)}
