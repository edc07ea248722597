"""Each page in a headless Chromium, wide and narrow, light and dark: nothing sticks out, fails or is hard to read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import test_data_page as data
import test_run_page as run
from support.browser import CHROMIUM, Browser, browser
from support.html_page import HOSTILE

from toolkit.pages.data_page import render_data_page
from toolkit.pages.parts.side_by_side import SideBySide
from toolkit.pages.run_page import render_report
from toolkit.pages.status import Status

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: install it to look at the pages"),
]

ASKED = (
    "<|im_start|>system\nAnswer in JSON.<|im_end|>\n<|im_start|>user\nConvert 15 inches to centimetres.<|im_end|>\n"
    "<|im_start|>assistant\n"
)
LONG = "a_word_without_a_place_to_break_" * 20
SIDES = [
    SideBySide(ASKED, '{"tool": "convert"}', "15 inches are 38.1 cm. " * 20, [(20, '{"to'), (40, "")], '{"tool"}'),
    SideBySide(LONG, LONG, LONG, (), LONG),
]
LINES = [run.eval_line(0, 4.0), *run.train_lines(101), run.non_finite_line(102), run.eval_line(101, 3.0)]
ROWS = [
    data.example((f"a question of row {row}, " * 9, False), ("its answer", True), row=f"chat.jsonl:{row}", split=split)
    for row, split in enumerate(["train"] * 60 + ["validation"] * 20)
]
WHOLE = run.summary(LINES, side_by_side=SIDES, command=f"toolkit train {LONG}", doubts=["a doubt"])
PAGES = {
    "report": render_report(WHOLE),
    "live report": render_report(run.summary(LINES[:9], status=Status("running", 9, 100, 60.0, 1.7e9, 30))),
    "failed report": render_report(run.summary([], status=Status("failed", 0, 100, None, 1.7e9, 30, LONG))),
    "hostile report": render_report(run.summary(LINES, title=HOSTILE, side_by_side=[SideBySide(HOSTILE, HOSTILE)])),
    "data": render_data_page("rows", {**data.report(), "examples": ROWS}),
}


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.mark.parametrize("name", PAGES)
def test_a_page_can_be_read(name: str, tab: Browser, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(PAGES[name], encoding="utf-8")
    found = {}
    for width in (1280, 390):
        for dark in (False, True):
            tab.show(file, width, dark)
            tab.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
            found[width, dark] = tab.problems()
    assert {key: problems for key, problems in found.items() if problems} == {}


def test_the_probe_finds_what_it_is_for(tab: Browser, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(
        "<p style='color:#999;background:#fff'>pale</p><p style='width:500px'>wide, with more words than fit in</p>"
        "<script>nowhere()</script>"
    )
    tab.show(file, 390, dark=False)
    found = "\n".join(tab.problems())
    for problem in ("ReferenceError: nowhere", 'of "pale"', "px wider than the window", "lies outside the window"):
        assert problem in found, found


def test_the_reference_and_the_turns_of_a_prompt(tab: Browser, tmp_path: Path) -> None:
    """Answers are side by side in a wide window, each as tall as its text; the reference is in a row below."""
    file = tmp_path / "page.html"
    file.write_text(PAGES["report"], encoding="utf-8")
    boxes = (
        "[...document.querySelectorAll('#side-by-side .sides')[0].children].map((one) => one.getBoundingClientRect())"
        ".map((box) => [box.left, box.top, box.width, box.height])"
    )
    tab.show(file, 1280, dark=False)
    *answers, reference = tab.evaluate(boxes)
    assert answers[0][1] == answers[1][1], "in one row"
    assert answers[1][3] < answers[0][3] / 3, "as tall as its text"
    assert reference[1] > max(top for _, top, _, _ in answers)
    assert reference[2] > 2 * answers[0][2]
    rows = [top for _, top, _, _ in answers]
    assert [rows.count(top) for top in sorted(set(rows))] == [2, 2], "none of four is alone in a row"
    tab.show(file, 390, dark=False)
    assert len({left for left, *_ in tab.evaluate(boxes)}) == 1, "below each other"
    turns = tab.evaluate("[...document.querySelectorAll('#side-by-side dt')].map((one) => one.textContent)")
    assert turns == ["system", "user"]


def test_the_data_page_goes_through_its_rows(tab: Browser, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(PAGES["data"], encoding="utf-8")
    tab.show(file, 1280, dark=False)

    def shown(*actions: str) -> tuple[str, list[str]]:
        """What stands there after the actions: the place, and the rows that can be seen."""
        for action in actions:
            tab.evaluate(f"(() => {{ const [card] = document.querySelectorAll('#examples'); {action}; }})()")
        rows = "[...document.querySelectorAll('#examples details')].filter((row) => row.offsetHeight)"
        place = tab.evaluate("document.querySelector('#examples output').textContent")
        return place, tab.evaluate(f"{rows}.map((row) => row.querySelector('strong').textContent)")

    names = [row["row"] for row in ROWS]
    forward = "card.querySelectorAll('button')[1].click()"
    searched = "const box = card.querySelector('input'); box.value = '{}'; box.dispatchEvent(new Event('input'))"
    chosen = "const box = card.querySelector('select'); box.value = '{}'; box.dispatchEvent(new Event('change'))"
    assert shown() == ("1 to 25 of 80", names[:25])
    assert shown(forward, forward, forward) == ("76 to 80 of 80", names[75:])
    assert tab.evaluate("document.querySelectorAll('#examples button')[1].disabled")
    assert shown(forward) == ("76 to 80 of 80", names[75:]), "there are no more"
    assert shown(searched.format("Row 7,")) == ("1 to 1 of 1", names[7:8]), "case does not matter"
    assert shown(searched.format("nowhere")) == ("no such row", [])
    assert shown(searched.format(""), chosen.format("held-out")) == ("1 to 20 of 20", names[60:])
    assert tab.problems() == []
