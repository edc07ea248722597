"""Writes `report.html`, one page that shows what a run did, with nothing loaded from outside.

`render_report` is a pure function from a `RunSummary` to HTML text. Details about the data have a page of their own,
to which this one links.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.errors import counted
from toolkit.pages.data_page import DATA_PAGE, SUMMARY_FACTS, dropped_table, split_table, window_remark
from toolkit.pages.parts.charts import (
    MAX_TABLE_ROWS,
    NARROW_PX,
    SCRIPT,
    WIDE_PX,
    Chart,
    Series,
    chart_card,
    evenly_spaced,
    smoothed,
)
from toolkit.pages.parts.number_text import MISSING, finite, format_percent, format_short, number
from toolkit.pages.parts.page import ChartCard, Note, Table, Tile, render, script, script_policy, write_page
from toolkit.pages.parts.run_metrics import Metrics, NonFinite, column, non_finite, samples_itself, split_lines
from toolkit.pages.parts.side_by_side import SideBySide, prompts_and_answers
from toolkit.pages.parts.story import with_limits
from toolkit.pages.samples_page import SampledPrompt, best_first
from toolkit.pages.status import SCRIPT as STATUS_SCRIPT
from toolkit.pages.status import Status, status_head, status_note
from toolkit.recipe.figures import ANSWERS, FIGURES, KEPT_KL, KEPT_LOSS, KNOWN, REWARD, Figure, figure_of, steering
from toolkit.terminal import format_bytes, format_time, three_digits

MAX_LISTED_STEPS = 20
"""The most non-finite steps that the note names before it says how many more there are."""

BRIGHTEST_LOAD = 2.0
"""Factor on an expert's even share from which its cell has the strongest colour."""


@dataclass(frozen=True)
class RunSummary:
    """The input of a report. No text in it is trusted, so all are escaped."""

    title: str  # the model and the data
    recipe_yaml: str
    metrics: Metrics  # the lines of metrics.jsonl, in order
    data_report: dict[str, Any]  # as `render_data_page` takes it; empty without one
    units: Sequence[Sequence[str]]  # rows of name, class, count, parameters, size
    facts: dict[str, str]  # strategy, ranks, precision, parameters, duration
    versions: dict[str, str]
    side_by_side: Sequence[SideBySide] = ()
    sampled: tuple[int, Sequence[SampledPrompt]] | None = None  # a step, and some of its own samples with rewards
    doubts: Sequence[str] = ()  # warnings about the losses, and those of the run
    limits: Sequence[str] = ()  # limits of the figures of held-out rows
    outcome: str = ""  # its figures, as `headline` writes them
    status: Status | None = None  # None if the run is finished
    folder: str = ""  # name of the run's folder
    command: str = ""  # starts the run again
    written: float | None = None  # when (seconds since 1970)


def write_report(path: Path, summary: RunSummary) -> None:
    """Writes the report to `path` atomically."""
    write_page(path, render_report(summary))


def render_report(summary: RunSummary) -> str:
    """Returns the whole page as HTML text; the same summary always gives the same text."""
    train, evals = split_lines(summary.metrics, "train"), split_lines(summary.metrics, "eval")
    status, data = summary.status, summary.data_report
    loss_chart, small_charts, wide_charts = _charts(train, evals)
    return render(
        "run.html.jinja",
        it=summary,
        lead=lead_of(summary.metrics, summary.outcome, summary.limits),
        written="" if summary.written is None else format_time(summary.written),
        status_head="" if status is None else status_head(status),
        status_note="" if status is None else status_note(status),
        policy=script_policy(*([SCRIPT] if loss_chart else []), *([] if status is None else [STATUS_SCRIPT])),
        script=script(SCRIPT) if loss_chart else "",
        doubts=Note("doubts", "Check this run.", "", summary.doubts) if summary.doubts else None,
        non_finite=_non_finite_note(non_finite(train + evals)),
        tiles=_tiles(train, evals, summary),
        loss_chart=loss_chart,
        small_charts=small_charts,
        wide_charts=wide_charts,
        side_by_side=prompts_and_answers(summary.side_by_side),
        sampled=None if summary.sampled is None else (summary.sampled[0], best_first(summary.sampled[1])),
        experts=expert_loads(train),
        data_page=DATA_PAGE,
        data_remark=window_remark(data),
        data_facts=split_table(data, SUMMARY_FACTS),
        dropped=dropped_table(data),
        tables=_tables(summary, evals),
        technical=_technical_tables(summary),
        steps=STEPS,
    )


