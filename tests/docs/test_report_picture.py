"""docs/picture_of_report.py finds in a report what it draws, and the picture of docs/real_model.md is one of those."""

from __future__ import annotations

import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

from toolkit.pages.parts.side_by_side import SideBySide
from toolkit.pages.run_page import RunSummary, render_report

pytestmark = pytest.mark.first

DOCS = Path(__file__).parents[2] / "docs"
DRAW = runpy.run_path(str(DOCS / "picture_of_report.py"))["draw"]
ASKED = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nIs 1 < 2 & 3?<|im_end|>\n<|im_start|>assistant\n"
LINES = [
    {"split": "eval", "step": 0, "loss": 2.4},
    *({"split": "train", "step": step, "tokens": 9 * step, "loss": 2 / step} for step in (1, 2)),
    {"split": "eval", "step": 2, "loss": 0.5},
]


def page(*samples: SideBySide) -> str:
    return render_report(RunSummary("base fine-tuned on rows", "{}", LINES, {}, [], {}, {}, samples))


def texts(drawn: str) -> list[str]:
    return [
        "".join(element.itertext()) for element in ElementTree.fromstring(drawn).iter() if element.tag[-4:] == "text"
    ]


def test_it_draws_the_loss_and_the_answers() -> None:
    sample = SideBySide(ASKED, '{"less": true}', "I think </text> so.", [(1, "between")], "{}")
    drawn = DRAW(page(sample, SideBySide("second", "x", "y", (), "z")), 1)
    shown = texts(drawn)
    assert shown[0] == "base fine-tuned on rows"
    assert "from 2.400 to 0.500" in shown[1]
    assert shown[-7:] == [
        *("Is 1 < 2 & 3?", "Before training", "I think </text> so."),
        *("After training", "{}", "In the data", '{"less": true}'),
    ]
    assert drawn.count("<path") > 5, "the curves"


def test_a_report_without_prompts_is_told() -> None:
    with pytest.raises(SystemExit, match="side-by-side"):
        DRAW(page(), 1)


def test_the_picture_of_the_real_model_is_small_and_whole() -> None:
    drawn = (DOCS / "pictures/real_model.svg").read_text(encoding="utf-8")
    assert len(drawn) < 150_000
    assert {"Before training", "After training", "In the data"} <= set(texts(drawn))
    assert 'href="http' not in drawn
