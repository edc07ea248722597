"""Writes `data_report.html`: what was read, what became of it, and what the model is trained to write.

`render_data_page` is a pure function from a data report, plain JSON values, to HTML text. A report may lack any of
its keys: what is missing is left out. No text in it is trusted, so all are escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from toolkit.errors import counted, listed
from toolkit.pages.parts.number_text import MISSING, format_count, format_percent, format_short, format_tick, number
from toolkit.pages.parts.page import Histogram, Key, Note, Table, render, script, script_policy, write_page

Report = dict[str, Any]

DATA_REPORT, DATA_PAGE = "data_report.json", "data_report.html"
"""Names in the folder of a run: the report, and its page, to which `report.html` next to it links."""

SPLITS = {"train": "train", "validation": "held-out"}

NOTED = (("duplicates", "duplicate of an earlier row"), ("long", "longer than max_length"))
"""Rows to look at that may be kept: key of a split -> what they are."""

SOURCE_HEAD = ("Source", "Layout", "Read", "Kept", "Dropped", "Tokens", "Share", "Weight", "Passes")

MAX_LISTED_ROWS = 20
"""The most rows named for each reason."""

OPEN_EXAMPLES = 3
"""Decoded samples that are unfolded at first."""

SCRIPT = "rows.js"
"""Searches and goes through the decoded samples."""

START = 90
"""Characters of a folded sample that its line shows."""

FARTHEST_MARK = 1.6
"""The axis is widened to show `max_length` up to this many times the longest row; beyond, it is only named."""

SUMMARY_FACTS = (
    "Rows read",
    "Rows kept",
    "Rows dropped",
    "Tokens",
    "Target share",
    "Samples",
    "Fill rate",
    "Longest row",
)
"""The facts of a split that the report of a run shows."""


def write_data_page(path: Path, title: str, report: Report) -> None:
    """Writes the page to `path` atomically."""
    write_page(path, render_data_page(title, report))


def render_data_page(title: str, report: Report) -> str:
    """Returns the whole page as HTML text; the same report always gives the same text."""
    head, warnings = ("Split", "Count", "Rows"), report.get("warnings") or []
    return render(
        "data.html.jinja",
        title=title,
        splits=split_table(report),
        warnings=Note("warnings", counted(len(warnings), "warning"), "", warnings) if warnings else None,
        histograms=[chart for name, split in splits(report) for chart in _histograms(name, split, report)],
        examples=[_example(example) for example in report.get("examples") or []],
        num_open=OPEN_EXAMPLES,
        example_splits=list(dict.fromkeys(map(_split_of, report.get("examples") or []))),
        script=script(SCRIPT) if report.get("examples") else "",
        policy=script_policy(SCRIPT) if report.get("examples") else "",
        examples_remark=_examples_remark(report),
        tables=[
            Table("dropped", "Dropped rows", ("Reason", *head), _dropped_rows(report), "names"),
            Table("noted", "Rows to look at", ("What", *head), _noted_rows(report), "names"),
            *(_sources_table(name, split) for name, split in splits(report)),
            _labels_table(report),
        ],
        settings=_settings(report),
    )


# ---- reading the report ----


def splits(report: Report) -> list[tuple[str, Report]]:
    """Returns name and numbers of each split in the report, training data first."""
    return [(name, report[key]) for key, name in SPLITS.items() if report.get(key)]


def window_remark(report: Report) -> str:
    """Returns a remark if the numbers are not of all rows, else an empty text."""
    return "(first window)" if report.get("streaming") else ""


def by_count(found: dict[str, Report] | None) -> list[tuple[str, Report]]:
    """Returns reasons and their rows, the most frequent first."""
    return sorted((found or {}).items(), key=lambda item: -count_of(item[1]))


def count_of(found: Report | None) -> int:
    """Returns how many rows were found; the names may be those of the first ones only."""
    found = found or {}
    return int(found.get("count") or len(found.get("rows") or []))


def _split_of(example: Report) -> str:
    split = str(example.get("split", "train"))
    return SPLITS.get(split, split)


def _count(split: Report, key: str) -> int:
    """Returns the number at `key`, or 0 if the split has none."""
    return int(split.get(key) or 0)


def _names(found: Report) -> str:
    return listed(found.get("rows") or [], MAX_LISTED_ROWS, count_of(found))


# ---- what both pages show ----


def split_table(report: Report, names: Sequence[str] | None = None) -> Table:
    """Returns a column for each split and a row for each fact in `names`, or all, except facts that no split has."""
    columns = [facts_of(split) for _, split in splits(report)]
    facts = (names or list(columns[0])) if columns else []
    rows = [(name, *(column[name] for column in columns)) for name in facts]
    shown = [row for row in rows if any(cell != MISSING for cell in row[1:])]
    head = ("", *(name.capitalize() for name, _ in splits(report)))
    return Table("splits", "Splits", head, shown, remark=window_remark(report))


def dropped_table(report: Report) -> Table:
    """Returns why rows were dropped and how many in each split; empty if none was."""
    names = [name for name, _ in splits(report)]
    dropped = {name: split.get("dropped") or {} for name, split in splits(report)}
    reasons = dict.fromkeys(reason for name in names for reason, _ in by_count(dropped[name]))
    rows = [(reason, *(format_count(count_of(dropped[name].get(reason))) for name in names)) for reason in reasons]
    return Table("dropped", "", ("Dropped because", *(name.capitalize() for name in names)), rows)


def facts_of(split: Report) -> dict[str, str]:
    """Returns all facts about a split as text; lengths are in tokens."""
    lengths = split.get("lengths") or {}
    return {
        "Rows read": format_count(split.get("read")),
        "Rows kept": format_count(split.get("kept")),
        "Rows dropped": format_count(split.get("num_dropped")),
        "Duplicates": format_count((split.get("duplicates") or {}).get("count")),
        "Also in train": format_count(split.get("also_in_train")),
        "Longer than max_length": format_count((split.get("long") or {}).get("count")),
        "Tokens cut": format_count((split.get("long") or {}).get("cut_tokens")),
        "Tokens": format_count(split.get("tokens")),
        "Target tokens": format_count(split.get("target_tokens")),
        "Target share": format_percent(split.get("target_share")),
        "Samples": format_count(split.get("samples")),
        "Fill rate": format_percent(split.get("fill_rate")),
        "Shortest row": format_count(lengths.get("min")),
        "Median row": format_count(lengths.get("median")),
        "Mean row": format_short(number(lengths.get("mean"))),
        "90 % of rows up to": format_count(lengths.get("p90")),
        "99 % of rows up to": format_count(lengths.get("p99")),
        "Longest row": _longest(split),
    }


def _longest(split: Report) -> str:
    longest = split.get("longest") or {}
    tokens = format_count(longest.get("tokens", (split.get("lengths") or {}).get("max")))
    return f"{tokens} ({longest['row']})" if longest.get("row") else tokens


# ---- charts ----


def _histograms(name: str, split: Report, report: Report) -> list[Histogram]:
    """Returns the cards of a split; a histogram that is absent or empty has none."""
    remark = " ".join(filter(None, [name, window_remark(report) if name == "train" else ""]))
    lengths, shares = (_histogram(split.get(key)) for key in ("length_histogram", "target_share_histogram"))
    cards = []
    if lengths:
        cards.append(_lengths_chart(name, remark, *lengths, number(report.get("max_length"))))
    if shares:
        cards.append(_histogram_card(f"shares-{name}", "Rows by target share", remark, "share of targets", *shares))
    return cards


def _histogram(value: Report | None) -> tuple[list[float], list[float]] | None:
    """Returns edges and counts, or None without any."""
    return (value["edges"], value["counts"]) if value and sum(value["counts"]) > 0 else None


def _lengths_chart(name: str, remark: str, edges: list[float], counts: list[float], max_length: float) -> Histogram:
    """Returns the chart of the rows' lengths in tokens; `max_length` is marked if that leaves the rows room."""
    num_bins = max(index for index, count in enumerate(counts, 1) if count)  # without the empty ones at the end
    edges, counts = edges[: num_bins + 1], counts[:num_bins]
    is_near = max_length <= FARTHEST_MARK * edges[-1]
    label = f"max_length {max_length:,.0f}"
    keys = [("gap" if is_near else "beyond", "warn", label if is_near else f"{label} is farther right")]
    keys = keys if max_length > 0 else []
    mark = max_length if keys and is_near else None
    return _histogram_card(f"lengths-{name}", "Rows by length", remark, "tokens", edges, counts, mark, keys)