# ---- headline ----


def headline(metrics: Metrics, best_by: str = "loss") -> str:
    """Returns the outcome of a run in figures, each from its first to its last value, or an empty text.

    They are the reward of its own samples, the shares of its objective and of answers, the figure that judges
    evaluations, what was kept, and the held-out loss; without held-out rows the training loss.
    """
    train, evals = split_lines(metrics, "train"), split_lines(metrics, "eval")
    told, losses, whose = [], column([line for line in evals if "loss" in line], "loss"), "held-out"
    if samples_itself(train):
        told.append(f"{REWARD.name} {' -> '.join(f'{reward:.3f}' for reward in median_ends(column(train, 'reward')))}")
    elif not evals:
        losses, whose = median_ends(column(train, "loss")), "training"
    for figure in dict.fromkeys([*HEADLINES, steering(best_by)]):
        values = finite(column(evals, figure.field))
        if values and figure.field != "loss":
            told.append(f"{figure.name} {' -> '.join(map(figure.in_short, _first_and_last(values)))}")
    if len(losses) > 1:
        ends = " -> ".join(f"{loss:.4f}" if math.isfinite(loss) else "not finite" for loss in _first_and_last(losses))
        change = f" ({losses[-1] / losses[0] - 1:+.1%})" if _change(losses) else ""
        told.append(f"{whose} loss {ends}{change}")
    return ", ".join(told)


STEPS = ("exported", "best")
"""Facts that say which step's weights are meant, in as far as they are not the last ones."""

HEADLINES = (KNOWN["accuracy"], KNOWN["f1_macro"], KNOWN["f1"], KNOWN["pearson"], ANSWERS, KEPT_LOSS, KEPT_KL)
"""Figures that say what came of a run, in the words of its objective."""


def progress_of(metrics: Metrics, limits: Sequence[str] = (), best_by: str = "loss") -> list[str]:
    """Returns the last figures of a run under way: the reward or loss of a step, and those of its last evaluation."""
    train, evals = split_lines(metrics, "train"), split_lines(metrics, "eval")
    main, form = ("reward", ".3f") if samples_itself(train) else ("loss", ".4f")
    told = [f"held-out loss {loss:.4f}" for loss in finite(column(evals, "loss"))[-1:]]
    for figure in dict.fromkeys([*HEADLINES, steering(best_by)]):
        values = [] if figure.field == "loss" else finite(column(evals, figure.field))[-1:]
        told += [f"{figure.name} {figure.in_short(value)}" for value in values]
    steps = [f"{main} {value:{form}}" for value in finite(column(train, main))[-1:]]
    return [*steps, with_limits(", ".join(told), limits)] if told else steps


def lead_of(metrics: Metrics, outcome: str, limits: Sequence[str] = ()) -> str:
    """Returns the outcome of a run in a sentence, or an empty text if nothing was logged."""
    train = split_lines(metrics, "train")
    if not train or not outcome:
        return ""
    steps, tokens = counted(train[-1]["step"], "step"), number(train[-1].get("tokens"))
    on = f" on {format_short(tokens)} tokens" if math.isfinite(tokens) else ""
    limited = limits if split_lines(metrics, "eval") else ()
    return with_limits(f"In {steps}{on}: {outcome.replace('->', '→')}", limited) + "."


def _first_and_last(values: Sequence[float]) -> list[float]:
    """Returns the first and the last value, or a single one."""
    return [values[0], values[-1]][: len(values)] if values else []


