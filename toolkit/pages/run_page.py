"""`report.html`: one page that shows what a run did, with nothing loaded from outside.

`render_report` is a pure function from a `RunSummary` to HTML text. What is about the data in detail has a page of
its own, to which this one links.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.pages.data_page import DATA_PAGE, SUMMARY_FACTS, dropped_table, split_table, window_remark
from toolkit.pages.page import (
    COLOR_OF,
    MISSING,
    NARROW_PX,
    SMALL_PX,
    WIDE_PX,
    card,
    card_head,
    draw_marks,
    draw_svg,
    escaped,
    finite,
    format_bytes,
    format_seconds,
    format_short,
    format_tick,
    grid,
    header,
    heading,
    legend,
    number,
    render_page,
    style_axes,
    table_card,
    three_digits,
    tile,
    tiles,
    warning,
    write_page,
)

Metrics = list[dict[str, Any]]

NOT_A_NUMBER_BY_DESIGN = frozenset({"peak_device_bytes", "planned_peak_bytes", "mfu"})
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


@dataclass(frozen=True)
class RunSummary:
    """What a report is made from; every text in it may come from a user and is escaped."""

    title: str
    recipe_yaml: str
    metrics: Metrics  # the lines of metrics.jsonl, in order
    data_report: dict[str, Any]  # as `render_data_page` takes it; empty without one
    units: list[dict[str, Any]]  # rows of name, class_name, count, num_parameters, num_bytes
    facts: dict[str, str]  # strategy, ranks, precision, parameters, duration
    versions: dict[str, str]
    sample: tuple[str, str] | None  # prompt, continuation
    step_seconds: dict[str, float] | None = None  # of a profiled step, by what took them


def write_report(path: Path, summary: RunSummary) -> None:
    """Write the report to `path`; a reader sees the old file or the new one, never a part."""
    write_page(path, render_report(summary))


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
    return render_page(summary.title, sections, _STYLE)


# ---- reading the metrics ----


def _split_lines(metrics: Metrics, split: str) -> Metrics:
    """The lines of one split by rising step; of a step that was trained again after a resume, the last."""
    by_step = {line["step"]: line for line in metrics if line.get("split") == split}
    return [by_step[step] for step in sorted(by_step)]


def _column(lines: Metrics, field: str) -> list[float]:
    return [number(line.get(field)) for line in lines]


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
    # The duration has a tile of its own.
    facts = [(name, value) for name, value in summary.facts.items() if name.lower() != "duration"]
    return header("Fine-tuning report", summary.title, facts)


def _headline(train: Metrics, evals: Metrics, facts: dict[str, str]) -> str:
    shown = [
        _eval_loss_tile(evals) if evals else _train_loss_tile(train),
        _perplexity_tile(evals),
        _tokens_tile(train),
        _duration_tile(train, facts),
        _throughput_tile(train),
        _memory_tile(train),
    ]
    return tiles(shown)


def _eval_loss_tile(evals: Metrics) -> str:
    losses = _column(evals, "loss")
    value = _before_after(losses, _format_loss)
    return tile("tile-loss", "Held-out loss", value, _eval_note(evals, losses), _delta(losses))


def _train_loss_tile(train: Metrics) -> str:
    """Without held-out data the training loss stands in; single steps are noise, so ends are medians."""
    losses = finite(_column(train, "loss"))
    if not losses:
        return tile("tile-loss", "Training loss", MISSING, "no finite value logged")
    width = max(1, len(losses) // 10)
    ends = [statistics.median(losses[:width]), statistics.median(losses[-width:])][: len(losses)]
    note = "no held-out data" if width == 1 else f"medians of {width} logged steps; no held-out data"
    return tile("tile-loss", "Training loss", _before_after(ends, _format_loss), note, _delta(ends))


def _perplexity_tile(evals: Metrics) -> str:
    if not any("perplexity" in line for line in evals):
        return _accuracy_tile(evals)
    value = _before_after(_column(evals, "perplexity"), _format_perplexity)
    return tile("tile-perplexity", "Perplexity", value, "on held-out data")


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


def _accuracy_tile(evals: Metrics) -> str:
    if not any("accuracy" in line for line in evals):
        return ""
    value = _before_after(_column(evals, "accuracy"), lambda share: f"{share:.1%}")
    f1 = finite(_column(evals, "f1_macro"))
    return tile("tile-accuracy", "Accuracy", value, f"on held-out data; F1 {f1[-1]:.1%}" if f1 else "on held-out data")


def _tokens_tile(train: Metrics) -> str:
    last = train[-1] if train else {}
    tokens, samples, targets = (number(last.get(key)) for key in ("tokens", "samples", "target_tokens"))
    parts = [(targets, "with loss"), (samples, "samples")]
    note = ", ".join(f"{format_short(value)} {what}" for value, what in parts if math.isfinite(value))
    return tile("tile-tokens", "Tokens trained", format_short(tokens), note)


def _duration_tile(train: Metrics, facts: dict[str, str]) -> str:
    stated = next((value for name, value in facts.items() if name.lower() == "duration"), None)
    last_step = train[-1]["step"] if train else 0
    steps = f"{last_step:,} step{'' if last_step == 1 else 's'}"
    if stated is not None:
        return tile("tile-duration", "Duration", escaped(stated), steps)
    seconds = finite(_column(train, "step_seconds"))
    value = format_seconds(sum(seconds)) if seconds else MISSING
    return tile("tile-duration", "Duration", value, f"{steps}; sum of the logged ones")


def _throughput_tile(train: Metrics) -> str:
    rates, mfu = finite(_column(train, "tokens_per_second")), finite(_column(train, "mfu"))
    note = f"median; MFU {100 * statistics.median(mfu):.1f} %" if mfu else "median over the run"
    value = format_short(statistics.median(rates)) if rates else MISSING
    return tile("tile-throughput", "Tokens per second", value, note)


def _memory_tile(train: Metrics) -> str:
    device, host = finite(_column(train, "peak_device_bytes")), finite(_column(train, "peak_host_bytes"))
    if device:
        note = f"on the device; host {format_bytes(max(host))}" if host else "on the device"
        return tile("tile-memory", "Peak memory", format_bytes(max(device)), note)
    return tile("tile-memory", "Peak memory", format_bytes(max(host)) if host else MISSING, "on the host")


def _non_finite_note(found: list[_NonFinite]) -> str:
    if not found:
        return ""
    listed = [_describe_non_finite(item) for item in found[:MAX_LISTED_STEPS]]
    more = len(found) - len(listed)
    num_steps = len({item.step for item in found})
    noun = "step" if num_steps == 1 else "steps"
    return warning(
        "non-finite",
        f"Non-finite numbers at {num_steps:,} {noun}.",
        " Curves have a gap there, marked by a dashed line.",
        [*listed, *([f"and {more:,} more"] if more else [])],
    )


def _describe_non_finite(item: _NonFinite) -> str:
    where = f"step {item.step:,}" if item.split == "train" else f"evaluation at step {item.step:,}"
    what = ", ".join(item.fields).replace("_", " ")
    return f"{where}: {what}" if what else where


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
        return finite(value for series in self.series for value in series.ys)

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
    cards = [_chart_card(chart) for chart in small if chart.values()]
    return f"{_chart_card(_loss_chart(train, evals, x_range))}\n{grid(cards)}"


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
        _train_series("device, planned", train, "planned_peak_bytes", scale=2**-30, variable="muted"),
    ]
    return _Chart("memory", "Peak memory (GiB)", [item for item in series if finite(item.ys)], [], x_range)


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
    window = sorted(finite(ys[index - reach : index + reach + 1]))
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
    name = f"chart-{chart.name}"
    head = card_head(chart.title, _legend(chart), "(log)" if chart.is_logarithmic() else "")
    if not chart.values():
        return card(name, f'{head}<p class="muted">No finite value.</p>')
    sizes = ("wide", "narrow") if len(chart.sizes) > 1 else ("any",)
    drawings = [
        f'<div class="chart {kind}">{_draw(chart, size)}</div>' for kind, size in zip(sizes, chart.sizes, strict=True)
    ]
    return card(name, f"{head}{''.join(drawings)}")


def _legend(chart: _Chart) -> str:
    """Nothing for a nameless curve: the title says what it is."""
    keys = [(series.kind, series.variable, series.name) for series in chart.series]
    return legend([*keys, *([("gap", "warn", "not finite")] if chart.gaps else [])])


def _draw(chart: _Chart, size: tuple[int, int]) -> str:
    def paint(axes: Any) -> None:
        for series in chart.series:
            _draw_series(axes, series)
        # More marks would be a solid wall.
        draw_marks(axes, chart.gaps[:: math.ceil(4 * len(chart.gaps) / MAX_POINTS) or 1])
        style_axes(axes, "step")
        _scale_axes(axes, chart, num_x_ticks=10 if size[0] > SMALL_PX[0] else 6)

    return draw_svg(chart.name, f"{chart.title} by step", size, paint)


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


def _scale_axes(axes: Any, chart: _Chart, num_x_ticks: int) -> None:
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


# ---- sample, tables, recipe ----


def _sample_card(sample: tuple[str, str] | None) -> str:
    if sample is None:
        return ""
    prompt, continuation = (escaped(part) for part in sample)
    keys = '<ul class="legend"><li><i class="prompt"></i>prompt</li><li><i class="said"></i>model</li></ul>'
    text = f'<div class="sample"><span class="prompt">{prompt}</span><span class="said">{continuation}</span></div>'
    return card("sample", f"{card_head('Sample', keys)}{text}")


def _tables_section(summary: RunSummary, evals: Metrics) -> str:
    left = _data_card(summary.data_report)
    right = table_card("evaluations", "Evaluations", ("Step", "Loss", "Perplexity"), _evaluation_rows(evals), "numbers")
    right += table_card("versions", "Versions and machine", (), list(summary.versions.items()))
    right += _profile_card(summary.step_seconds)
    columns = [f"<div>{column}</div>" for column in (left, right) if column]
    head = ("Unit", "Class", "Count", "Parameters", "Size")
    units = table_card("units", "FSDP units", head, _unit_rows(summary.units))
    return f"{grid(columns)}{units}"


TIME_TAKERS = {
    "compute": "compute",
    "communication": "communication, not behind compute",
    "data": "waiting for data",
    "host": "host: updates and offload there, Python",
}
"""What can take a step's time -> its name in the table."""


