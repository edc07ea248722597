"""Which evaluation is the best one, and when they get no better."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from support.cases import cases

from toolkit.errors import BadInputError
from toolkit.recipe.recipe import Recipe
from toolkit.recipe.schema import Tracker, TrainingSection
from toolkit.training.extensions.best import judged, patience_is_over

TABLES = cases(__file__)


@pytest.mark.parametrize(("losses", "patience", "over"), TABLES["ENDS"])
def test_the_run_ends_after_so_many_evaluations_without_a_lower_loss(
    losses: list[float | None], patience: int | None, over: bool
) -> None:
    records = [{"split": "eval", "step": 10 * number, "loss": loss} for number, loss in enumerate(losses)]
    steps = [{"split": "train", "step": 5, "loss": 100.0}] * 9
    assert (patience_is_over([*steps, *records], training(patience)) is not None) == over


def training(patience: int | None, **fields: Any) -> TrainingSection:
    return TrainingSection(output_dir="run", max_steps=9, patience=patience, **fields)


def test_by_the_answers_it_is_the_share_of_right_ones_that_decides() -> None:
    """The loss falls all along, and the answers get no better."""
    run = ((3.0, 0.2), (2.0, 0.5), (1.0, 0.5), (0.5, 0.4))
    records = [
        {"split": "eval", "step": 10 * n, "loss": loss, "answer_accuracy": right} for n, (loss, right) in enumerate(run)
    ]
    assert patience_is_over(records, training(2, best_by="answers")) == (
        "no higher share of right answers in 2 evaluations (training.patience); the highest is 50.0%, at step 10"
    )
    assert patience_is_over(records, training(2)) is None
    # Rewards are figures of steps: their means up to each evaluation are compared: 2.0, 2.5 and 3.0.
    own = [{"split": "train", "step": step, "reward": reward} for step, reward in enumerate((1, 3, 0, 5, 2, 4), 1)]
    asked = [{"split": "eval", "step": step, "answer_accuracy": 0.5} for step in (0, 2, 4, 6)]
    assert patience_is_over([*asked, *own], training(1, best_by="reward", eval_every_steps=2)) is None
    assert patience_is_over([*asked, *own], training(1, best_by="reward", eval_every_steps=1)) is not None


@pytest.mark.parametrize(("best_by", "record", "merit"), TABLES["DECIDE"])
def test_any_figure_of_the_evaluations_may_decide(best_by: str, record: dict[str, Any], merit: float) -> None:
    assert judged([{"split": "eval", "step": 3, **record}], training(None, best_by=best_by).best_by, 1) == {3: merit}


def test_a_reward_counts_as_its_mean_over_the_steps_between_two_saves() -> None:
    records = [{"split": "train", "step": step, "reward": reward} for step, reward in enumerate((9, 1, 2, 6, 9))]
    assert judged(records, "reward", 3, at=3)[3] == 3.0
    assert judged(records, "reward", 3, at=4) == {1: 5.0, 4: 17 / 3}, "of each step once"
    answered = [*records, {"split": "eval", "step": 2, "reward": 7.0}]
    assert judged(answered, "reward", 3) == {2: 7.0}, "evaluations have it"


@pytest.mark.parametrize(("best_by", "told"), TABLES["REFUSED"])
def test_a_figure_that_cannot_decide_is_refused(best_by: str, told: str) -> None:
    with pytest.raises(BadInputError, match=re.escape(told)):
        Recipe.load("quickstart", {"training.best_by": best_by})


def test_the_trackers_are_accelerates() -> None:
    assert sorted(get_args(Tracker)) == sorted(LOGGER_TYPE_TO_CLASS)
