"""Prints the data report on the console at the start of a run: what was read, what was dropped, what is learned.

No text of a report is trusted. It is printed as `rich.text.Text`, never parsed as markup, without control codes, and
without line breaks inside a line.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from typing import Any

from rich.console import Console
from rich.text import Text

from toolkit.errors import listed
from toolkit.pages.data_page import Report, by_count, count_of, splits, window_remark
from toolkit.pages.parts.number_text import format_count, format_percent, format_short, number
from toolkit.terminal import harmless

MAX_LISTED_ROWS = 5
"""The most rows named for each reason."""

MAX_LISTED_SOURCES = 10
"""The most sources with a line of their own, and the most labels named."""

MAX_SAMPLES = 3
"""The most samples shown."""

LONGEST_PIECE = {True: 240, False: 120}
"""A segment is shortened to about this length (characters): a target, and what the model only reads."""

MOST_AT_AN_END = 4
"""The most segments shown from the beginning and from the end of a sample."""

INDENT = 12
"""Width of the names before the colons, and of the margin of the lines below them (characters)."""

TARGET_STYLE, CONTEXT_STYLE = "green", "dim"

Stretch = tuple[str, bool]
"""A piece of text, and whether the model is trained to write it."""


def show_report(console: Console, report: Report) -> None:
    """Prints the report; keys that it lacks are left out."""
    for name, split in splits(report):
        _show_split(console, name, split, report)
    for message in report.get("warnings") or []:
        _print_line(console, "warning", str(message), style="yellow")
    _show_examples(console, (report.get("examples") or [])[:MAX_SAMPLES])


# ---- numbers ----


def _show_split(console: Console, name: str, split: Report, report: Report) -> None:
    _print_line(console, name, _rows_line(split), window_remark(report) if name == "train" else "")
    _print_line(console, "", _tokens_line(split))
    for reason, found in by_count(split.get("dropped")):
        _print_line(console, "dropped", f"{_counted(count_of(found), 'row')}: {reason}", _names(found))
    _show_found(console, "duplicates", split.get("duplicates"), "equal to an earlier one")
    cut = number((split.get("long") or {}).get("cut_tokens"))
    over = "longer than max_length" + (f", {_counted(cut, 'token')} cut" if cut > 0 else "")
    _show_found(console, "long", split.get("long"), over)
    if split.get("also_in_train"):
        _print_line(console, "in train", f"{_counted(split['also_in_train'], 'row')} of {name} also in train")
    _show_labels(console, split.get("labels") or {})
    _show_sources(console, split.get("sources") or [])


def _rows_line(split: Report) -> str:
    parts = [
        _counted(split.get("read"), "row") + " read" if _is_known(split, "read") else "",
        f"{format_count(split['kept'])} kept" if _is_known(split, "kept") else "",
        f"{format_count(split['num_dropped'])} dropped" if split.get("num_dropped") else "",
    ]
    return _comma_list(parts)


def _tokens_line(split: Report) -> str:
    lengths, longest = split.get("lengths") or {}, split.get("longest") or {}
    row = f" ({longest['row']})" if longest.get("row") else ""
    parts = [
        f"{format_short(number(split['tokens']))} tokens" if _is_known(split, "tokens") else "",
        f"{format_percent(split['target_share'])} targets" if _is_known(split, "target_share") else "",
        _counted(split["samples"], "sample") if _is_known(split, "samples") else "",
        f"{format_percent(split['fill_rate'])} filled" if _is_known(split, "fill_rate") else "",
        f"median row {format_count(lengths['median'])}" if _is_known(lengths, "median") else "",
        f"longest {format_count(longest['tokens'])}{row}" if _is_known(longest, "tokens") else "",
    ]
    return _comma_list(parts)


def _show_found(console: Console, title: str, found: Report | None, what: str) -> None:
    if count_of(found):
        _print_line(console, title, f"{_counted(count_of(found), 'row')} {what}", _names(found or {}))


def _show_labels(console: Console, labels: dict[str, int]) -> None:
    named = [f"{label} {count:,}" for label, count in sorted(labels.items(), key=lambda item: -item[1])]
    if named:
        _print_line(console, "labels", listed(named, MAX_LISTED_SOURCES))


def _show_sources(console: Console, sources: list[Report]) -> None:
    """Prints a line for each source, unless there is only one, which the split's line describes."""
    if len(sources) < 2:
        return
    for source in sources[:MAX_LISTED_SOURCES]:
        parts = [
            f"share {format_percent(source['share'])}" if _is_known(source, "share") else "",
            _counted(source["kept"], "row") if _is_known(source, "kept") else "",
            f"{format_short(number(source['tokens']))} tokens" if _is_known(source, "tokens") else "",
            f"weight {format_short(number(source['weight']))}" if _is_known(source, "weight") else "",
        ]
        _print_line(console, "source", f"{source.get('source')}: {_comma_list(parts)}")
    if len(sources) > MAX_LISTED_SOURCES:
        _print_line(console, "", f"and {len(sources) - MAX_LISTED_SOURCES:,} more sources")


