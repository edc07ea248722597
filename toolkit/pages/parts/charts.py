"""Curves over the optimizer steps: smoothed, thinned out, and drawn as SVG."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from toolkit.pages.parts.number_text import MISSING, finite, format_tick
from toolkit.pages.parts.page import ChartCard, Table
from toolkit.pages.parts.svg import COLOR_OF, SMALL_PX, Drawing, draw_marks, draw_svg, style_axes

T = TypeVar("T")

MAX_POINTS = 800
"""The most points that a curve keeps, about; a chart is fewer pixels wide."""

MAX_MARKERS = 40
"""The most evaluations that are drawn as dots; more would merge into one thick line."""

MAX_TABLE_ROWS = 12
"""The most rows of a table of a chart's values or of evaluations; of more, it has evenly spaced ones with both ends."""

SMOOTHING = {"light": (100, 1, MAX_POINTS), "middle": (30, 2, MAX_POINTS), "strong": (10, 4, MAX_POINTS // 4)}
"""Name -> how a curve is averaged: the fraction of its points to each side (1 / n), the fewest points to each side, and
about how many points the average has."""

MIDDLE = "middle"
"""The default smoothing."""

LARGEST_DRAWN = 1e60
"""Larger values are drawn at this one, so that neither a sum nor the margin of an axis overflows."""


@dataclass(frozen=True)
class Series:
    """One curve; NaN in `ys` is a gap. `kind` is line, faint or points.

    Attributes:
        raw: for a smoothed curve, the one that it is made of.
    """

    name: str
    xs: list[int]
    ys: list[float]
    variable: str
    kind: str = "line"
    raw: Series | None = None


@dataclass(frozen=True)
class Chart:
    """The input of `_draw_chart`; `gaps` are the steps at which a dashed line stands for a missing value."""

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


def drawable(values: list[float]) -> list[float]:
    """Clips values at `LARGEST_DRAWN`; gaps stay gaps."""
    return [value if math.isnan(value) else max(-LARGEST_DRAWN, min(LARGEST_DRAWN, value)) for value in values]


def smoothed(series: Series) -> list[Series]:
    """Returns the curve made faint with a smoothed one on top, or a short curve unchanged."""
    if len(series.ys) < 10:
        return [series]
    faint = replace(series, name=series.name or "raw", kind="faint")
    return [faint, midmeans(faint, MIDDLE)]


def midmeans(raw: Series, level: str) -> Series:
    """Smooths a curve by a level of `SMOOTHING`."""
    one_in, least, points = SMOOTHING[level]
    half = max(least, len(raw.ys) // one_in)
    xs, ys = _running_midmean(raw.xs, raw.ys, half, points)
    return Series(f"smoothed over {2 * half + 1}", xs, ys, raw.variable, raw=raw)


def _running_midmean(xs: list[int], ys: list[float], half: int, points: int) -> tuple[list[int], list[float]]:
    """Returns centred means over up to `2 * half + 1` values, at about `points` of the points; gaps stay gaps.

    Each is the mean of the window's middle half by size: as smooth as a mean, and not lifted by a spike.
    The window narrows towards the start, where a loss falls too fast for a wide one to follow.
    """
    stride = math.ceil(len(xs) / points)
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
    """Draws a chart, with a description and a table of its values; without values nothing is drawn."""
    # A curve without a name has no legend entry, because the title says what it is.
    keys = [(series.kind, series.variable, series.name) for series in chart.series]
    keys += [("gap", "warn", "not finite")] if chart.gaps else []
    kinds = ("wide", "narrow") if len(chart.sizes) > 1 else ("any",)
    sizes = zip(chart.sizes, kinds, strict=True) if chart.values() else ()
    drawings = [_draw_chart(chart, size, kind) for size, kind in sizes]
    remark = "(log)" if chart.is_logarithmic() else ""
    return ChartCard(
        f"chart-{chart.name}", chart.title, remark, keys, drawings, _description(chart), _values_table(chart)
    )


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
    # Curves of one or two evaluations do not choose the steps: they would hide the curve beside them.
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


def _draw_chart(chart: Chart, size: tuple[int, int], kind: str) -> Drawing:
    def paint(axes: Any) -> None:
        for series in chart.series:
            _draw_series(axes, series)
        # More marks would be a solid wall.
        draw_marks(axes, chart.gaps[:: math.ceil(4 * len(chart.gaps) / MAX_POINTS) or 1])
        style_axes(axes, "step")
        _scale_axes(axes, chart, num_x_ticks=10 if size[0] > SMALL_PX[0] else 6)

    return draw_svg(chart.name, size, paint, kind)


def _draw_series(axes: Any, series: Series) -> None:
    xs, ys = thinned(series.xs, series.ys)
    is_faint = series.kind == "faint"
    # Unclipped: a learning rate that ends at zero runs along the lower edge of its axes.
    style = {"color": COLOR_OF[series.variable], "alpha": 0.45 if is_faint else 1, "clip_on": False}
    has_dots = series.kind == "points" and len(xs) <= MAX_MARKERS
    axes.plot(xs, ys, linewidth=1 if is_faint else 2, marker="o" if has_dots else "", markersize=6, **style)
    axes.plot(*_lone_points(xs, ys), linestyle="none", marker="o", markersize=4, **style)


def _lone_points(xs: list[int], ys: list[float]) -> tuple[list[int], list[float]]:
    """Returns the points with a gap or an end on both sides, which a line does not show."""
    padded = [math.nan, *ys, math.nan]
    lone = [
        index
        for index, value in enumerate(ys)
        if math.isfinite(value) and math.isnan(padded[index]) and math.isnan(padded[index + 2])
    ]
    return [xs[index] for index in lone], [ys[index] for index in lone]


def _scale_axes(axes: Any, chart: Chart, num_x_ticks: int) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, ScalarFormatter

    first, last = chart.x_range
    margin = 0.015 * (last - first) or 0.5  # a single step stands in the middle
    axes.set_xlim(first - margin, last + margin)
    axes.xaxis.set_major_locator(MaxNLocator(num_x_ticks, integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(format_tick))
    if chart.is_logarithmic():
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(format_tick))
        return
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    # A loss of 2.0012 next to one of 2.0014 needs the digits that matplotlib derives from the tick spacing.
    axes.yaxis.set_major_formatter(FuncFormatter(format_tick) if chart.from_zero else ScalarFormatter(useOffset=False))
    if chart.from_zero:
        lowest, highest = min(0, *chart.values()), max(0, *chart.values())
        axes.set_ylim(1.12 * lowest, 1.12 * highest if highest > lowest else 1)
