"""The record of a run: what it keeps, and where what limits a figure is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_card import METRICS, of_run

from toolkit.pages.card import render_card
from toolkit.pages.notebook_output import result_output
from toolkit.pages.parts.story import RUN_JSON, Start, Story, read_story
from toolkit.pages.run_page import headline, render_report
from toolkit.recipe.recipe import Recipe
from toolkit.run.parts.story import changes
from toolkit.run.shown.outcome import judge, result_of
from toolkit.terminal import Terminal, warnings_heard

LIMIT = "43 of 107 held-out rows are also in train"


def told() -> Story:
    story = Story()
    with warnings_heard(story.warn):
        Terminal(quiet=True).warn("of another rank")
        for text in ("step 3: no finite loss", "step 1,004: no finite loss", "another"):
            Terminal().warn(text)
    return story


def test_warnings_are_kept_with_their_number(tmp_path: Path) -> None:
    story = told()
    Terminal().warn("after the run")
    assert story.told() == ["step 3: no finite loss (2 times)", "another"]
    story.begin(Start(0, 2, "zero3", {}), None)
    later = Story()
    later.warn("later")
    later.begin(Start(4, 1, "ddp", {}, [["optimizer.learning_rate", "0.1", "0.2"]]), story.values())
    later.limits = [LIMIT]
    later.write(tmp_path)
    found = read_story(tmp_path)
    assert list(found.warnings) == ["step 3: no finite loss", "another", "later"]
    assert found.limits == [LIMIT]
    assert found.facts()["starts"] == (
        "from step 0 on 2 ranks; from step 4 on 1 rank with optimizer.learning_rate 0.1 -> 0.2"
    )
    assert found.facts()["duration"].endswith(" s in 2 starts")


@pytest.mark.parametrize("content", ["", "[]", "{", json.dumps({"starts": [{"wrong": 1}]})])
def test_a_record_that_cannot_be_read_is_none(content: str, tmp_path: Path) -> None:
    (tmp_path / RUN_JSON).write_text(content)
    assert read_story(tmp_path) == Story()


def test_saves_between_two_others_are_judged_by_as_many_steps(tmp_path: Path) -> None:
    """Saves of every 4 steps, and one of a stop at step 7."""
    steps = [{"split": "train", "step": step, "loss": 0.0, "reward": (step - 5) ** 2} for step in range(1, 11)]
    recipe = Recipe.load("grpo", {"training.best_by": "reward", "checkpoint.every_steps": 4})
    story, result = Story(), result_of(tmp_path, steps, tmp_path)
    judge(story, recipe, result, 7)
    assert story.best == {"step": 10, "by": "reward", "value": (4 + 9 + 16 + 25) / 4, "checkpoint": None}
    assert story.last == {"step": 10, "value": 54 / 4}
    said = "step 7 of 10, whose mean reward since the save before is 1.5; the last is 13.5"
    assert story.weights()["exported"] == said
    assert story.exported == {"step": 7, "value": (1 + 0 + 1 + 4) / 4}


def test_a_limit_stands_beside_each_figure_that_it_limits(tmp_path: Path) -> None:
    story = told()
    for split in ({"kept": 107, "also_in_train": 1}, {"kept": 107, "also_in_train": 43}):  # a stream's grows
        story.of_rows({"validation": split, "warnings": [str(split["also_in_train"])]})
    assert story.limits == [LIMIT]
    assert story.told()[2:] == ["43"]
    story.of_rows({"validation": {"kept": 3, "also_in_train": 0}, "warnings": []})
    assert story.limits == []
    metrics: list[dict[str, Any]] = [{**record, "accuracy": 1.0} for record in METRICS]
    run = of_run(metrics, limits=[LIMIT], doubts=["a warning"], outcome=headline(metrics))
    page = render_report(run)
    assert f">{LIMIT}; share of right answers; higher is better<" in page, "seen without a click"
    assert page.count(LIMIT) == 4, "the sentence at the top, the loss, the accuracy and the table of evaluations"
    assert "on rows that are not trained on" not in page
    assert "a warning" in page
    card = render_card(Recipe.load("quickstart"), run)
    assert f"On held-out data (but {LIMIT}):" in card
    assert "## Warnings\n\n- a warning\n" in card
    story.limits, story.outcome = [LIMIT], headline(metrics)
    story.write(tmp_path)
    shown = result_output(metrics, tmp_path, None, ())["text/plain"]
    assert f"accuracy 100.0% → 100.0%, held-out loss 5.0000 → 3.2500 (-35.0%) (but {LIMIT})." in shown


def test_the_headline_is_in_the_words_of_the_objective() -> None:
    evals = [{"split": "eval", "step": step, "accuracy": step / 8, "mine": 3.0 * step} for step in (2, 4)]
    rewards = [{"split": "train", "step": step, "reward": float(step)} for step in range(1, 4)]
    assert headline(METRICS) == "held-out loss 5.0000 -> 3.2500 (-35.0%)"
    assert headline([METRICS[0], {**METRICS[-1], "loss": None}]) == "held-out loss 5.0000 -> not finite"
    assert headline(METRICS[1:4]) == "training loss 4.5000 -> 3.5000 (-22.2%)"
    assert headline(METRICS[1:2]) == headline([]) == ""
    assert headline(evals) == "accuracy 25.0% -> 50.0%"
    assert headline([*rewards, *evals], "higher mine") == (
        "mean reward 1.000 -> 3.000, accuracy 25.0% -> 50.0%, mine 6 -> 12"
    )


def test_a_changed_setting_is_told_as_it_may_be_published() -> None:
    names = ["data.train=/home/me/a.jsonl", "optimizer.learning_rate=0.1", "training.output_dir=/home/me/x"]
    before = Recipe.load("quickstart", names).model_dump(mode="json")
    now = [one.replace("0.1", "0.2").replace("a.jsonl", "b.jsonl").replace("/x", "/y") for one in names]
    found = {key: (old, new) for key, old, new in changes(before, Recipe.load("quickstart", now))}
    assert found.pop("optimizer.learning_rate") == ("0.1", "0.2")
    (sources,) = found.values()
    assert ["a.jsonl" in sources[0], "b.jsonl" in sources[1], "home" in str(sources)] == [True, True, False]
