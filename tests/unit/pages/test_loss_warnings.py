"""A run that learned nothing, or that ended worse than it began, is told."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from support.cases import cases

from toolkit.pages.parts.loss_warnings import doubts_of
from toolkit.pages.parts.side_by_side import SideBySide, last_turn
from toolkit.pages.parts.story import Story
from toolkit.pages.run_page import headline
from toolkit.recipe.recipe import Recipe
from toolkit.run.shown.outcome import print_result, result_of
from toolkit.terminal import Terminal

TABLES = cases(__file__)

TOKENS = (1024, "tokens")


def records(train: list[float | None], held_out: tuple[float | None, ...] = ()) -> list[dict[str, Any]]:
    lines = [{"split": "train", "step": step, "loss": loss} for step, loss in enumerate(train, 1)]
    return [*lines, *({"split": "eval", "step": 0, "loss": loss} for loss in held_out)]


FALLING = [7.0 - 0.1 * step for step in range(30)]
BURST = [7.0, 90.0, *[math.log(1024)] * 18]


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        (records(FALLING, (7.0, 4.2)), []),
        (records(BURST), ["ended at 6.931, no better than a uniform guess over 1,024 tokens (6.931)", "learning_rate"]),
        (records([2.0, *[400.0] * 19]), ["ended at 400, no better than a uniform guess"]),
        (records(BURST[:8]), []),  # a trial of a few steps
        (records(BURST[:10] + FALLING[3:]), []),  # it did not stay there
        (records(FALLING, (3.0, 3.5)), ["is 3.5 after the last step, worse than 3", "fell from 6.9 to 4.2", "rows"]),
        (records([3.0] * 20, (3.0, 3.5)), ["worse than 3 before the first: lower optimizer.learning_rate"]),
        (records(FALLING, (3.0, None)), ["is inf after the last step"]),
        (records(FALLING, (3.0, 3.001)), []),  # rounding
        (records(FALLING, (3.0,)), []),
    ],
)
def test_what_speaks_against_a_run(losses: list[dict[str, Any]], words: list[str]) -> None:
    told = "; ".join(doubts_of(losses, TOKENS))
    assert bool(told) == bool(words)
    assert not [word for word in words if word not in told], told


def rewarded(*intervals: tuple[float | None, float]) -> list[dict[str, Any]]:
    """Records of two steps with a mean reward, if there is one, and then of an evaluation with right answers."""
    found: list[dict[str, Any]] = []
    for number, (reward, answers) in enumerate(intervals):
        steps = [] if reward is None else [reward - 0.25, reward + 0.25]
        found += [{"split": "train", "step": number, "loss": 0.0, "reward": value} for value in steps]
        found.append({"split": "eval", "step": number, "answer_accuracy": answers})
    return found


@pytest.mark.parametrize(("intervals", "answers"), TABLES["REWARDED"])
def test_a_reward_that_rises_while_answers_get_worse_is_told(intervals: Any, answers: str | None) -> None:
    told = doubts_of(rewarded(*intervals), None)
    assert ([] if answers is None else [True]) == [str(answers) in each for each in told], told


def test_without_a_guess_only_held_out_losses_speak() -> None:
    assert doubts_of(records([0.6931] * 20), None) == []


def test_the_last_lines_tell_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = result_of(tmp_path, records(BURST, (7.0, 9.0)), None, guess=TOKENS)
    print_result(Terminal(), Recipe.load("quickstart"), result, Story(doubts=[*result.doubts]))
    told = capsys.readouterr()
    assert [line.partition(":")[0] for line in told.err.splitlines() if ":" in line][-2:] == ["warning", "warning"]
    assert told.out == f"run: {tmp_path}\nreport: {tmp_path / 'report.html'}\n"


@pytest.mark.parametrize(("prompt", "words"), TABLES["LAST_TURNS"])
def test_the_last_turn_of_a_prompt(prompt: str, words: str) -> None:
    assert last_turn(prompt) == words


def test_the_last_lines_have_answers_before_and_after(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    right = SideBySide("<|user|>\nuser asks", "yes", before="no\n\x1b[2J", after="yes ")
    wrong = SideBySide("Why?", "so", before="", after="x" * 500)
    result = result_of(tmp_path, records(FALLING), None)
    story = Story(outcome=headline(result.metrics))
    print_result(Terminal(), Recipe.load("quickstart"), result, story, [right, wrong, right, right])
    first, *lines = capsys.readouterr().err.splitlines()
    assert first.startswith("training loss 6.9000 -> 4.2000 (-39.1%)")
    assert lines[:4] == ["user asks", "  before: no \u241b[2J", "  after: yes", "Why?"]
    assert lines[5] == f"  after: {'x' * 160} …"
    assert lines[6] == "  in the data: so"
    assert len([line for line in lines if "before" in line]) == 3, "a run of many samples shows three"
