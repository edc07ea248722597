"""Curves over the optimizer steps: smoothed, thinned out, and given to the page's script, which draws them.

Nothing is loaded from outside. Without scripts a page has the table of a chart's values.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeVar

from toolkit.pages.parts.number_text import MISSING, finite
from toolkit.pages.parts.page import ChartCard, Table

T = TypeVar("T")

SCRIPT = "curves.js"
"""Script of every page that has charts."""

WIDE_PX, NARROW_PX, SMALL_PX = (860, 264), (360, 240), (400, 180)
"""Width and height at which charts are drawn (CSS pixels); the browser scales them to their card."""

MARGINS_PX = (46, 12, 8, 36)
"""Left, right, top, bottom of the plotting area: fixed, so that the axes of all charts line up (CSS pixels)."""

DIGITS = 5
"""Significant digits of a value."""

MAX_POINTS = 800
"""The most points that a curve keeps, about; a chart is fewer pixels wide."""

MAX_TABLE_ROWS = 12
"""The most rows of a table of a chart's values or of evaluations; of more, it has evenly spaced ones with both ends."""

ONE_IN, FEWEST = 30, 2
"""Each point of a smoothed curve is a mean over 1 / `ONE_IN` of its points to each side, and over at least `FEWEST`."""

LEVEL = "on"
"""The name of this smoothing on a page, where the other choice is none."""


@dataclass(frozen=True)
class Series:
    """One curve; NaN in `ys` is a gap. `kind` is line, faint or points.

    Attributes:
        is_smooth: whether it is a smoothed curve, on top of the one that it is made of.
    """

    name: str
    xs: list[int]
    ys: list[float]
    variable: str
    kind: str = "line"
    is_smooth: bool = False


@dataclass(frozen=True)
class Chart:
    """Curves in one card; `gaps` are the steps at which a dashed line stands for a missing value."""

    name: str
    title: str
    series: list[Series]
    gaps: list[int]
    x_range: tuple[int, int]
    from_zero: bool = True
    sizes: tuple[tuple[int, int], ...] = (SMALL_PX,)

    def values(self) -> list[float]:
        return finite(value for series in self.series for value in series.ys)

    def is_logarithmic(self) -> bool:
        """Tells whether the axis is logarithmic, so that one spike of a loss or norm does not flatten the rest."""
        values = self.values()
        return not self.from_zero and bool(values) and min(values) > 0 and max(values) > 20 * statistics.median(values)


