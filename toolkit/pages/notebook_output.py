"""What a notebook shows of a run: a bar and the curve of the loss while it runs, and its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.pages.parts.charts import chart_card
from toolkit.pages.parts.number_text import finite
from toolkit.pages.parts.page import ChartCard, render
from toolkit.pages.parts.run_metrics import Metrics, column, samples_itself, split_lines
from toolkit.pages.run_page import lead_of, main_chart
from toolkit.terminal import clock

SIZE_PX = (700, 220)
"""Width and height of the curve (CSS pixels)."""

Output = dict[str, str]
"""An output as text and as HTML, by MIME type."""


def curve_of(metrics: Metrics) -> ChartCard | None:
    """Returns the chart of the loss in training and on held-out data, or None before there is any."""
    train, evals = split_lines(metrics, "train"), split_lines(metrics, "eval")
    if not train and not evals:
        return None
    return chart_card(replace(main_chart(train, evals), name="notebook-loss", sizes=(SIZE_PX,)))


def progress_output(
    metrics: Metrics, num_steps: int, seconds_left: float | None, curve: ChartCard | None, summary: str = ""
) -> Output:
    """Returns a run's progress and its last losses; `summary` is the summary that it printed before its first step."""
    train, evals = split_lines(metrics, "train"), split_lines(metrics, "eval")
    step = max((line["step"] for line in train + evals), default=0)
    told = [f"step {step:,} of {num_steps:,}"]
    told += [f"{clock(seconds_left)} left"] if seconds_left else []
    main = "reward" if samples_itself(train) else "loss"
    told += [f"{main} {value:.4f}" for value in finite(column(train, main))[-1:]]
    told += [f"held-out loss {loss:.4f}" for loss in finite(column(evals, "loss"))[-1:]]
    text = ", ".join(told)
    return _output(text, text=text, step=step, num_steps=num_steps, curve=curve, summary=summary)


def result_output(
    metrics: Metrics, output_dir: Path, export_dir: Path | None, doubts: Sequence[str], summary: str = ""
) -> Output:
    """Returns the result of a run: its losses, and the paths of report and export."""
    lead = lead_of(split_lines(metrics, "train"), split_lines(metrics, "eval"))
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