def median_ends(losses: Sequence[float]) -> list[float]:
    """Returns medians of the first and the last tenth of a training loss, because single steps are noisy."""
    known = finite(losses)
    width = max(1, len(known) // 10)
    return [statistics.median(known[:width]), statistics.median(known[-width:])][: len(known)] if known else []


def _tiles(train: Metrics, evals: Metrics, summary: RunSummary) -> list[Tile | None]:
    held_out = "no evaluation yet" if summary.data_report.get("validation") else "no held-out data"
    return [
        _main_tile(train, evals, held_out, summary.limits),
        figure_tile(evals, summary.limits),
        _tokens_tile(train),
        _duration_tile(train, summary.facts),
        _throughput_tile(train),
        _memory_tile(train),
    ]


def _main_tile(train: Metrics, evals: Metrics, held_out: str, limits: Sequence[str]) -> Tile:
    if samples_itself(train):
        values = [f"{reward:.3f}" for reward in median_ends(column(train, "reward"))] or [MISSING]
        return Tile("tile-reward", "Reward", values, "of the model's own samples; higher is better")
    return _eval_loss_tile(evals, limits) if evals else _train_loss_tile(train, held_out)


def _eval_loss_tile(evals: Metrics, limits: Sequence[str]) -> Tile:
    losses = column(evals, "loss")
    values = [_format_loss(loss) for loss in losses]
    plain = f"{'; '.join(limits) or 'on rows that are not trained on'}; lower is better"
    steps = dict.fromkeys(f"step {line['step']:,}" for line in (evals[0], evals[-1]))
    return Tile("tile-loss", "Held-out loss", values, plain, " → ".join(steps), _change(losses))


def _train_loss_tile(train: Metrics, held_out: str) -> Tile:
    """Returns the tile of the training loss, in place of a held-out loss; `held_out` says why there is none."""
    losses = finite(column(train, "loss"))
    ends, width = median_ends(losses), max(1, len(losses) // 10)
    values = [_format_loss(loss) for loss in ends] or [MISSING]
    note = "no finite value logged" if not losses else "" if width == 1 else f"medians of {width} logged steps"
    return Tile("tile-loss", "Training loss", values, f"{held_out}; lower is better", note, _change(ends))


def _change(values: Sequence[float]) -> tuple[str, str] | None:
    """Returns the change from first to last in percent, lower is better, or None if it means nothing."""
    if len(values) < 2 or not math.isfinite(values[0] + values[-1]) or values[0] <= 0:
        return None
    percent = round(100 * (values[-1] / values[0] - 1), 1) or 0.0  # no "-0.0"
    if not math.isfinite(percent):
        return None
    kind = "good" if percent < 0 else "bad" if percent > 0 else "same"
    sign = {"good": "▼ \N{MINUS SIGN}", "bad": "▲ +", "same": ""}[kind]
    return kind, f"{sign}{abs(percent):,.1f} %"


def _tokens_tile(train: Metrics) -> Tile:
    last = train[-1] if train else {}
    parts = {"with loss": number(last.get("target_tokens")), _unit(train): number(last.get(_unit(train)))}
    note = ", ".join(f"{format_short(value)} {what}" for what, value in parts.items() if math.isfinite(value))
    plain = "tokens (word pieces) that were read"
    return Tile("tile-tokens", "Tokens trained", [format_short(number(last.get("tokens")))], plain, note)


def _unit(train: Metrics) -> str:
    """Returns what is counted besides tokens: pairs or rows if the records have any, or else samples."""
    return next((unit for unit in ("pairs", "rows") if train and unit in train[-1]), "samples")


def _duration_tile(train: Metrics, facts: dict[str, str]) -> Tile:
    steps = counted(train[-1]["step"] if train else 0, "step")
    return Tile("tile-duration", "Duration", [facts.get("duration", MISSING)], steps, facts.get("starts", ""))


def _throughput_tile(train: Metrics) -> Tile:
    rates, mfu = finite(column(train, "tokens_per_second")), finite(column(train, "mfu"))
    found = {what: finite(column(train, f"{what}_per_second")) for what in ("targets", _unit(train))}
    notes = [f"MFU {format_percent(statistics.median(mfu))}"] if mfu else []
    notes += [f"{format_short(statistics.median(values))} {what}/s" for what, values in found.items() if values]
    value = format_short(statistics.median(rates)) if rates else MISSING
    return Tile("tile-throughput", "Tokens per second", [value], "median over the run", "; ".join(notes))


def _memory_tile(train: Metrics) -> Tile:
    device, host = finite(column(train, "peak_device_bytes")), finite(column(train, "peak_host_bytes"))
    if device:
        note = f"host {format_bytes(max(host))}" if host else ""
        return Tile("tile-memory", "Peak memory", [format_bytes(max(device))], "on the device", note)
    return Tile("tile-memory", "Peak memory", [format_bytes(max(host)) if host else MISSING], "on the host")


def _non_finite_note(found: list[NonFinite]) -> Note | None:
    if not found:
        return None
    listed = [_describe_non_finite(item) for item in found[:MAX_LISTED_STEPS]]
    listed += [f"and {len(found) - len(listed):,} more"] if len(found) > len(listed) else []
    lead = f"Non-finite numbers at {counted(len({item.step for item in found}), 'step')}."
    return Note("non-finite", lead, " Curves have a gap there, marked by a dashed line.", listed)


def _describe_non_finite(item: NonFinite) -> str:
    where = f"step {item.step:,}" if item.split == "train" else f"evaluation at step {item.step:,}"
    what = ", ".join(item.fields).replace("_", " ")
    return f"{where}: {what}" if what else where


# ---- charts ----


def _charts(train: Metrics, evals: Metrics) -> tuple[ChartCard | None, list[ChartCard], list[ChartCard]]:
    """Returns the chart of the loss, those side by side, and those as wide as the page; none without steps."""
    if not train and not evals:
        return None, [], []
    x_range = _step_range(train, evals)
    small = [
        *figure_charts(train, evals, x_range),
        _train_chart("learning-rate", "Learning rate", train, "learning_rate", x_range),
        _train_chart("grad-norm", "Gradient norm", train, "grad_norm", x_range, smooth=True, from_zero=False),
        _throughput_chart(train, x_range),
        _memory_chart(train, x_range),
    ]
    own = samples_itself(train)
    if own:
        title = "Loss (of fresh samples only its gradient matters)"
        small.append(_train_chart("own-loss", title, train, "loss", x_range, from_zero=False))
    small = [chart for chart in small if chart.values()]
    # Two are side by side; the last of an odd number would leave a hole next to it.
    wide = [replace(small.pop(), sizes=(WIDE_PX, NARROW_PX))] if len(small) % 2 else []
    loss = chart_card(main_chart(train, evals))
    return loss, [chart_card(chart) for chart in small], [chart_card(chart) for chart in wide]


def _step_range(train: Metrics, evals: Metrics) -> tuple[int, int]:
    """Returns one range for all charts, so that a step is at the same place in each."""
    steps = [line["step"] for line in train + evals]
    return min(steps), max(steps)


def main_chart(train: Metrics, evals: Metrics) -> Chart:
    """Returns the chart of what says how the run goes: the loss, or the rewards of its own samples."""
    return reward_chart(train) if samples_itself(train) else loss_chart(train, evals)


def loss_chart(train: Metrics, evals: Metrics) -> Chart:
    """Returns the chart of the loss in training, with the points of held-out data."""
    eval_steps = [line["step"] for line in evals]
    held_out = Series("held-out", eval_steps, column(evals, "loss"), "chart-2", "points")
    return Chart(
        "loss",
        "Loss",
        [*smoothed(_train_series("training", train, "loss")), *([held_out] if evals else [])],
        _gaps(train + evals, "loss"),
        _step_range(train, evals),
        from_zero=False,
        sizes=(WIDE_PX, NARROW_PX),
    )


def reward_chart(train: Metrics) -> Chart:
    """Returns the chart of the mean reward of the model's samples, and of each reward if there are several."""
    names = sorted({field for line in train for field in line if field.startswith("reward/")})
    parts = [
        _train_series(name.removeprefix("reward/"), train, name, variable=f"chart-{2 + number % 7}")
        for number, name in enumerate(names)
    ]
    series = [*smoothed(_train_series("all", train, "reward")), *(parts if len(parts) > 1 else [])]
    return Chart(
        "loss", "Reward of the samples", series, [], _step_range(train, []), from_zero=False, sizes=(WIDE_PX, NARROW_PX)
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
    # The last one is on top: without padding, the first two are one curve.
    series = [
        _train_series("with padding", train, "padded_tokens_per_second", variable="chart-2"),
        _train_series("without padding", train, "tokens_per_second"),
        _train_series("targets", train, "targets_per_second", variable="muted"),
    ]
    shown = [item for item in series if finite(item.ys)]
    return Chart("throughput", "Tokens per second", shown, _gaps(train, "tokens_per_second"), x_range)


def _memory_chart(train: Metrics, x_range: tuple[int, int]) -> Chart:
    # The plan is for what is measured: the device, or on CPU ranks the process with Python and its libraries.
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
    return Series(name, [line["step"] for line in train], values, variable)


def _gaps(lines: Metrics, field: str) -> list[int]:
    return sorted({item.step for item in non_finite(lines) if field in item.fields})


# ---- tables ----


def expert_loads(train: Metrics) -> dict[str, Any] | None:
    """Returns the last recorded loads, as `experts.html.jinja` takes them, or None if the model has no experts."""
    line = next((line for line in reversed(train) if line.get("expert_load")), None)
    if line is None:
        return None
    loads: list[list[float]] = line["expert_load"]
    dead = sum(share == 0 for layer in loads for share in layer)
    told = f"{counted(len(loads), 'router')} of {counted(len(loads[0]), 'expert')}; {dead or 'none'} without a token"
    return {"loads": loads, "step": line["step"], "told": told, "brightest": BRIGHTEST_LOAD}


def _tables(summary: RunSummary, evals: Metrics) -> list[Table]:
    labels = list((summary.data_report.get("train") or {}).get("labels") or {})
    limited = "; ".join(summary.limits)
    tables = evaluations_table(evals, MAX_TABLE_ROWS), confusion_table(evals, labels)
    return [replace(table, remark="; ".join(filter(None, [table.remark, limited]))) for table in tables]


def _technical_tables(summary: RunSummary) -> list[Table]:
    """Returns tables of how the run was done, which are shown on demand."""
    facts = [item for item in summary.facts.items() if item[0] != "duration"]  # it has a tile of its own
    told = ", ".join(summary.facts[name] for name in ("strategy", "ranks", "precision") if name in summary.facts)
    head = ("Unit", "Class", "Count", "Parameters", "Size")
    return [
        Table("facts", "How it ran", (), facts, "names", told),
        Table("units", "FSDP units", head, summary.units, "names"),
        Table("versions", "Versions and machine", (), list(summary.versions.items()), "names"),
    ]


def evaluations_table(evals: Metrics, max_rows: int) -> Table:
    """Returns a table of evaluations, the first, the last and evenly spaced ones between them."""
    figures, has_loss = figures_of(evals), any("loss" in line for line in evals)
    rows = [
        (
            f"{line['step']:,}",
            *([_format_loss(number(line.get("loss")))] if has_loss else []),
            *(written(figure, number(line.get(figure.field))) for figure in figures),
        )
        for line in evenly_spaced(evals, max_rows)
    ]
    return Table(
        "evaluations",
        "Evaluations",
        ("Step", *(["Loss"] if has_loss else []), *(figure.heading for figure in figures)),
        rows,
    )


# ---- plain values as text ----


def _format_loss(value: float) -> str:
    if not math.isfinite(value):
        return "not finite"
    return f"{value:.3f}" if value == 0 or 0.01 <= abs(value) < 1e4 else f"{value:.3g}"


# ---- The metrics of an evaluation next to its loss, as tile, curves and table, and the confusion matrix ----

TOGETHER = (
    ("shares", "Accuracy", ("accuracy", "f1_macro", "f1")),
    ("rewards", "Rewards", ("chosen_reward", "rejected_reward")),
    ("answers", "Answers to held-out prompts", ("answer_accuracy", "answer_stopped")),
    ("completion-tokens", "Tokens of a completion", ("completion_tokens", "longest_completion")),
)
"""Charts of several figures: name, title, and the keys of the figures."""

ELSEWHERE = {"loss", "reward", "perplexity", "precision", "recall", *(key for _, _, keys in TOGETHER for key in keys)}
"""Figures without a chart of their own; perplexity and the two of F1 repeat others."""

OF_THE_RUN = frozenset(
    {
        *("step", "epoch", "samples", "tokens", "target_tokens", "rows", "pairs", "loss", "rate_factor", "grad_norm"),
        *("learning_rate", "step_seconds", "peak_device_bytes", "peak_host_bytes", "planned_peak_bytes", "mfu"),
        *("non_finite", "dead_experts", "max_expert_load", "answer_accuracy_normalised", *KNOWN),
    }
)
"""Keys of records that are shown elsewhere on the page, or nowhere."""


def figures_of(evals: Metrics) -> list[Figure]:
    """Returns the figures that the evaluations have besides the loss: those of the table, then by source, then own."""
    return [figure for figure in FIGURES if any(figure.field in line for line in evals)] + _others(evals)


def _others(lines: Metrics) -> list[Figure]:
    """Returns the losses of named sources, and the figures that only the user's extensions know."""
    fields = dict.fromkeys(
        field
        for line in lines
        for field, value in line.items()
        if isinstance(value, int | float) and field not in OF_THE_RUN and not field.startswith("reward/")
    )
    return [figure_of(field) for field in fields if not field.endswith(("_per_second", "_seconds"))]


def written(figure: Figure, value: float) -> str:
    """Returns a value of a figure as pages show it."""
    if not math.isfinite(value):
        return "not finite"
    if figure.form == "share":
        return format_percent(value)
    if figure.form == "perplexity":
        return three_digits(value) if value < 1000 else format_short(value)
    return f"{value:.3g}"


def figure_tile(evals: Metrics, limits: Sequence[str] = ()) -> Tile | None:
    """Returns a tile of the first metric, with the others' last values as its detail, or None without metrics."""
    figures = figures_of(evals)
    if not figures:
        return None
    first, *others = figures
    # The rewards have a chart of their own; the tile has their difference, the margin.
    last = {figure.title: finite(column(evals, figure.field))[-1:] for figure in others if "reward" not in figure.field}
    told = [f"{figure.title} {written(figure, *last[figure.title])}" for figure in others if last.get(figure.title)]
    values = [written(first, value) for value in column(evals, first.field)]
    plain = [*limits, first.plain, f"{first.better} is better" if first.better else ""]
    details = "; ".join(["on held-out data", *told])
    return Tile(f"tile-{first.field}", first.title, values, "; ".join(filter(None, plain)), details)


def figure_charts(train: Metrics, evals: Metrics, x_range: tuple[int, int]) -> list[Chart]:
    """Returns charts of the figures over the steps; those of training steps are faint next to those of evaluations."""
    alone = [*(figure for figure in KNOWN.values() if figure.field not in ELSEWHERE), *_others([*train, *evals])]
    titled = [(f"{one.heading} ({one.plain})" if one.plain else one.heading, one.field) for one in alone]
    charts = []
    for name, title, fields in (*TOGETHER, *((field, title, (field,)) for title, field in titled)):
        series: list[Series] = []
        for place, field in enumerate(fields, 1):
            label = figure_of(field).name if len(fields) > 1 else ""
            held_out = _series(evals, field, f"{label} held out".strip(), f"chart-{place}", "points")
            of_steps, kind = (f"{label} in training".strip(), "faint") if held_out else (label, "line")
            series += [*_series(train, field, of_steps, f"chart-{place}", kind), *held_out]
        if series:
            charts.append(Chart(name.replace("loss/", "loss-of-"), title, series, [], x_range))  # an attribute in HTML
    return charts


def _series(lines: Metrics, field: str, name: str, color: str, kind: str) -> list[Series]:
    """Returns the curve of a field, or none if no line has it."""
    having = [line for line in lines if field in line]
    if not finite(column(having, field)):
        return []
    return [Series(name, [line["step"] for line in having], column(having, field), color, kind)]


def confusion_table(evals: Metrics, labels: Sequence[str]) -> Table:
    """Returns the last evaluation's confusion matrix, true classes in rows and predicted in columns, else no rows."""
    counts: list[list[Any]] = next((line["confusion"] for line in reversed(evals) if line.get("confusion")), [])
    names = list(labels) if len(labels) == len(counts) else [str(number) for number in range(len(counts))]
    rows = [(name, *(f"{count:,}" for count in row)) for name, row in zip(names, counts, strict=True)]
    return Table("confusion", "Confusion", ("Is / taken for", *names), rows, remark="rows of the last evaluation")