def _profile_card(seconds: dict[str, float] | None) -> str:
    if not seconds:
        return ""
    whole = sum(seconds.values())
    rows = [(TIME_TAKERS.get(kind, kind), f"{part:.4f}", f"{part / whole:.1%}") for kind, part in seconds.items()]
    rows.append(("a profiled step", f"{whole:.4f}", "100.0%"))
    return table_card("profile", "Where the time went", ("", "Seconds", "Share"), rows, "numbers", "mean over ranks")


def _data_card(report: dict[str, Any]) -> str:
    """The numbers of each split and why rows were dropped; the rest is on the page that it links to."""
    if not report:
        return ""
    facts, dropped = split_table(report, SUMMARY_FACTS), dropped_table(report)
    link = f'<p><a href="{DATA_PAGE}">Lengths, sources, dropped rows and decoded samples</a></p>'
    return card("data", f"{heading('Data', window_remark(report))}{facts}{dropped}{link}")


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
            format_bytes(unit["num_bytes"]),
        )
        for unit in units
    ]


def _recipe_card(recipe_yaml: str) -> str:
    if not recipe_yaml.strip():
        return ""
    lines = "\n".join(_highlighted(line) for line in recipe_yaml.strip("\n").split("\n"))
    return card("recipe", f'<h2>Recipe</h2><pre class="scroll"><code>{lines}</code></pre>')