def _histogram_card(
    name: str,
    title: str,
    remark: str,
    x_label: str,
    edges: list[float],
    counts: list[float],
    mark: float | None = None,
    keys: Sequence[Key] = (),
) -> Histogram:
    ends = [(f"{format_tick(low)} to {format_tick(high)}", high - low) for low, high in pairwise(edges)]
    bins = [(told, f"{count:,.0f}") for (told, _), count in zip(ends, counts, strict=True)]
    bars = [
        (width, count / max(counts), f"{told}: {count:,.0f} rows")
        for (told, width), count in zip(ends, counts, strict=True)
    ]
    # The axis reaches the mark.
    first, last = (end([edges[place], *([] if mark is None else [mark])]) for end, place in ((min, 0), (max, -1)))
    bars = [(edges[0] - first, 0.0, ""), *bars, (last - edges[-1], 0.0, "")]
    spoken = f"{title}, {remark}: {sum(counts):,.0f} rows from {format_tick(edges[0])} to {format_tick(edges[-1])}"
    axis = (format_tick(first), f"{x_label}; the highest bar has {max(counts):,.0f} rows", format_tick(last))
    place = None if mark is None else (mark - first) / (last - first)
    table = Table("", "", (x_label.capitalize(), "Rows"), bins)
    return Histogram(f"chart-{name}", title, remark, keys, bars, axis, place, spoken, table)


