"""The page of samples: the best first, every text escaped, and no more of them than a browser loads."""

from __future__ import annotations

from pathlib import Path

from support.html_page import HOSTILE, Page

from toolkit.pages.samples_page import SampledPrompt, write_samples_page


def test_samples_are_shown_from_the_best_and_those_without_a_score_last(tmp_path: Path) -> None:
    completions = [(None, "", True), (-7.0, "worst", True), (-0.5, "best", True), (-2.0, "middling", True)]
    write_samples_page(tmp_path / "page.html", "fox", [], [SampledPrompt("f:1", "Who?", completions)])
    text = "".join(Page((tmp_path / "page.html").read_text()).text_of["prompt-1"].split("\n"))
    assert text == "f:1Who?score -0.5bestscore -2middlingscore -7worstno score(no text)"


def test_texts_are_escaped_and_the_page_loads_nothing(tmp_path: Path) -> None:
    write_samples_page(
        tmp_path / "page.html", HOSTILE, [HOSTILE], [SampledPrompt(HOSTILE, HOSTILE, [(1.0, HOSTILE, True)])]
    )
    page = Page((tmp_path / "page.html").read_text())
    assert page.elements["script"] == 0
    assert page.text_of["prompt-1"].count(HOSTILE) == 3
    assert HOSTILE in page.text_of["results"]
    assert not [value for _, name, value in page.attributes if name in ("src", "href") and value != "data:,"]


def test_of_many_prompts_the_first_are_shown(tmp_path: Path) -> None:
    prompts = [SampledPrompt(f"f:{n}", "?" * 5000, [(1.0, "!" * 5000, True)]) for n in range(120)]
    write_samples_page(tmp_path / "page.html", "fox", [], prompts)
    page = Page((tmp_path / "page.html").read_text())
    assert "prompt-100" in page.text_of
    assert "prompt-101" not in page.text_of
    assert "20 prompts more in samples.jsonl" in page.text_of["results"]
    assert page.text_of["prompt-1"].count("?") == 2000
    assert page.text_of["prompt-1"].count("!") == 2000
