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

from toolkit.errors import counted
from toolkit.pages.charts import Chart, Series, chart_card, drawable, smoothed
from toolkit.pages.data_page import DATA_PAGE, SUMMARY_FACTS, dropped_table, split_table, window_remark
from toolkit.pages.experts import STYLE as EXPERTS_STYLE
from toolkit.pages.experts import experts_card
from toolkit.pages.figures import confusion_card, figure_charts, figure_tile, figures_of
from toolkit.pages.page import (
    MISSING,
    NARROW_PX,
    WIDE_PX,
    card,
    columns,
    escaped,
    finite,
    format_bytes,
    format_percent,
    format_seconds,
    format_short,
    grid,
    header,
    heading,
    number,
    render_page,
    table_card,
    tile,
    tiles,
    warning,
    write_page,
)
from toolkit.pages.run_metrics import Metrics, NonFinite, column, non_finite, split_lines
from toolkit.pages.side_by_side import STYLE as SAMPLES_STYLE
from toolkit.pages.side_by_side import SideBySide, sample_card, side_by_side_card
from toolkit.pages.status import POLICY, Status, status_head, status_note
from toolkit.pages.status import STYLE as STATUS_STYLE

MAX_LISTED_STEPS = 20
"""Non-finite steps named in the note before it says how many more there are (steps)."""

LINE_SHARE = 0.01
"""Width of a line as a share of a small chart's height, about."""

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
    side_by_side: Sequence[SideBySide] = ()
    doubts: Sequence[str] = ()  # what the losses say against the run
    status: Status | None = None  # None: finished
    step_seconds: dict[str, float] | None = None  # of a profiled step, by what took them


def write_report(path: Path, summary: RunSummary) -> None:
    """Write the report to `path`; a reader sees the old file or the new one, never a part."""
    write_page(path, render_report(summary))


def render_report(summary: RunSummary) -> str:
    """The whole page as HTML text; the same summary always gives the same text."""
    train, evals = split_lines(summary.metrics, "train"), split_lines(summary.metrics, "eval")
    sections = [
        _header(summary),
        status_note(summary.status),
        _headline(train, evals, summary.facts),
        _doubts_note(summary.doubts),
        _non_finite_note(non_finite(train + evals)),
        _charts_section(train, evals),
        experts_card(train),
        sample_card(summary.sample),
        side_by_side_card(summary.side_by_side),
        _tables_section(summary, evals),
        _recipe_card(summary.recipe_yaml),
    ]
    policy = POLICY if summary.status is not None else ""
    style = _STYLE + STATUS_STYLE + SAMPLES_STYLE + EXPERTS_STYLE
    return render_page(summary.title, sections, style, status_head(summary.status), policy)


# ---- header and headline ----


def _header(summary: RunSummary) -> str:
    # The duration has a tile of its own, and doubts a box.
    facts = [(name, value) for name, value in summary.facts.items() if name.lower() not in ("duration", "outcome")]
    return header("Fine-tuning report", summary.title, facts)


def _headline(train: Metrics, evals: Metrics, facts: dict[str, str]) -> str:
    shown = [
        _eval_loss_tile(evals) if evals else _train_loss_tile(train),
        figure_tile(evals, _before_after),
        _tokens_tile(train),
        _duration_tile(train, facts),
        _throughput_tile(train),
        _memory_tile(train),
    ]
    return tiles(shown)


def _eval_loss_tile(evals: Metrics) -> str:
    losses = column(evals, "loss")
    value = _before_after(losses, _format_loss)
    return tile("tile-loss", "Held-out loss", value, _eval_note(evals, losses), _delta(losses))