def smoothed(series: Series) -> list[Series]:
    """Returns the curve made faint with a smoothed one on top, or a short curve unchanged."""
    if len(series.ys) < 10:
        return [series]
    faint = replace(series, name=series.name or "raw", kind="faint")
    half = max(FEWEST, len(series.ys) // ONE_IN)
    xs, ys = _running_midmean(series.xs, series.ys, half)
    return [faint, Series(f"smoothed over {2 * half + 1}", xs, ys, series.variable, is_smooth=True)]


def _running_midmean(xs: list[int], ys: list[float], half: int) -> tuple[list[int], list[float]]:
    """Returns centred means over up to `2 * half + 1` values, at about `MAX_POINTS` of the points; gaps stay gaps.

    Each is the mean of the window's middle half by size: as smooth as a mean, and not lifted by a spike.
    The window narrows towards the start, where a loss falls too fast for a wide one to follow.
    """
    stride = math.ceil(len(xs) / MAX_POINTS)
    last = len(ys) - 1
    # The first point of a gap is kept; otherwise the thinned curve would run across the gap.
    centres = [index for index in range(len(ys)) if index in (0, last) or index % stride == 0 or _starts_gap(ys, index)]
    return [xs[index] for index in centres], [_midmean(ys, index, min(half, index)) for index in centres]


def _starts_gap(ys: list[float], index: int) -> bool:
    return math.isnan(ys[index]) and not math.isnan(ys[index - 1])


def _midmean(ys: list[float], index: int, reach: int) -> float:
    if math.isnan(ys[index]):
        return math.nan
    window = sorted(finite(ys[index - reach : index + reach + 1]))
    cut = len(window) // 4
    return statistics.fmean(window[cut : len(window) - cut])


def thinned(xs: list[int], ys: list[float]) -> tuple[list[int], list[float]]:
    """Returns at most about `MAX_POINTS` of the points: the extremes and the first gap of each bucket."""
    if len(xs) <= MAX_POINTS:
        return xs, ys
    # Each bucket keeps two points, its extremes, hence the 2.
    width = math.ceil(2 * len(xs) / MAX_POINTS)
    kept: set[int] = {0, len(xs) - 1}
    for start in range(0, len(xs), width):
        bucket = range(start, min(start + width, len(xs)))
        known = [index for index in bucket if math.isfinite(ys[index])]
        kept.update({min(known, key=ys.__getitem__), max(known, key=ys.__getitem__)} if known else ())
        kept.update([index for index in bucket if not math.isfinite(ys[index])][:1])
    order = sorted(kept)
    return [xs[index] for index in order], [ys[index] for index in order]


def chart_card(chart: Chart) -> ChartCard:
    """Returns the card of a chart, with a description, a table of its values, and the script's data."""
    # A curve without a name has no legend entry, because the title says what it is.
    keys = [(series.kind, series.variable, series.name) for series in chart.series]
    keys += [("gap", "warn", "not finite")] if chart.gaps else []
    kinds = ("wide", "narrow") if len(chart.sizes) > 1 else ("any",)
    sizes = list(zip(kinds, chart.sizes, strict=True)) if chart.values() else []
    spoken, table, data = _description(chart), _values_table(chart), curve_data(chart)
    return ChartCard(f"chart-{chart.name}", chart.title, keys, sizes, spoken, table, data)


def curve_data(chart: Chart) -> str:
    """Returns JSON from which the script draws a chart, or an empty text if it has no value."""
    if not chart.values():
        return ""
    data = {
        "title": chart.title,
        "margins": MARGINS_PX,
        "x": chart.x_range,
        "zero": chart.from_zero,
        "log": chart.is_logarithmic(),
        "gaps": chart.gaps[:: math.ceil(4 * len(chart.gaps) / MAX_POINTS) or 1],  # more marks would be a solid wall
        "levels": [LEVEL],
        "level": LEVEL,
        "curves": [_curve(series) for series in chart.series],
    }
    return json.dumps(data, separators=(",", ":"))


def _curve(series: Series) -> dict[str, Any]:
    """Returns a curve as JSON values: `steps` are the first step and then the distances, and gaps are null."""
    # A smoothed curve has no extremes to keep, and few points already.
    xs, ys = (series.xs, series.ys) if series.is_smooth else thinned(series.xs, series.ys)
    steps = [now - before for before, now in zip([0, *xs], xs, strict=False)]
    values = [float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None for value in ys]
    level = LEVEL if series.is_smooth else None
    kind = {"name": series.name, "color": series.variable, "kind": series.kind, "level": level}
    return {**kind, "steps": steps, "values": values}


def polylines(chart: Chart, series: Series, size: tuple[float, float]) -> list[list[tuple[float, float]]]:
    """Returns a curve's pieces between gaps in a drawing of `size` pixels, for what runs no scripts."""
    (first, last), values = chart.x_range, chart.values()
    low, high = min(values), max(values)
    xs, ys = thinned(series.xs, series.ys)
    points = [
        (
            round(size[0] * (x - first) / max(1, last - first), 1),
            round(size[1] * (high - y) / (high - low or 1), 1) if math.isfinite(y) else math.nan,
        )
        for x, y in zip(xs, ys, strict=True)
    ]
    return [list(piece) for gap, piece in groupby(points, lambda point: math.isnan(point[1])) if not gap]


def _description(chart: Chart) -> str:
    """Describes where each curve begins and ends, and its lowest and highest value."""
    ranges = []
    for series in chart.series:
        known = [(x, y) for x, y in zip(series.xs, series.ys, strict=True) if math.isfinite(y)]
        if known and series.kind != "faint":
            (first, before), (last, after), ys = known[0], known[-1], [y for _, y in known]
            ends = f"{before:.4g} at step {first:,}, {after:.4g} at step {last:,}"
            ranges.append(f"{series.name or 'values'}: {ends}, between {min(ys):.4g} and {max(ys):.4g}")
    return f"{chart.title} by step. {'; '.join(ranges)}"


def _values_table(chart: Chart) -> Table:
    """Returns a column for each curve, at up to `MAX_TABLE_ROWS` evenly spaced steps of the curve with the fewest."""
    shown = [series for series in chart.series if finite(series.ys)]
    # Curves of one or two evaluations do not choose the steps: they would hide the curve next to them.
    long = [series for series in shown if len(series.xs) > 2 or len(shown) == 1]
    steps = min(long, key=lambda series: (len(series.xs), series.kind != "points")).xs if long else []
    values = [dict(zip(series.xs, series.ys, strict=True)) for series in shown]
    rows = [
        (f"{step:,}", *(_cell(column.get(step, math.nan)) for column in values))
        for step in evenly_spaced(steps, MAX_TABLE_ROWS)
    ]
    return Table("", "", ("Step", *(series.name.capitalize() or chart.title for series in shown)), rows)


def evenly_spaced(items: Sequence[T], count: int) -> list[T]:
    """Returns up to `count` of the items, including the first and the last."""
    shown, last = min(len(items), count), len(items) - 1
    return [items[round(index * last / max(1, shown - 1))] for index in range(shown)]


def _cell(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else MISSING
