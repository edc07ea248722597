"""`report.html`: one page that shows what a run did, with nothing loaded from outside.

`render_report` is a pure function from a `RunSummary` to HTML text. Charts are drawn by matplotlib as SVG and
inlined; their colours are CSS variables, so that the page follows the reader's light or dark setting.
"""

from __future__ import annotations

import html
import io
import math
import os
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

Metrics = list[dict[str, Any]]

NOT_A_NUMBER_BY_DESIGN = frozenset({"peak_device_bytes", "mfu"})
"""Fields that are null on a healthy run: no device memory on CPU, no known peak FLOP/s."""

MAX_POINTS = 800
"""A curve keeps at most about so many points; a chart is fewer pixels wide (points)."""

MAX_MARKERS = 40
"""Evaluations drawn as dots; more of them would run into one thick line (points)."""

LARGEST_DRAWN = 1e60
"""Values beyond it are drawn there, so that neither a sum nor the margin of an axis overflows."""

MAX_LISTED_STEPS = 20
"""Non-finite steps named in the note before it says how many more there are (steps)."""

MAX_EVALUATION_ROWS = 12
"""Evaluations in the table; of more, the first, the last and evenly spaced ones are shown (rows)."""

WIDE_PX, NARROW_PX, SMALL_PX = (860, 264), (360, 240), (400, 180)
"""Width and height at which charts are drawn (CSS pixels); the browser scales them to their card."""

MARGINS_PX = (46, 12, 8, 36)
"""Left, right, top, bottom of the plotting area: fixed, so that the axes of all charts line up (CSS pixels)."""

INK = {"#010101": "chart-1", "#020202": "chart-2", "#030303": "muted", "#040404": "grid", "#050505": "warn"}
"""Stand-in colours given to matplotlib, each replaced by the CSS variable of that name in the SVG."""

MISSING = "\N{EN DASH}"
"""Shown for a value that a run does not have."""

COLOR_OF = {variable: color for color, variable in INK.items()}


@dataclass(frozen=True)
class RunSummary:
    """What a report is made from; every text in it may come from a user and is escaped."""

    title: str
    recipe_yaml: str
    metrics: Metrics  # the lines of metrics.jsonl, in order
    data_report: dict[str, Any]  # nested plain values
    units: list[dict[str, Any]]  # rows of name, class_name, count, num_parameters, num_bytes
    facts: dict[str, str]  # strategy, ranks, precision, parameters, duration
    versions: dict[str, str]
    sample: tuple[str, str] | None  # prompt, continuation


def write_report(path: Path, summary: RunSummary) -> None:
    """Write the report to `path`; a reader sees the old file or the new one, never a part."""
    text = render_report(summary)
    # Not tempfile: its files are readable by their owner only, and a report is there to be shared.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # Generated text can hold half of a surrogate pair, which UTF-8 cannot encode.
        temporary.write_text(text, encoding="utf-8", errors="xmlcharrefreplace")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def render_report(summary: RunSummary) -> str:
    """The whole page as HTML text; the same summary always gives the same text."""
    train, evals = _split_lines(summary.metrics, "train"), _split_lines(summary.metrics, "eval")
    sections = [
        _header(summary),
        _headline(train, evals, summary.facts),
        _non_finite_note(_non_finite(train + evals)),
        _charts_section(train, evals),
        _sample_card(summary.sample),
        _tables_section(summary, evals),
        _recipe_card(summary.recipe_yaml),
    ]
    return _PAGE.format(title=_text(summary.title), style=_STYLE, body="\n".join(filter(None, sections)))


# ---- reading the metrics ----


def _split_lines(metrics: Metrics, split: str) -> Metrics:
    """The lines of one split by rising step; of a step that was trained again after a resume, the last."""
    by_step = {line["step"]: line for line in metrics if line.get("split") == split}
    return [by_step[step] for step in sorted(by_step)]