def _train_loss_tile(train: Metrics) -> str:
    """Without held-out data the training loss stands in; single steps are noise, so ends are medians."""
    losses = finite(column(train, "loss"))
    if not losses:
        return tile("tile-loss", "Training loss", MISSING, "no finite value logged")
    width = max(1, len(losses) // 10)
    # Of a single loss only one end is left.
    ends = [statistics.median(losses[:width]), statistics.median(losses[-width:])][: len(losses)]
    note = "no held-out data" if width == 1 else f"medians of {width} logged steps; no held-out data"
    return tile("tile-loss", "Training loss", _before_after(ends, _format_loss), note, _delta(ends))


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
    # Compared as they are written: a best value that reads like the last one is not worth a note.
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
    counts = {"target_tokens": "with loss", "pairs": "pairs", "rows": "rows", "samples": "samples"}
    parts = {what: number(last.get(key)) for key, what in counts.items()}
    note = ", ".join(f"{format_short(value)} {what}" for what, value in _told_once(parts).items())
    return tile("tile-tokens", "Tokens trained", format_short(number(last.get("tokens"))), note)


def _told_once(counts: dict[str, float]) -> dict[str, float]:
    """The finite counts, without samples where each of them is a row or a pair."""
    known = {what: count for what, count in counts.items() if math.isfinite(count)}
    others = [count for what, count in known.items() if what in ("pairs", "rows")]
    return {what: count for what, count in known.items() if what != "samples" or count not in others}


def _duration_tile(train: Metrics, facts: dict[str, str]) -> str:
    stated = next((value for name, value in facts.items() if name.lower() == "duration"), None)
    last_step = train[-1]["step"] if train else 0
    steps = counted(last_step, "step")
    if stated is not None:
        return tile("tile-duration", "Duration", escaped(stated), steps)
    seconds = finite(column(train, "step_seconds"))
    value = format_seconds(sum(seconds)) if seconds else MISSING
    return tile("tile-duration", "Duration", value, f"{steps}; sum of the logged ones")


def _throughput_tile(train: Metrics) -> str:
    rates, mfu = finite(column(train, "tokens_per_second")), finite(column(train, "mfu"))
    note = f"median; MFU {format_percent(statistics.median(mfu))}" if mfu else "median over the run"
    found = {what: finite(column(train, f"{what}_per_second")) for what in ("targets", "pairs", "rows", "samples")}
    medians = {what: statistics.median(values) for what, values in found.items() if values}
    note += "".join(f"; {format_short(median)} {what}/s" for what, median in _told_once(medians).items())
    value = format_short(statistics.median(rates)) if rates else MISSING
    return tile("tile-throughput", "Tokens per second", value, note)


def _memory_tile(train: Metrics) -> str:
    device, host = finite(column(train, "peak_device_bytes")), finite(column(train, "peak_host_bytes"))
    if device:
        note = f"on the device; host {format_bytes(max(host))}" if host else "on the device"
        return tile("tile-memory", "Peak memory", format_bytes(max(device)), note)
    return tile("tile-memory", "Peak memory", format_bytes(max(host)) if host else MISSING, "on the host")


def _doubts_note(doubts: Sequence[str]) -> str:
    return warning("doubts", "Look at this run.", "", doubts) if doubts else ""


def _non_finite_note(found: list[NonFinite]) -> str:
    if not found:
        return ""
    listed = [_describe_non_finite(item) for item in found[:MAX_LISTED_STEPS]]
    more = len(found) - len(listed)
    num_steps = len({item.step for item in found})
    return warning(
        "non-finite",
        f"Non-finite numbers at {counted(num_steps, 'step')}.",
        " Curves have a gap there, marked by a dashed line.",
        [*listed, *([f"and {more:,} more"] if more else [])],
    )


def _describe_non_finite(item: NonFinite) -> str:
    where = f"step {item.step:,}" if item.split == "train" else f"evaluation at step {item.step:,}"
    what = ", ".join(item.fields).replace("_", " ")
    return f"{where}: {what}" if what else where


# ---- charts ----


def _charts_section(train: Metrics, evals: Metrics) -> str:
    if not train and not evals:
        return '<section class="card"><p class="muted">No steps were logged.</p></section>'
    steps = [line["step"] for line in train + evals]
    # One range for all charts, so that a step is at the same place in each.
    x_range = (min(steps), max(steps))
    small = [
        _train_chart("learning-rate", "Learning rate", train, "learning_rate", x_range),
        _train_chart("grad-norm", "Gradient norm", train, "grad_norm", x_range, smooth=True, from_zero=False),
        _throughput_chart(train, x_range),
        _memory_chart(train, x_range),
    ]
    small = [*figure_charts(train, evals, x_range), *small]
    small = [chart for chart in small if chart.values()]
    # Two stand side by side; the last of an odd number would leave a hole beside it.
    wide = [replace(small.pop(), sizes=(WIDE_PX, NARROW_PX))] if len(small) % 2 else []
    parts = [chart_card(_loss_chart(train, evals, x_range)), grid(map(chart_card, small)), *map(chart_card, wide)]
    return "\n".join(filter(None, parts))


def _loss_chart(train: Metrics, evals: Metrics, x_range: tuple[int, int]) -> Chart:
    eval_steps = [line["step"] for line in evals]
    held_out = Series("held-out", eval_steps, drawable(column(evals, "loss")), "chart-2", "points")
    return Chart(
        "loss",
        "Loss",
        [*smoothed(_train_series("training", train, "loss")), *([held_out] if evals else [])],
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
) -> Chart:
    series = _train_series("", train, field)
    return Chart(name, title, smoothed(series) if smooth else [series], _gaps(train, field), x_range, from_zero)


def _throughput_chart(train: Metrics, x_range: tuple[int, int]) -> Chart:
    series = [
        _train_series("without padding", train, "tokens_per_second"),
        _train_series("with padding", train, "padded_tokens_per_second", variable="chart-2"),
        _train_series("targets", train, "targets_per_second", variable="muted"),
    ]
    gaps = _gaps(train, "tokens_per_second")
    first, *others = [item for item in series if finite(item.ys)] or series[:1]
    # Rows without padding have one rate: a curve that lies on another would hide it.
    distinct = [item for item in others if not _is_same(item.ys, first.ys)]
    shown = [first, *distinct] if distinct else [replace(first, name="")]
    return Chart("throughput", "Tokens per second", shown, gaps, x_range)


def _is_same(values: Sequence[float], others: Sequence[float]) -> bool:
    """Whether two curves differ nowhere by more than a line's width."""
    pairs = [(one, other) for one, other in zip(values, others, strict=True) if math.isfinite(one + other)]
    highest = max((other for _, other in pairs), default=0.0)
    return all(abs(one - other) <= LINE_SHARE * highest for one, other in pairs)


def _memory_chart(train: Metrics, x_range: tuple[int, int]) -> Chart:
    # The plan is of the device, or on CPU ranks of the process, with Python and its libraries: of what is measured.
    planned_of = "device" if finite(column(train, "peak_device_bytes")) else "host"
    planned = _train_series(f"{planned_of}, planned", train, "planned_peak_bytes", scale=2**-30, variable="muted")
    series = [
        _train_series("device", train, "peak_device_bytes", scale=2**-30),
        _train_series("host", train, "peak_host_bytes", scale=2**-30, variable="chart-2"),
        planned,
    ]
    return Chart("memory", "Peak memory (GiB)", [item for item in series if finite(item.ys)], [], x_range)


def _train_series(name: str, train: Metrics, field: str, *, scale: float = 1.0, variable: str = "chart-1") -> Series:
    values = [value * scale for value in column(train, field)]
    return Series(name, [line["step"] for line in train], drawable(values), variable)


def _gaps(lines: Metrics, field: str) -> list[int]:
    return sorted({item.step for item in non_finite(lines) if field in item.fields})


# ---- sample, tables, recipe ----


def _tables_section(summary: RunSummary, evals: Metrics) -> str:
    cards = (
        _data_card(summary.data_report),
        _evaluations_card(evals),
        confusion_card(evals, list((summary.data_report.get("train") or {}).get("labels") or {})),
        table_card("versions", "Versions and machine", (), list(summary.versions.items())),
        _profile_card(summary.step_seconds),
    )
    head = ("Unit", "Class", "Count", "Parameters", "Size")
    units = table_card("units", "FSDP units", head, _unit_rows(summary.units))
    return f"{columns(cards)}{units}"


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
    rows = [
        (TIME_TAKERS.get(kind, kind), f"{part:.4f}", format_percent(part / whole)) for kind, part in seconds.items()
    ]
    rows.append(("a profiled step", f"{whole:.4f}", format_percent(1)))
    return table_card("profile", "Where the time went", ("", "Seconds", "Share"), rows, "numbers", "mean over ranks")


def _data_card(report: dict[str, Any]) -> str:
    """The numbers of each split and why rows were dropped; the rest is on the page that it links to."""
    if not report:
        return ""
    facts, dropped = split_table(report, SUMMARY_FACTS), dropped_table(report)
    link = f'<p><a href="{DATA_PAGE}">Lengths, sources, dropped rows and decoded samples</a></p>'
    return card("data", f"{heading('Data', window_remark(report))}{facts}{dropped}{link}")


def _evaluations_card(evals: Metrics) -> str:
    figures = figures_of(evals)
    last = len(evals) - 1
    shown = min(len(evals), MAX_EVALUATION_ROWS)
    picked = [evals[round(index * last / max(1, shown - 1))] for index in range(shown)]
    rows = [
        (
            f"{line['step']:,}",
            _format_loss(number(line.get("loss"))),
            *(figure.written(number(line.get(figure.field))) for figure in figures),
        )
        for line in picked
    ]
    return table_card(
        "evaluations", "Evaluations", ("Step", "Loss", *(figure.title for figure in figures)), rows, "numbers"
    )


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


_STYLE = """
#units td:first-child { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
#units .scroll { max-height: 480px; }
#units td { overflow-wrap: normal; }
#units th:nth-child(n+3), #units td:nth-child(n+3) { text-align: right; white-space: nowrap; }
#data p { margin-top: 10px; font-size: 13px; }
pre { margin: 10px 0 0; font-size: 13px; line-height: 1.6; white-space: pre-wrap; overflow-wrap: anywhere; }
pre .key { color: var(--chart-1); }
pre .comment { color: var(--muted); }
@media (max-width: 700px) {
  #tile-loss, #tile-loss + .tile { flex-basis: 100%; }
  #units td:nth-child(-n+2) { overflow-wrap: anywhere; font-size: 12px; }
}
"""