def facts_of_example(example: Report) -> str:
    """Returns the tokens and the label of a decoded sample, as far as they are known."""
    counts = [(example.get(key), noun) for key, noun in (("tokens", "tokens"), ("target_tokens", "targets"))]
    # A sample with a label has no targets among its tokens.
    facts = [f"{format_count(count)} {noun}" for count, noun in counts if count]
    return ", ".join([*facts, *([f"label {example['label']}"] if example.get("label") is not None else [])])


def _example(example: Report) -> Report:
    """Returns what the page shows of a decoded sample: the name of its row, facts, and its segments."""
    segments = example.get("segments") or []
    start = " ".join("".join(text for text, _ in segments).split())[:START]
    shown = {"split": _split_of(example), "parts": _parts(example, segments)}
    return {"row": example.get("row", ""), "facts": facts_of_example(example), "start": start, **shown}


def _parts(example: Report, segments: list[tuple[str, bool]]) -> list[Report]:
    """Returns the parts of a decoded sample, each with its name, images and segments: the two sides of a pair."""
    found, end = [], 0
    for part in example.get("parts") or [{"segments": len(segments), "images": example.get("images")}]:
        begin, end = end, end + int(part["segments"])
        found.append(
            {"name": part.get("name", ""), "images": part.get("images") or [], "segments": segments[begin:end]}
        )
    return found


def _examples_remark(report: Report) -> str:
    """Says how many of the rows the page has."""
    shown, kept = len(report.get("examples") or []), sum(_count(split, "kept") for _, split in splits(report))
    if not kept or report.get("streaming"):
        return ""
    return "all rows" if shown >= kept else f"{shown:,} of {kept:,} rows, evenly spaced"


# ---- tables ----


def _dropped_rows(report: Report) -> list[tuple[str, ...]]:
    return [
        _found_row(reason, name, found)
        for name, split in splits(report)
        for reason, found in by_count(split.get("dropped"))
    ]


def _noted_rows(report: Report) -> list[tuple[str, ...]]:
    """Returns rows of which something is left out, duplicates, and rows that are too long, dropped or not."""
    noted = [
        _found_row(what, name, found, _count(split, "kept"))
        for name, split in splits(report)
        for what, found in by_count(split.get("noted"))
    ]
    return noted + [
        _found_row(what, name, split[key])
        for name, split in splits(report)
        for key, what in NOTED
        if count_of(split.get(key))
    ]


def _found_row(what: str, split_name: str, found: Report, kept: int = -1) -> tuple[str, ...]:
    """Returns a row of a table; where all `kept` rows are found, as with a column that no row uses, none is named."""
    count = count_of(found)
    return what, split_name, format_count(count), "all rows" if count == kept else _names(found)


def _sources_table(name: str, split: Report) -> Table:
    rows = [source_row(source) for source in split.get("sources") or []]
    return Table(f"sources-{name}", "Sources", SOURCE_HEAD, rows, remark=name)


def source_row(source: Report) -> tuple[str, ...]:
    """Returns the cells of `SOURCE_HEAD`."""
    counts = [format_count(source.get(key)) for key in ("read", "kept", "num_dropped", "tokens")]
    weight, passes = (format_short(number(source.get(key))) for key in ("weight", "passes"))
    layout = str(source.get("layout") or MISSING)
    return str(source.get("source")), layout, *counts, format_percent(source.get("share")), weight, passes


def _labels_table(report: Report) -> Table:
    """Returns the rows of each label, with their share, in each split."""
    counts = {name: split.get("labels") or {} for name, split in splits(report)}
    names = [name for name in counts if counts[name]]
    labels = dict.fromkeys(
        label for name in names for label in sorted(counts[name], key=lambda key: -counts[name][key])
    )
    rows = [(label, *(cell for name in names for cell in _label_cells(counts[name], label))) for label in labels]
    head = ("Label", *(title for name in names for title in (name.capitalize(), "Share")))
    return Table("labels", "Labels", head, rows, remark=window_remark(report))


def _label_cells(counts: dict[str, int], label: str) -> tuple[str, str]:
    count = counts.get(label, 0)
    return format_count(count), format_percent(count / (sum(counts.values()) or 1))


def _settings(report: Report) -> Table:
    names = ("max_length", "packing", "long_rows", "targets", "chat_template", "streaming")
    rows = [(name, _setting(report[name])) for name in names if name in report]
    return Table("settings", "Settings", (), rows, "")


def _setting(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return "none" if value is None else str(value)