def _highlighted(line: str) -> str:
    """One line of YAML, its key or comment in a colour of its own."""
    if line.lstrip().startswith("#"):
        return f'<span class="comment">{escaped(line)}</span>'
    match = re.match(r"(\s*(?:- )*)([\w.-]+)(:(?:\s.*)?)$", line)
    if match is None:
        return escaped(line)
    indent, key, rest = (escaped(part) for part in match.groups())
    return f'{indent}<span class="key">{key}</span>{rest}'


# ---- plain values as text ----


def _format_loss(value: float) -> str:
    if not math.isfinite(value):
        return "not finite"
    return f"{value:.3f}" if value == 0 or 0.01 <= abs(value) < 1e4 else f"{value:.3g}"


def _format_perplexity(value: float) -> str:
    if not math.isfinite(value):
        return "not finite"
    return three_digits(value) if value < 1000 else format_short(value)


_STYLE = """
.legend i.prompt, .legend i.said { width: 12px; height: 12px; border: 1px solid var(--muted); border-radius: 3px; }
.legend i.said { background: var(--tint); border-color: var(--chart-1); }
.sample .prompt { color: var(--muted); }
.sample .said { background: var(--tint); border-radius: 3px; padding: 2px 0; -webkit-box-decoration-break: clone; }
#units td:first-child { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
#units .scroll { max-height: 480px; }
#units td { overflow-wrap: normal; }
#units th:nth-child(n+3), #units td:nth-child(n+3) { text-align: right; white-space: nowrap; }
#data p { margin-top: 10px; font-size: 13px; }
pre { margin: 10px 0 0; font-size: 13px; line-height: 1.6; }
pre .key { color: var(--chart-1); }
pre .comment { color: var(--muted); }
@media (max-width: 700px) { #tile-loss, #tile-perplexity { flex-basis: 100%; } }
"""
