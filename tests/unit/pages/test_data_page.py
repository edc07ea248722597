"""The data report as a page and on the console: complete, tolerant of missing keys, and safe with any text."""

from __future__ import annotations

import re
from copy import deepcopy
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.cases import cases
from support.html_page import HOSTILE, Page

from toolkit.pages.data_console import shortened, show_report
from toolkit.pages.data_page import render_data_page, write_data_page

TABLES = cases(__file__)

MARKUP = "[bold red]loud[/] [/nothing] :smile: [link=https://evil.example]x[/link]"


def split(**changes: Any) -> dict[str, Any]:
    return deepcopy(TABLES["SPLIT"]) | changes


def source(name: str, **changes: Any) -> dict[str, Any]:
    counts = {"read": 500, "kept": 498, "num_dropped": 2, "tokens": 61728}
    return {"source": name, "layout": "messages", **counts, "weight": None, "passes": 1.0, "share": 0.5} | changes


def example(*segments: tuple[str, bool], **changes: Any) -> dict[str, Any]:
    listed = [list(segment) for segment in segments]
    return {"row": "chat.jsonl:1", "tokens": 40, "target_tokens": 12, "segments": listed} | changes


def report(**changes: Any) -> dict[str, Any]:
    held_out = split(read=50, kept=49, num_dropped=1, dropped={}, also_in_train=4, fill_rate=None)
    return {**deepcopy(TABLES["REPORT"]), "train": split(), "validation": held_out} | changes


def texts(value: Any) -> Any:
    """The report with `HOSTILE`'s stand-in in all places where a text of a user can stand."""
    named = {"count": 1, "rows": ["TEXT"]}
    places = {"dropped": {"TEXT": named}, "duplicates": named, "long": {**named, "cut_tokens": 1}}
    listed = {"sources": [source("TEXT", layout="TEXT"), source("TEXT 2")], "labels": {"TEXT": 3}}
    hostile = split(**places, **listed, longest={"row": "TEXT", "tokens": 5})
    whole = report(train=hostile, validation=deepcopy(hostile), warnings=["TEXT"], targets="TEXT", chat_template="TEXT")
    whole["examples"] = [example(("TEXT", False), ("TEXT", True), row="TEXT", label="TEXT")]
    return replaced(whole, value)


def replaced(value: Any, text: str) -> Any:
    if isinstance(value, dict):
        return {replaced(key, text): replaced(item, text) for key, item in value.items()}
    if isinstance(value, list):
        return [replaced(item, text) for item in value]
    return value.replace("TEXT", text) if isinstance(value, str) else value


def text_of(**changes: Any) -> dict[str, str]:
    return Page(render_data_page("chat", report(**changes))).text_of


def shown(data: dict[str, Any], **options: Any) -> str:
    """What a console prints, by default one without colour."""
    file = StringIO()
    show_report(Console(file=file, **{"width": 400, **options}), data)
    return file.getvalue()


# ---- the page ----


def test_lengths_are_drawn_with_max_length_marked() -> None:
    """Bars as wide as their bins, none for empty ones at the end, and an axis that reaches the mark if it is near."""

    def card(**changes: Any) -> tuple[list[tuple[str, str]], list[str], str]:
        found = render_data_page("t", report(**changes)).partition('id="chart-lengths-train"')[2].partition("</sec")[0]
        bars = re.findall(r'<i style="flex:([^;]+);height:([^"]+)%"', found)
        return bars, re.findall(r'<b style="left:([^"]+)%"', found), found

    assert card()[:2] == ([("128", "100.00"), ("128", "28.57"), ("128", "12.86"), ("128", "1.00")], ["100.00"])
    assert card(max_length=640)[:2] == ([*card()[0], ("128", "0.00")], ["100.00"])
    assert card(max_length=256)[1] == ["50.00"]
    padded = {"edges": [0, 200, 400, 600, 50_000, 100_000], "counts": [5, 0, 1, 0, 0]}
    assert len(card(train=split(length_histogram=padded))[0]) == 3
    bars, marks, far = card(max_length=100_000)  # the rows would be one thin bar
    assert (len(bars), marks) == (4, [])
    assert "max_length 100,000 is farther right" in far
    assert "max_length" not in card(max_length=None)[2]


def test_what_holds_for_all_rows_names_none() -> None:
    names = [f"chat.jsonl:{line}" for line in range(20)]
    noted = {what: {"count": count, "rows": names} for what, count in (("column id is not read", 997), ("half", 500))}
    found = text_of(train=split(noted=noted))["noted"]
    assert "column id is not readtrain997all rows" in found
    assert "halftrain500chat.jsonl:0, chat.jsonl:1" in found


def test_the_first_rows_are_open_and_the_others_unfold() -> None:
    rows = [example((f"question {row}", False), ("answer", True), row=f"chat.jsonl:{row}") for row in range(100)]
    html = render_data_page("chat", {**report(), "examples": rows})
    page = Page(html)
    assert page.elements["details"] == 100 + html.count("Values as a table")
    assert html.count(" open>") == 3
    assert "Decoded samples 100 of 1,046 rows, evenly spaced" in " ".join(page.text_of["examples"].split())
    assert "question 99" in page.text_of["examples"]
    few = render_data_page("chat", {**report(train=split(kept=2), validation=None), "examples": rows[:2]})
    assert "Decoded samples all rows" in " ".join(Page(few).text_of["examples"].split())