def _number(value: Any) -> float:
    """`value` as a finite float, or NaN: null, missing, and what JSON cannot say are all gaps."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return math.nan
    return float(value)


def _column(lines: Metrics, field: str) -> list[float]:
    return [_number(line.get(field)) for line in lines]


def _finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


@dataclass(frozen=True)
class _NonFinite:
    """One line of the metrics that held numbers which are not finite."""

    split: str
    step: int
    fields: tuple[str, ...]


def _non_finite(lines: Metrics) -> list[_NonFinite]:
    found = []
    for line in lines:
        fields = tuple(field for field, value in line.items() if _is_non_finite(line, field, value))
        if fields or line.get("non_finite"):
            found.append(_NonFinite(line["split"], line["step"], fields))
    return sorted(found, key=lambda item: item.step)


def _is_non_finite(line: dict[str, Any], field: str, value: Any) -> bool:
    if value is None:
        return (bool(line.get("non_finite")) or field == "loss") and field not in NOT_A_NUMBER_BY_DESIGN
    return isinstance(value, float) and not math.isfinite(value)


# ---- header and headline ----


def _header(summary: RunSummary) -> str:
    chips = [
        f"<li><span>{_text(name)}</span> {_text(value)}</li>"
        for name, value in summary.facts.items()
        if name.lower() != "duration"  # has a tile of its own
    ]
    facts = f'<ul class="chips">{"".join(chips)}</ul>' if chips else ""
    return f'<header><p class="eyebrow">Fine-tuning report</p><h1>{_text(summary.title)}</h1>{facts}</header>'


def _headline(train: Metrics, evals: Metrics, facts: dict[str, str]) -> str:
    tiles = [
        _eval_loss_tile(evals) if evals else _train_loss_tile(train),
        _perplexity_tile(evals),
        _tokens_tile(train),
        _duration_tile(train, facts),
        _throughput_tile(train),
        _memory_tile(train),
    ]
    return f'<section class="tiles" aria-label="Headline numbers">{"".join(filter(None, tiles))}</section>'


def _tile(name: str, label: str, value: str, note: str, delta: str = "") -> str:
    """`value` and `delta` are HTML, `label` and `note` plain text."""
    return (
        f'<div class="tile" id="{name}"><p class="label">{_text(label)}{delta}</p>'
        f'<p class="value">{value}</p><p class="note">{_text(note)}</p></div>'
    )


def _eval_loss_tile(evals: Metrics) -> str:
    losses = _column(evals, "loss")
    value = _before_after(losses, _format_loss)
    return _tile("tile-loss", "Held-out loss", value, _eval_note(evals, losses), _delta(losses))


def _train_loss_tile(train: Metrics) -> str:
    """Without held-out data the training loss stands in; single steps are noise, so ends are medians."""
    losses = _finite(_column(train, "loss"))
    if not losses:
        return _tile("tile-loss", "Training loss", MISSING, "no finite value logged")
    width = max(1, len(losses) // 10)
    ends = [statistics.median(losses[:width]), statistics.median(losses[-width:])][: len(losses)]
    note = "no held-out data" if width == 1 else f"medians of {width} logged steps; no held-out data"
    return _tile("tile-loss", "Training loss", _before_after(ends, _format_loss), note, _delta(ends))


def _perplexity_tile(evals: Metrics) -> str:
    if not evals:
        return ""
    value = _before_after(_column(evals, "perplexity"), _format_perplexity)
    return _tile("tile-perplexity", "Perplexity", value, "on held-out data")


def _before_after(values: Sequence[float], form: Callable[[float], str]) -> str:
    shown = [form(value) if math.isfinite(value) else "not finite" for value in values]
    if len(shown) == 1:
        return shown[0]
    return f'<span class="before">{shown[0]}</span> <span class="arrow">→</span> {shown[-1]}'


def _eval_note(evals: Metrics, losses: list[float]) -> str:
    first, last = evals[0]["step"], evals[-1]["step"]
    if len(evals) == 1:
        return f"one evaluation, at step {first:,}"
    finite = [(loss, line["step"]) for loss, line in zip(losses, evals, strict=True) if math.isfinite(loss)]
    best, best_step = min(finite, default=(math.nan, last))
    is_last_best = _format_loss(best) == _format_loss(losses[-1])
    best_note = "" if is_last_best else f"; best {_format_loss(best)} at step {best_step:,}"
    return f"step {first:,} → step {last:,}{best_note}"


def _delta(values: Sequence[float]) -> str:
    """The change from first to last in percent as a coloured pill; lower is better. Empty where it means nothing."""
    before, after = values[0], values[-1]
    if len(values) < 2 or math.isnan(before) or math.isnan(after) or before <= 0:
        return ""
    percent = round(100 * (after / before - 1), 1) or 0.0  # no "-0.0"
    if not math.isfinite(percent):
        return ""
    kind = "good" if percent < 0 else "bad" if percent > 0 else "same"
    sign = {"good": "▼ \N{MINUS SIGN}", "bad": "▲ +", "same": ""}[kind]
    return f' <span class="delta {kind}">{sign}{abs(percent):,.1f} %</span>'


def _tokens_tile(train: Metrics) -> str:
    last = train[-1] if train else {}
    tokens, samples, targets = (_number(last.get(key)) for key in ("tokens", "samples", "target_tokens"))
    parts = [(targets, "with loss"), (samples, "samples")]
    note = ", ".join(f"{_format_short(value)} {what}" for value, what in parts if math.isfinite(value))
    return _tile("tile-tokens", "Tokens trained", _format_short(tokens), note)


def _duration_tile(train: Metrics, facts: dict[str, str]) -> str:
    stated = next((value for name, value in facts.items() if name.lower() == "duration"), None)
    last_step = train[-1]["step"] if train else 0
    steps = f"{last_step:,} step{'' if last_step == 1 else 's'}"
    if stated is not None:
        return _tile("tile-duration", "Duration", _text(stated), steps)
    seconds = _finite(_column(train, "step_seconds"))
    value = _format_seconds(sum(seconds)) if seconds else MISSING
    return _tile("tile-duration", "Duration", value, f"{steps}; sum of the logged ones")


def _throughput_tile(train: Metrics) -> str:
    rates, mfu = _finite(_column(train, "tokens_per_second")), _finite(_column(train, "mfu"))
    note = f"median; MFU {100 * statistics.median(mfu):.1f} %" if mfu else "median over the run"
    value = _format_short(statistics.median(rates)) if rates else MISSING
    return _tile("tile-throughput", "Tokens per second", value, note)


def _memory_tile(train: Metrics) -> str:
    device, host = _finite(_column(train, "peak_device_bytes")), _finite(_column(train, "peak_host_bytes"))
    if device:
        note = f"on the device; host {_format_bytes(max(host))}" if host else "on the device"
        return _tile("tile-memory", "Peak memory", _format_bytes(max(device)), note)
    return _tile("tile-memory", "Peak memory", _format_bytes(max(host)) if host else MISSING, "on the host")


def _non_finite_note(found: list[_NonFinite]) -> str:
    if not found:
        return ""
    listed = [_describe_non_finite(item) for item in found[:MAX_LISTED_STEPS]]
    more = len(found) - len(listed)
    tail = f"<li>and {more:,} more</li>" if more else ""
    num_steps = len({item.step for item in found})
    noun = "step" if num_steps == 1 else "steps"
    return (
        f'<section class="warning" id="non-finite" role="note"><strong>Non-finite numbers at {num_steps:,} {noun}.'
        f"</strong> Curves have a gap there, marked by a dashed line.<ul>{''.join(listed)}{tail}</ul></section>"
    )


def _describe_non_finite(item: _NonFinite) -> str:
    where = f"step {item.step:,}" if item.split == "train" else f"evaluation at step {item.step:,}"
    what = ", ".join(item.fields).replace("_", " ")
    return f"<li>{_text(f'{where}: {what}' if what else where)}</li>"


# ---- charts ----


@dataclass(frozen=True)
class _Series:
    """One curve; `ys` has NaN where there is a gap. `kind` is line, faint or points."""

    name: str
    xs: list[int]
    ys: list[float]
    variable: str
    kind: str = "line"


@dataclass(frozen=True)
class _Chart:
    """What `_draw` needs; `gaps` are the steps at which a dashed line stands for a missing value."""

    name: str
    title: str
    series: list[_Series]
    gaps: list[int]
    x_range: tuple[int, int]
    from_zero: bool = True
    sizes: tuple[tuple[int, int], ...] = (SMALL_PX,)

    def values(self) -> list[float]:
        return _finite(value for series in self.series for value in series.ys)

    def is_logarithmic(self) -> bool:
        """One spike of a loss or a gradient norm must not flatten the rest of its curve."""
        values = self.values()
        return not self.from_zero and bool(values) and min(values) > 0 and max(values) > 20 * statistics.median(values)


def _charts_section(train: Metrics, evals: Metrics) -> str:
    if not train and not evals:
        return '<section class="card"><p class="muted">No steps were logged.</p></section>'
    steps = [line["step"] for line in train + evals]
    x_range = (min(steps), max(steps))
    small = [
        _train_chart("learning-rate", "Learning rate", train, "learning_rate", x_range),
        _train_chart("grad-norm", "Gradient norm", train, "grad_norm", x_range, smooth=True, from_zero=False),
        _train_chart("throughput", "Tokens per second", train, "tokens_per_second", x_range, smooth=True),
        _memory_chart(train, x_range),
    ]
    cards = "".join(_chart_card(chart) for chart in small if chart.values())
    return f'{_chart_card(_loss_chart(train, evals, x_range))}\n<div class="grid">{cards}</div>'


def _loss_chart(train: Metrics, evals: Metrics, x_range: tuple[int, int]) -> _Chart:
    eval_steps = [line["step"] for line in evals]
    held_out = _Series("held-out", eval_steps, _drawable(_column(evals, "loss")), "chart-2", "points")
    return _Chart(
        "loss",
        "Loss",
        [*_smoothed(_train_series("training", train, "loss")), *([held_out] if evals else [])],
        _gaps(train + evals, "loss"),
        x_range,
        from_zero=False,
        sizes=(WIDE_PX, NARROW_PX),
    )


def _train_chart(
    name: str,
    title: str,
    train: Metrics,
    field: str,
    x_range: tuple[int, int],
    *,
    smooth: bool = False,
    from_zero: bool = True,
) -> _Chart:
    series = _train_series("", train, field)
    return _Chart(name, title, _smoothed(series) if smooth else [series], _gaps(train, field), x_range, from_zero)


def _memory_chart(train: Metrics, x_range: tuple[int, int]) -> _Chart:
    series = [
        _train_series("device", train, "peak_device_bytes", scale=2**-30),
        _train_series("host", train, "peak_host_bytes", scale=2**-30, variable="chart-2"),
    ]
    return _Chart("memory", "Peak memory (GiB)", [item for item in series if _finite(item.ys)], [], x_range)


def _train_series(name: str, train: Metrics, field: str, *, scale: float = 1.0, variable: str = "chart-1") -> _Series:
    values = [value * scale for value in _column(train, field)]
    return _Series(name, [line["step"] for line in train], _drawable(values), variable)


def _drawable(values: list[float]) -> list[float]:
    """Values no larger than `LARGEST_DRAWN`; gaps stay gaps."""
    return [value if math.isnan(value) else max(-LARGEST_DRAWN, min(LARGEST_DRAWN, value)) for value in values]


def _gaps(lines: Metrics, field: str) -> list[int]:
    return sorted({item.step for item in _non_finite(lines) if field in item.fields})


def _smoothed(series: _Series) -> list[_Series]:
    """The curve made faint with a smooth one on top; a short curve as it is."""
    count = len(series.ys)
    if count < 10:
        return [series]
    half = max(2, count // 30)
    xs, ys = _running_midmean(series.xs, series.ys, half)
    faint = replace(series, name=series.name or "raw", kind="faint")
    return [faint, replace(series, name=f"smoothed over {2 * half + 1}", xs=xs, ys=ys)]


def _running_midmean(xs: list[int], ys: list[float], half: int) -> tuple[list[int], list[float]]:
    """Centred means over up to `2 * half + 1` values, at about `MAX_POINTS` of the points; gaps stay gaps.

    Of each window the middle half by size is averaged: as smooth as a mean, and one spike does not lift it.
    The window narrows towards the start, where a loss falls too fast for a wide one to follow.
    """
    stride = math.ceil(len(xs) / MAX_POINTS)
    last = len(ys) - 1
    centres = [index for index in range(len(ys)) if index in (0, last) or index % stride == 0 or _starts_gap(ys, index)]
    return [xs[index] for index in centres], [_midmean(ys, index, min(half, index)) for index in centres]


def _starts_gap(ys: list[float], index: int) -> bool:
    return math.isnan(ys[index]) and not math.isnan(ys[index - 1])


def _midmean(ys: list[float], index: int, reach: int) -> float:
    if math.isnan(ys[index]):
        return math.nan
    window = sorted(_finite(ys[index - reach : index + reach + 1]))
    cut = len(window) // 4
    return statistics.fmean(window[cut : len(window) - cut])


def _thinned(xs: list[int], ys: list[float]) -> tuple[list[int], list[float]]:
    """At most about `MAX_POINTS` of the points: the extremes and the first gap of each bucket."""
    if len(xs) <= MAX_POINTS:
        return xs, ys
    width = math.ceil(2 * len(xs) / MAX_POINTS)
    kept: set[int] = {0, len(xs) - 1}
    for start in range(0, len(xs), width):
        bucket = range(start, min(start + width, len(xs)))
        known = [index for index in bucket if math.isfinite(ys[index])]
        kept.update({min(known, key=ys.__getitem__), max(known, key=ys.__getitem__)} if known else ())
        kept.update([index for index in bucket if not math.isfinite(ys[index])][:1])
    order = sorted(kept)
    return [xs[index] for index in order], [ys[index] for index in order]


def _chart_card(chart: _Chart) -> str:
    legend = _legend(chart)
    scale = '<span class="muted"> (log)</span>' if chart.is_logarithmic() else ""
    head = f'<div class="chart-head"><h2>{_text(chart.title)}{scale}</h2>{legend}</div>'
    if not chart.values():
        return f'<section class="card" id="chart-{chart.name}">{head}<p class="muted">No finite value.</p></section>'
    sizes = ("wide", "narrow") if len(chart.sizes) > 1 else ("any",)
    drawings = [
        f'<div class="chart {kind}">{_draw(chart, size)}</div>' for kind, size in zip(sizes, chart.sizes, strict=True)
    ]
    return f'<section class="card" id="chart-{chart.name}">{head}{"".join(drawings)}</section>'


def _legend(chart: _Chart) -> str:
    keys = [(series.kind, series.variable, series.name) for series in chart.series]
    if chart.gaps:
        keys.append(("gap", "warn", "not finite"))
    items = [
        f'<li><i class="{kind}" style="color:var(--{variable})"></i>{_text(name)}</li>'
        for kind, variable, name in keys
        if name  # the title says what a nameless curve is
    ]
    return f'<ul class="legend">{"".join(items)}</ul>' if items else ""


def _draw(chart: _Chart, size: tuple[int, int]) -> str:
    """The chart as an `<svg>` element. Uses neither pyplot nor a GUI backend."""
    import matplotlib
    from matplotlib.figure import Figure

    buffer = io.StringIO()
    # Salted by the chart, ids of markers and clip paths are reproducible, and differ between charts of one page.
    options = {"svg.fonttype": "none", "svg.hashsalt": f"{chart.name}-{size[0]}", "font.size": 11.0}
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a user's matplotlibrc could ask for LaTeX, or for a style with its own colours
        matplotlib.rcParams.update(options)
        width, height = size
        figure = Figure(figsize=(width / 72, height / 72))  # an SVG has 72 units to the inch: one unit is one pixel
        left, right, top, bottom = MARGINS_PX
        axes = figure.add_axes((left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height))
        for series in chart.series:
            _draw_series(axes, series)
        _style_axes(axes, chart, is_wide=size[0] > SMALL_PX[0])
        figure.savefig(buffer, format="svg", transparent=True)
    return _inline_svg(buffer.getvalue(), f"{chart.title} by step", size)


def _draw_series(axes: Any, series: _Series) -> None:
    xs, ys = _thinned(series.xs, series.ys)
    is_faint = series.kind == "faint"
    # Unclipped: a learning rate that ends at zero runs along the lower edge of its axes.
    style = {"color": COLOR_OF[series.variable], "alpha": 0.45 if is_faint else 1, "clip_on": False}
    has_dots = series.kind == "points" and len(xs) <= MAX_MARKERS
    axes.plot(xs, ys, linewidth=1 if is_faint else 2, marker="o" if has_dots else "", markersize=6, **style)
    axes.plot(*_lone_points(xs, ys), linestyle="none", marker="o", markersize=4, **style)


def _lone_points(xs: list[int], ys: list[float]) -> tuple[list[int], list[float]]:
    """The points with a gap or an end on both sides, which a line does not show."""
    padded = [math.nan, *ys, math.nan]
    lone = [
        index
        for index, value in enumerate(ys)
        if math.isfinite(value) and math.isnan(padded[index]) and math.isnan(padded[index + 2])
    ]
    return [xs[index] for index in lone], [ys[index] for index in lone]


def _style_axes(axes: Any, chart: _Chart, *, is_wide: bool) -> None:
    gaps = chart.gaps[:: math.ceil(4 * len(chart.gaps) / MAX_POINTS) or 1]  # more would be a solid wall
    dashes = {"colors": COLOR_OF["warn"], "linewidth": 1, "linestyles": (0, (3, 3))}
    axes.vlines(gaps, 0, 1, transform=axes.get_xaxis_transform(), **dashes)
    axes.set_xlabel("step", color=COLOR_OF["muted"])
    axes.grid(axis="y", color=COLOR_OF["grid"], linewidth=1)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=COLOR_OF["muted"], length=0, pad=6)
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.spines["bottom"].set_color(COLOR_OF["grid"])
    _scale_axes(axes, chart, num_x_ticks=10 if is_wide else 6)


def _scale_axes(axes: Any, chart: _Chart, num_x_ticks: int) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, ScalarFormatter

    first, last = chart.x_range
    margin = 0.015 * (last - first) or 0.5  # a single step stands in the middle
    axes.set_xlim(first - margin, last + margin)
    axes.xaxis.set_major_locator(MaxNLocator(num_x_ticks, integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(_format_tick))
    if chart.is_logarithmic():
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(_format_tick))
        return
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    # A loss of 2.0012 next to one of 2.0014 needs the digits that matplotlib derives from the tick spacing.
    axes.yaxis.set_major_formatter(FuncFormatter(_format_tick) if chart.from_zero else ScalarFormatter(useOffset=False))
    if chart.from_zero:
        lowest, highest = min(0, *chart.values()), max(0, *chart.values())
        axes.set_ylim(1.12 * lowest, 1.12 * highest if highest > lowest else 1)


def _inline_svg(document: str, label: str, size: tuple[int, int]) -> str:
    """matplotlib's SVG file as an element of an HTML page.

    Dropped: the XML prologue and metadata (they name outside addresses), a style sheet for `*` that would hold for
    the whole page, and the ids of groups, which repeat from chart to chart. Markers and clip paths keep theirs.
    """
    body = document[document.index("<svg") : document.rindex("</svg>")]
    body = body[body.index(">") + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>|<style\b.*?</style>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r'<g id="[^"]*"', "<g", body).replace("xlink:href", "href")
    for color, variable in INK.items():
        body = body.replace(color, f"var(--{variable})")
    body = re.sub(r"\s*\n\s*", "\n", body)
    return f'<svg viewBox="0 0 {size[0]} {size[1]}" role="img" aria-label="{_text(label)}">{body}</svg>'


# ---- sample, tables, recipe ----


def _sample_card(sample: tuple[str, str] | None) -> str:
    if sample is None:
        return ""
    prompt, continuation = (_text(part) for part in sample)
    legend = '<ul class="legend"><li><i class="prompt"></i>prompt</li><li><i class="said"></i>model</li></ul>'
    return (
        f'<section class="card" id="sample"><div class="chart-head"><h2>Sample</h2>{legend}</div>'
        f'<div class="sample"><span class="prompt">{prompt}</span><span class="said">{continuation}</span></div>'
        "</section>"
    )


def _tables_section(summary: RunSummary, evals: Metrics) -> str:
    data = [(key, _format_value(key, value)) for key, value in _flattened(summary.data_report)]
    left = _table_card("data", "Data", (), data)
    right = _table_card("evaluations", "Evaluations", ("Step", "Loss", "Perplexity"), _evaluation_rows(evals))
    right += _table_card("versions", "Versions and machine", (), list(summary.versions.items()))
    columns = "".join(f"<div>{column}</div>" for column in (left, right) if column)
    head = ("Unit", "Class", "Count", "Parameters", "Size")
    units = _table_card("units", "FSDP units", head, _unit_rows(summary.units))
    return f'<div class="grid">{columns}</div>{units}'


def _table_card(name: str, title: str, head: tuple[str, ...], rows: Sequence[Sequence[str]]) -> str:
    """A table in a card, or nothing without rows; cells are plain text."""
    if not rows:
        return ""
    titles = f"<thead>{_row('th', head)}</thead>" if head else ""
    body = "".join(_row("td", row) for row in rows)
    return (
        f'<section class="card" id="{name}"><h2>{_text(title)}</h2>'
        f'<div class="scroll"><table>{titles}<tbody>{body}</tbody></table></div></section>'
    )


def _row(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{_text(cell)}</{tag}>' for cell in cells)}</tr>"


def _evaluation_rows(evals: Metrics) -> list[tuple[str, str, str]]:
    last = len(evals) - 1
    shown = min(len(evals), MAX_EVALUATION_ROWS)
    picked = [evals[round(index * last / max(1, shown - 1))] for index in range(shown)]
    rows = zip(picked, _column(picked, "loss"), _column(picked, "perplexity"), strict=True)
    return [
        (f"{line['step']:,}", _format_loss(loss), _format_perplexity(perplexity)) for line, loss, perplexity in rows
    ]


def _unit_rows(units: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    return [
        (
            str(unit["name"]),
            str(unit["class_name"]),
            f"{unit['count']:,}",
            f"{unit['num_parameters']:,}",
            _format_bytes(unit["num_bytes"]),
        )
        for unit in units
    ]


def _flattened(value: Any, key: str = "") -> list[tuple[str, Any]]:
    """Nested mappings, and lists of mappings, as rows of a dotted key and a plain value."""
    if isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list | tuple) and any(isinstance(item, dict | list | tuple) for item in value):
        children = list(enumerate(value))
    else:
        return [(key, value)]
    return [row for name, child in children for row in _flattened(child, f"{key}.{name}" if key else str(name))]


def _recipe_card(recipe_yaml: str) -> str:
    if not recipe_yaml.strip():
        return ""
    lines = "\n".join(_highlighted(line) for line in recipe_yaml.strip("\n").split("\n"))
    return f'<section class="card" id="recipe"><h2>Recipe</h2><pre class="scroll"><code>{lines}</code></pre></section>'


def _highlighted(line: str) -> str:
    """One line of YAML, its key or comment in a colour of its own."""
    if line.lstrip().startswith("#"):
        return f'<span class="comment">{_text(line)}</span>'
    match = re.match(r"(\s*(?:- )*)([\w.-]+)(:(?:\s.*)?)$", line)
    if match is None:
        return _text(line)
    indent, key, rest = (_text(part) for part in match.groups())
    return f'{indent}<span class="key">{key}</span>{rest}'


# ---- plain values as text ----


def _text(value: object) -> str:
    """Escaped for HTML text and attributes; NUL, which HTML forbids, becomes the replacement character."""
    return html.escape(str(value).replace("\0", "\ufffd"))


def _format_loss(value: float) -> str:
    if not math.isfinite(value):
        return "not finite"
    return f"{value:.3f}" if value == 0 or 0.01 <= abs(value) < 1e4 else f"{value:.3g}"


def _format_perplexity(value: float) -> str:
    if not math.isfinite(value):
        return "not finite"
    return _three_digits(value) if value < 1000 else _format_short(value)


def _format_short(value: float) -> str:
    """Three digits, with k, M, G or T for large values; whole numbers below 10,000 as they are."""
    if not math.isfinite(value):
        return MISSING
    if abs(value) >= 1e15:
        return f"{value:.2e}"
    for start, scale, suffix in ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= start:
            return f"{_three_digits(value / scale)} {suffix}"
    return f"{value:,.0f}" if value == int(value) else _three_digits(value)


def _three_digits(value: float) -> str:
    """Fixed point, unlike the format `.3g`, which writes 999.7 as 1e+03 and 30.0 as 30."""
    decimals = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:,.{decimals}f}"


def _format_tick(value: float, _position: int | None = None) -> str:
    for scale, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.10g}{suffix}"
    if 0 < abs(value) < 1e-2:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.4g}"


def _format_bytes(value: float) -> str:
    for scale, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= scale:
            return f"{_three_digits(value / scale)} {unit}"
    return f"{value:,.0f} B"


def _format_seconds(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.3g} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60:02d} min"


def _format_value(key: str, value: Any) -> str:
    """A value of the data report; its unit stands at the end of its key."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(str(item) for item in value) or MISSING
    if isinstance(value, int | float) and key.endswith("_bytes"):
        return _format_bytes(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# ---- the page ----

# The policy makes the browser refuse whatever would come from outside, also if an escape were forgotten.
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""

_STYLE = """
:root {
  --page: #f6f6f3; --card: #ffffff; --ink: #16181d; --soft: #4b505a; --muted: #71757f; --grid: #e6e6e1;
  --edge: #e4e4df; --chart-1: #2a6fdb; --chart-2: #e0602a; --warn: #b97a00; --warn-page: #fff7e3; --good: #12703f;
  --good-page: #e2f4e9; --bad: #b3261e; --bad-page: #fce8e6; --tint: #eef4fd;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #111316; --card: #1a1d21; --ink: #f1f2f4; --soft: #bfc3ca; --muted: #979ca6; --grid: #2d3136;
    --edge: #2a2e33; --chart-1: #5b9bf5; --chart-2: #f0834f; --warn: #e0a93a; --warn-page: #2a2313; --good: #6fd19b;
    --good-page: #16301f; --bad: #f2938c; --bad-page: #3a1d1b; --tint: #1b2738;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink); -webkit-text-size-adjust: 100%;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 1080px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -.02em; margin: 4px 0 16px; overflow-wrap: anywhere; }
h2 { font-size: 15px; font-weight: 600; margin: 0; }
h2 .muted { font-weight: 400; font-size: 13px; }
p { margin: 0; }
.eyebrow { color: var(--muted); font-size: 13px; }
.muted { color: var(--muted); }
ul { list-style: none; margin: 0; padding: 0; }
.chips { display: flex; flex-wrap: wrap; gap: 8px; }
.chips li {
  background: var(--card); border: 1px solid var(--edge); border-radius: 999px; padding: 3px 12px; font-size: 13px;
  overflow-wrap: anywhere;
}
.chips span { color: var(--muted); margin-right: 4px; }
.tiles { display: flex; flex-wrap: wrap; gap: 16px; margin-top: 24px; }
.card, .tile { background: var(--card); border: 1px solid var(--edge); border-radius: 12px; min-width: 0; }
.tile { padding: 16px 18px; flex: 1 1 30%; }
.label { color: var(--soft); font-size: 13px; display: flex; justify-content: space-between; gap: 8px; }
.value { font-size: 26px; line-height: 1.3; font-weight: 600; letter-spacing: -.02em; overflow-wrap: anywhere; }
.value .before, .value .arrow { color: var(--muted); font-weight: 400; }
.note { color: var(--muted); font-size: 13px; }
.delta {
  font-size: 12px; line-height: 20px; font-weight: 600; white-space: nowrap; border-radius: 999px; padding: 0 8px;
}
.delta.good { color: var(--good); background: var(--good-page); }
.delta.bad { color: var(--bad); background: var(--bad-page); }
.delta.same { color: var(--soft); background: var(--page); }
.warning {
  margin-top: 16px; padding: 12px 18px; border-radius: 12px; background: var(--warn-page); font-size: 14px;
  border: 1px solid var(--warn);
}
.warning ul { display: flex; flex-wrap: wrap; gap: 0 18px; color: var(--soft); }
.card { padding: 18px; margin-top: 16px; }
.chart-head { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 4px 16px; margin-bottom: 10px; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; color: var(--soft); font-size: 13px; }
.legend li { display: flex; align-items: center; gap: 6px; }
.legend i { width: 16px; height: 0; border-top: 2px solid currentColor; }
.legend i.faint { opacity: .45; }
.legend i.gap { border-top-style: dashed; }
.legend i.points { width: 9px; height: 9px; border: 0; border-radius: 50%; background: currentColor; }
.legend i.prompt, .legend i.said { width: 12px; height: 12px; border: 1px solid var(--muted); border-radius: 3px; }
.legend i.said { background: var(--tint); border-color: var(--chart-1); }
.chart svg { display: block; width: 100%; height: auto; overflow: visible; stroke-linejoin: round; }
.chart svg text { font-family: inherit !important; font-variant-numeric: tabular-nums; }
.chart.narrow { display: none; }
.grid > div { min-width: 0; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 0 16px; }
.scroll { overflow: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; margin-top: 8px; }
th { text-align: left; font-weight: 500; font-size: 13px; color: var(--muted); }
th, td { padding: 6px 14px 6px 0; border-bottom: 1px solid var(--edge); vertical-align: top; }
tbody tr:last-child td { border-bottom: 0; }
td { overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
td:first-child { color: var(--soft); overflow-wrap: normal; }
th:last-child, td:last-child { padding-right: 0; text-align: right; }
#units td:first-child, #data td:first-child, pre, .sample {
  font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
}
#units td:first-child, #data td:first-child { font-size: 13px; }
#units .scroll { max-height: 480px; }
#units td { overflow-wrap: normal; }
#units th:nth-child(n+3), #units td:nth-child(n+3) { text-align: right; white-space: nowrap; }
#evaluations th, #evaluations td { text-align: right; }
#evaluations th:first-child, #evaluations td:first-child { text-align: left; }
.sample { font-size: 14px; line-height: 1.65; white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: plaintext; }
.sample .prompt { color: var(--muted); }
.sample .said { background: var(--tint); border-radius: 3px; padding: 2px 0; -webkit-box-decoration-break: clone; }
pre { margin: 10px 0 0; font-size: 13px; line-height: 1.6; }
pre .key { color: var(--chart-1); }
pre .comment { color: var(--muted); }
@media (max-width: 700px) {
  main { padding: 24px 14px 40px; }
  h1 { font-size: 24px; }
  .tiles { gap: 10px; }
  .tile { flex-basis: 40%; padding: 12px 14px; }
  #tile-loss, #tile-perplexity { flex-basis: 100%; }
  .value { font-size: 22px; }
  .card { padding: 14px; margin-top: 10px; }
  .chart.wide { display: none; }
  .chart.narrow { display: block; }
}
@media print { .card, .tile { break-inside: avoid; } }
"""
