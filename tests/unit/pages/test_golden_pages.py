"""A page of each objective as it was last looked at; `python tests/unit/pages/test_golden_pages.py` writes them anew.

Look at what changed in a browser before it lands. tests/unit/pages/test_in_browser.py looks for what is cut off.
"""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path
from typing import Any

import pytest

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]
from support.html_page import Page
from test_data_page import report
from test_run_page import eval_line, non_finite_line, summary, train_line, train_lines

from toolkit.pages.data_page import render_data_page
from toolkit.pages.parts.side_by_side import SideBySide
from toolkit.pages.run_page import render_report
from toolkit.pages.samples_page import SampledPrompt
from toolkit.recipe.objectives.registry import SPECS

FOLDER = Path(__file__).parent / "golden"

PREFERENCE = {"accuracy": 0.75, "margin": 1.25, "chosen_reward": 0.5, "rejected_reward": -0.75, "kl": 0.125}
ANSWERS = {"answer_accuracy": 0.5, "answer_accuracy_normalised": 0.25, "answer_stopped": 1.0, "answer_mean_tokens": 9.5}
FIGURES: dict[str, dict[str, Any]] = {
    "causal_lm": {**ANSWERS, "loss/chat": 2.5, "loss/code": 1.5, "balance_loss": 1.0, "expert_entropy": 0.9},
    "distillation": {"divergence": 0.25, "cross_entropy": 2.0},
    "kto": {name: PREFERENCE[name] for name in ("accuracy", "margin", "kl")},
    "preference": PREFERENCE,
    "reward": {name: value for name, value in PREFERENCE.items() if name != "kl"},
    "seq2seq": {},
    "sequence_classification": {"accuracy": 0.7, "f1_macro": 0.6875, "confusion": [[4, 1], [2, 3]]},
    "token_classification": {"f1": 0.75, "precision": 0.8, "recall": 0.7, "accuracy": 0.9},
}
"""Objective -> what its evaluations have besides the loss."""

OF_SAMPLES = {"cut": 0.25, "groups_without_signal": 0.5, "completion_tokens": 20.0, "longest_completion": 31}
OF_SAMPLES |= {"entropy": 1.5, "sampler_gap": 1e-4, "reward": 0.5, "reward/format": 0.75, "reward/right": -0.25}
OF_SAMPLES |= {"reward_std": 0.2, "abstained": 0.125}
SIDES = [SideBySide("<|im_start|>user\nHow far?<|im_end|>\n", "38.1 cm", "I don't know.", [(2, "a"), (4, "")], "38 cm")]
SAMPLED = SampledPrompt("rows.jsonl:3", "Who?", [(0.0, "worst", True), (1.5, "best", False), (None, "", True)])
LOSS = {"split": "train", "loss": 2.0}
LITTLE: dict[str, Any] = {"units": [], "versions": {}, "recipe_yaml": "", "data_report": {}}
CLASSES = {"train": {"read": 10, "labels": {"prose": 5, "verse": 5}}}


@functools.cache
def pages() -> dict[str, str]:
    """The HTML of each page, by its name."""
    found = {}
    for objective, figures in FIGURES.items():
        evals = [eval_line(0, 4.0, **figures), eval_line(12, 3.0, **figures)]
        if objective in ("preference", "kto", "reward", "sequence_classification"):
            evals = [{name: value for name, value in line.items() if name != "perplexity"} for line in evals]
        changes: dict[str, Any] = {} if objective == "causal_lm" else LITTLE
        changes = changes | ({"data_report": CLASSES} if "confusion" in figures else {})
        train = train_lines(12) if objective == "causal_lm" else [{**LOSS, "step": step} for step in range(1, 13)]
        found[objective] = render_report(summary([*evals, *train], side_by_side=SIDES, **changes))
    own = [{**LOSS, **OF_SAMPLES, "step": step} for step in range(1, 13)]
    found["grpo"] = render_report(summary(own, sampled=(12, [SAMPLED]), **LITTLE))
    loads = [{**LOSS, "step": 1}, {**LOSS, "step": 10, "expert_load": [[0.75, 0.25], [1.0, 0.0]]}, {**LOSS, "step": 11}]
    gaps = [*train_lines(30), non_finite_line(31), eval_line(31, None, non_finite=True), train_line(32, mfu=None)]
    found["experts"] = render_report(summary(loads, **LITTLE))
    found["gaps"] = render_report(summary(gaps, command="toolkit train 'a b.yaml'", doubts=["a doubt"], **LITTLE))
    found["data"] = render_data_page("chat", report())
    return found


def normalised(page: str) -> str:
    """The page without style and scripts, each element in a line."""
    bare = re.sub(r"<style>.*?</style>|<script>.*?</script>|sha256-[\w+/=]+", "", page, flags=re.DOTALL)
    return "\n".join(line for line in re.sub(r"(?=<[a-z])", "\n", bare).splitlines() if line.strip()) + "\n"


def test_each_objective_has_a_page() -> None:
    assert {*FIGURES, "grpo"} == set(SPECS)
    assert {path.stem for path in FOLDER.iterdir()} == set(pages())


NAMES = sorted([*FIGURES, "grpo", "experts", "gaps", "data"])
LINKS = "href src xlink:href action srcset"


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_as_it_was(name: str) -> None:
    assert normalised(pages()[name]) == (FOLDER / f"{name}.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_complete_by_itself(name: str) -> None:
    """It loads nothing, ids are unique, what refers to one finds it, and light and dark have every colour."""
    text = pages()[name]
    page = Page(text)
    of = {
        kind: [value for _, attribute, value in page.attributes if attribute in kind.split()] for kind in (LINKS, "id")
    }
    assert {link for link in of[LINKS] if not link.startswith(("#", "data:"))} <= {"data_report.html"}
    assert re.findall(r"url\((?!#)|//|@import|<iframe|<img", text) == []
    assert "default-src 'none'" in text
    assert len(of["id"]) == len(set(of["id"]))
    references = {link[1:] for link in of[LINKS] if link.startswith("#")} | set(re.findall(r"url\(#(\w+)\)", text))
    assert references <= set(of["id"])
    light, dark = text.partition("<style>")[2].partition("</style>")[0].split("prefers-color-scheme: dark")
    colours = [f"--{variable}:" for variable in set(re.findall(r"var\(--([\w-]+)\)", text))]
    assert [colour for colour in colours if colour not in light or colour not in dark] == []


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for title, text in pages().items():
        (FOLDER / f"{title}.html").write_text(normalised(text), encoding="utf-8")