@pytest.mark.parametrize("histogram", TABLES["HISTOGRAMS"])
def test_a_histogram_that_cannot_be_drawn_is_left_out(histogram: dict[str, Any] | None) -> None:
    data = split(length_histogram=histogram, target_share_histogram=histogram)
    assert not [name for name in text_of(train=data, validation=data) if name.startswith(("chart-l", "chart-sh"))]


def test_a_first_window_is_named() -> None:
    found = text_of(streaming=True)
    for name in ("chart-lengths-train", "splits", "labels"):
        assert "(first window)" in found[name]
    assert "first window" not in "".join(text_of().values())


@pytest.mark.parametrize("data", TABLES["MINIMAL"])
def test_any_key_may_be_missing(data: dict[str, Any]) -> None:
    page = Page(render_data_page("t", data))
    assert page.elements["h1"] == 1
    assert re.search(r"\bnan\b", " ".join(page.text_of.values())) is None
    assert "nan" not in shown(data)


# ---- safety ----


def test_every_text_of_the_page_is_escaped() -> None:
    hostile, benign = (render_data_page(text, texts(text)) for text in (HOSTILE, "benign"))
    assert HOSTILE not in hostile
    page, expected = Page(hostile), Page(benign)
    assert page.elements == expected.elements
    assert page.attributes == expected.attributes
    assert page.elements["script"] == 1
    assert hostile.partition("<script>")[2] == benign.partition("<script>")[2]
    # The line of a folded sample has its beginning alone, which cuts one.
    assert "".join(page.text_of.values()).count(HOSTILE) == "".join(expected.text_of.values()).count("benign") - 1 > 20


@pytest.mark.parametrize("text", ["half a pair \ud83d", "nul \0 byte", "עברית", "😀", "$x$ {braces} \x1b[31m"])
def test_any_text_can_be_written_and_shown(tmp_path: Path, text: str) -> None:
    path = tmp_path / "data_report.html"
    write_data_page(path, text, texts(text))
    assert "examples" in Page(path.read_bytes().decode("utf-8")).text_of
    assert [item.name for item in tmp_path.iterdir()] == ["data_report.html"]
    shown(texts(text)).encode("utf-8")


# ---- the console ----


def test_the_console_says_what_became_of_the_rows() -> None:
    many = [example((f"text {index}", True)) for index in range(5)]
    labelled = example(("a review", False), target_tokens=0, label="positive")
    reports = (
        report(),
        report(streaming=True, warnings=["one", "two"], examples=many),
        {"train": split(sources=[source("a")]), "examples": [labelled]},
    )
    assert "\n".join(map(shown, reports)) == TABLES["CONSOLE"]


def test_targets_are_coloured_where_there_is_colour() -> None:
    text = shown(report(), force_terminal=True, color_system="standard", no_color=False)
    assert "\x1b[32manswer\x1b[0m" in text
    assert "\x1b[2mquestion\x1b[0m" in text
    assert "\x1b[33m   warning: half" in text
    assert "⟦" not in text


def test_a_console_that_cannot_encode_the_marks_has_others(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("w", encoding="ascii") as file:
        show_report(Console(file=file, width=200), texts("Grüße " * 200))
    assert "[[Gr??e" in path.read_text()
    assert " ... " in path.read_text()


@pytest.mark.parametrize("has_colour", [True, False])
def test_no_text_is_markup(has_colour: bool) -> None:
    options: dict[str, Any] = (
        {"force_terminal": True, "color_system": "standard", "no_color": False} if has_colour else {}
    )
    data = texts(MARKUP)
    text = shown(data, **options)
    # Twice in the label list, the reasons and so on: each occurrence as it was given.
    assert text.count(MARKUP) > 15
    assert "☺" not in text
    assert "😄" not in text
    assert "\x1b]8" not in text  # a link


def test_no_text_moves_the_cursor_or_forges_a_line() -> None:
    forged = "x\r\nwarning: all is well\x1b[2J\x9b31m\r\b\u202e\n   warning: forged"
    text = shown(texts(forged))
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text)
    assert not re.search(r"^(warning: all| {3}warning: forged)", text, re.MULTILINE)


# ---- shortened samples ----


def test_long_segments_lose_their_middle_and_of_many_both_ends_are_shown() -> None:
    whole = [("question " * 13, False), ("answer " * 30, True)]
    assert shortened(whole) == whole
    assert shortened([("a", True), ("b", True), ("c", False)]) == [("ab", True), ("c", False)]
    long = "x" * 5000
    cut = [("x" * 60 + " … " + "x" * 60, False), ("x" * 120 + " … " + "x" * 120, True)]
    assert shortened([(long, False), (long, True)]) == cut
    many = [(str(number), number % 2 == 1) for number in range(1000)]
    assert shortened(many) == [*many[:4], (" … ", False), *many[-4:]]
