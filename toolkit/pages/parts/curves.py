"""Embeds curves as data in their page, so that our script redraws them with values under the pointer.

Nothing is loaded from outside. Without scripts the drawing in the page stays.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

from toolkit.pages.parts.charts import MIDDLE, SMOOTHING, Chart, Series, chart_card, midmeans, thinned
from toolkit.pages.parts.page import ChartCard
from toolkit.pages.parts.svg import MARGINS_PX

SCRIPT = "curves.js"
"""Script of every page that has such a card."""

DIGITS = 5
"""Significant digits of a value."""


def curve_card(chart: Chart) -> ChartCard:
    """Returns the card of a chart, with the data for the script."""
    return replace(chart_card(chart), data=curve_data(chart))


def curve_data(chart: Chart) -> str:
    """Returns JSON from which the script draws a chart, or an empty text if it has no value."""
    if not chart.values():
        return ""
    curves = []
    for series in chart.series:
        curves.append(_curve(series, MIDDLE if series.raw else None))
        if series.raw is not None:
            others = [(midmeans(series.raw, level), level) for level in SMOOTHING if level != MIDDLE]
            # If the raw curve has no name, the smoothed one has the name of both.
            curves += [_curve(it if series.raw.name else replace(it, name=series.name), level) for it, level in others]
    data = {
        "title": chart.title,
        "margins": MARGINS_PX,
        "x": chart.x_range,
        "zero": chart.from_zero,
        "log": chart.is_logarithmic(),
        "gaps": chart.gaps,
        "levels": list(SMOOTHING),
        "level": MIDDLE,
        "curves": curves,
    }
    return json.dumps(data, separators=(",", ":"))


def _curve(series: Series, level: str | None) -> dict[str, Any]:
    """Returns a curve as JSON values: `steps` are the first step and then the distances, and gaps are null."""
    # A smoothed curve has no extremes to keep, and few points already.
    xs, ys = thinned(series.xs, series.ys) if series.raw is None else (series.xs, series.ys)
    steps = [now - before for before, now in zip([0, *xs], xs, strict=False)]
    values = [float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None for value in ys]
    kind = {"name": series.name, "color": series.variable, "kind": series.kind, "level": level}
    return {**kind, "steps": steps, "values": values}