def _is_known(values: Report, key: str) -> bool:
    return math.isfinite(number(values.get(key)))


def _counted(count: Any, noun: str) -> str:
    return f"{format_count(count)} {noun}{'' if count == 1 else 's'}"


def _names(found: Report) -> str:
    names = listed(found.get("rows") or [], MAX_LISTED_ROWS, count_of(found))
    return f"({names})" if names else ""


def _comma_list(parts: Iterable[str]) -> str:
    return ", ".join(filter(None, parts))


def _print_line(console: Console, title: str, text: str, remark: str = "", style: str = "") -> None:
    """Prints one line with a dim remark, or nothing without text."""
    if not text:
        return
    head = f"{title:>{INDENT - 2}}: " if title else " " * INDENT
    line = Text(head + _in_one_line(console, text), style)
    if remark:
        line.append(f" {_in_one_line(console, remark)}", CONTEXT_STYLE)
    console.print(line, soft_wrap=True)


# ---- samples ----


def _show_examples(console: Console, examples: list[Report]) -> None:
    if not examples:
        return
    # Texts to classify have no targets, so no explanation is needed.
    if any(is_target for example in examples for _, is_target in example.get("segments") or []):
        opening, closing = target_marks(console)
        said = f"stand between {opening} and {closing}" if opening else f"are {TARGET_STYLE}"
        _print_line(console, "samples", f"targets, which the model learns to write, {said}")
    for index, example in enumerate(examples, 1):
        _print_line(console, f"sample {index}", str(example.get("row", "")), _example_facts(example))
        # Every line has a margin, so that no text of a row looks like one of our own lines.
        for line in _sample_text(console, example.get("segments") or []).wrap(console, max(20, console.width - INDENT)):
            console.print(Text(" " * INDENT).append_text(line), soft_wrap=True)


def _example_facts(example: Report) -> str:
    facts = [
        _counted(example["tokens"], "token") if _is_known(example, "tokens") else "",
        _counted(example["target_tokens"], "target") if example.get("target_tokens") else "",
        f"label {example['label']}" if example.get("label") is not None else "",
    ]
    return f"({_comma_list(facts)})" if any(facts) else ""


def target_marks(console: Console) -> tuple[str, str]:
    """Returns the marks around targets on a console without colours; two empty texts on one with colours."""
    if console.color_system is not None and not console.no_color:
        return "", ""
    return ("[[", "]]") if console.options.ascii_only else ("⟦", "⟧")


def _sample_text(console: Console, segments: Iterable[Iterable[Any]]) -> Text:
    opening, closing = target_marks(console)
    ellipsis = " ... " if console.options.ascii_only else " … "
    text = Text()
    for piece, is_target in shortened(((str(part), bool(flag)) for part, flag in segments), ellipsis):
        shown = f"{opening}{piece}{closing}" if is_target else piece
        text.append(_printable(console, shown), TARGET_STYLE if is_target else CONTEXT_STYLE)
    text.rstrip()
    return text


def shortened(segments: Iterable[Stretch], ellipsis: str = " … ") -> list[Stretch]:
    """Leaves out the middle of long segments, and of many those in the middle."""
    whole = [("".join(text for text, _ in run), flag) for flag, run in groupby(segments, key=itemgetter(1))]
    if len(whole) > 2 * MOST_AT_AN_END:
        whole = [*whole[:MOST_AT_AN_END], (ellipsis, False), *whole[-MOST_AT_AN_END:]]
    return [(_without_middle(text, LONGEST_PIECE[is_target], ellipsis), is_target) for text, is_target in whole]


def _without_middle(text: str, limit: int, ellipsis: str) -> str:
    if len(text) <= limit + len(ellipsis):
        return text
    tail = limit // 2
    return text[: limit - tail] + ellipsis + text[-tail:]


# ---- text of strangers ----


def _in_one_line(console: Console, text: str) -> str:
    return _printable(console, " ".join(text.splitlines()))


def _printable(console: Console, text: str) -> str:
    """Returns text without terminal control codes, and with a `?` for what the console cannot encode."""
    return harmless(text).encode(console.encoding, "replace").decode(console.encoding)
