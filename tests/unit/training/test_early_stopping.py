"""When a held-out loss falls no more."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from toolkit.errors import BadInputError
from toolkit.recipe.recipe import Recipe
from toolkit.recipe.schema import Tracker, TrainingSection
from toolkit.training.extensions.early_stopping import patience_is_over


@pytest.mark.parametrize(
    ("losses", "patience", "over"),
    [
        ([3, 2, 1], 1, False),
        ([3, 3], 1, True),
        ([3, 2, 2.5], 2, False),
        ([3, 2, 2.5, 2.2], 2, True),
        ([3, 2, 2.5, 1.9, 2.2], 2, False),
        ([3, None, 2], 2, False),
        ([3, None, None], 2, True),
        ([None, None], 2, True),
        ([3, 4, 5, 6], None, False),
        ([3], 1, False),
    ],
)
def test_the_run_ends_after_so_many_evaluations_without_a_lower_loss(
    losses: list[float | None], patience: int | None, over: bool
) -> None:
    records = [{"split": "eval", "step": 10 * number, "loss": loss} for number, loss in enumerate(losses)]
    steps = [{"split": "train", "step": 5, "loss": 100.0}] * 9
    assert (patience_is_over([*steps, *records], training(patience)) is not None) == over


def training(patience: int | None, **fields: Any) -> TrainingSection:
    return TrainingSection(output_dir="run", max_steps=9, patience=patience, **fields)


def test_it_says_where_the_lowest_was() -> None:
    records = [{"split": "eval", "step": step, "loss": loss} for step, loss in ((0, 3), (10, 2), (20, 2.5))]
    assert patience_is_over(records, training(1)) == (
        "no lower held-out loss in 1 evaluation (training.patience); the lowest is 2, at step 10"
    )


def test_by_the_answers_it_is_the_share_of_right_ones_that_decides() -> None:
    """The loss falls in the first case, where the answers get no better, and rises in the second."""
    falling, rising = ((3.0, 0.2), (2.0, 0.5), (1.0, 0.5), (0.5, 0.4)), ((1.0, 0.2), (2.0, 0.3), (3.0, 0.4))
    records = [
        [
            {"split": "eval", "step": 10 * n, "loss": loss, "answer_accuracy": right}
            for n, (loss, right) in enumerate(run)
        ]
        for run in (falling, rising)
    ]
    assert patience_is_over(records[0], training(2, best_by="answers")) == (
        "no larger share of right answers in 2 evaluations (training.patience); the largest is 50.0%, at step 10"
    )
    assert patience_is_over(records[1], training(1, best_by="answers")) is None
    assert patience_is_over(records[0], training(2)) is None


def test_without_evaluations_it_has_no_effect() -> None:
    with pytest.raises(BadInputError, match=r"training\.patience has no effect without training\.eval_every_steps"):
        Recipe.load("quickstart", ["training.patience=2", "training.eval_every_steps=null"])


def test_the_trackers_are_accelerates() -> None:
    assert sorted(get_args(Tracker)) == sorted(LOGGER_TYPE_TO_CLASS)
