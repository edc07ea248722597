"""Prints the data report on the console at the start of a run: what was read, what was dropped, what is learned.

No text of a report is trusted. It is printed as `rich.text.Text`, never parsed as markup, without control codes, and
without line breaks inside a line.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from typing import Any

from rich.console import Console
from rich.text import Text

from toolkit.errors import counted, listed
from toolkit.pages.data_page import (
    NOTED,
    SOURCE_HEAD,
    Report,
    by_count,
    count_of,
    facts_of,
    facts_of_example,
    source_row,
    splits,
    window_remark,
)
from toolkit.pages.parts.number_text import MISSING
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

ROWS = ("Rows read", "Rows kept", "Rows dropped", "Also in train")
TOKENS = ("Tokens", "Tokens cut", "Target share", "Samples", "Fill rate", "Median row", "Longest row")
"""The facts of a split's two lines, as the page has them."""

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
    facts = facts_of(split)
    for title, names in ((name, ROWS), ("", TOKENS)):
        text = _named((fact, facts[fact]) for fact in names)
        _print_line(console, title, text, window_remark(report) if title == "train" else "")
    noted = [(what, split.get(key) or {}) for key, what in NOTED]
    for title, reasons in (("dropped", by_count(split.get("dropped"))), ("noted", noted)):
        for reason, found in reasons:
            if count_of(found):
                _print_line(console, title, f"{reason}: {counted(count_of(found), 'row')}", _names(found))
    labels = sorted((split.get("labels") or {}).items(), key=lambda item: -item[1])
    _print_line(console, "labels", listed([f"{label} {count:,}" for label, count in labels], MAX_LISTED_SOURCES))
    sources = split.get("sources") or []
    if len(sources) < 2:  # the split's lines describe it
        return
    for source in sources[:MAX_LISTED_SOURCES]:
        first, *cells = zip(SOURCE_HEAD, source_row(source), strict=True)
        _print_line(console, "source", f"{first[1]}: {_named(cells)}")
    if len(sources) > MAX_LISTED_SOURCES:
        _print_line(console, "", f"and {len(sources) - MAX_LISTED_SOURCES:,} more sources")


def _named(facts: Iterable[tuple[str, str]]) -> str:
    """Returns facts that are known, each after its name."""
    return ", ".join(f"{name.lower()} {fact}" for name, fact in facts if fact != MISSING)


def _names(found: Report) -> str:
    names = listed(found.get("rows") or [], MAX_LISTED_ROWS, count_of(found))
    return f"({names})" if names else ""


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
        facts = facts_of_example(example)
        _print_line(console, f"sample {index}", str(example.get("row", "")), f"({facts})" if facts else "")
        # Every line has a margin, so that no text of a row looks like one of our own lines.
        for line in _sample_text(console, example.get("segments") or []).wrap(console, max(20, console.width - INDENT)):
            console.print(Text(" " * INDENT).append_text(line), soft_wrap=True)


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
