"""Rewards of sampled completions: their values, and functions that return something else."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cases import cases

from toolkit.errors import BadInputError
from toolkit.generation.sampling.rewards import Completions, Rewards
from toolkit.generation.sampling.sampled_rows import PromptForm
from toolkit.generation.text.rows import PromptRow
from toolkit.recipe.objectives.grpo import RewardSection

TABLES = cases(__file__)

ROWS = [PromptRow(f"rows.jsonl:{i}", "q", "q", answers=(answer,), fields={"hard": i}) for i, answer in enumerate("789")]
COMPLETIONS = Completions(["it is 7", "<b>8</b> or 9", "Nine"], [3, 10, 8], [True, False, True], ROWS)


def rewards(*sections: dict[str, Any], rows: list[PromptRow] = ROWS) -> Rewards:
    made = [RewardSection(name=f"r{number}", **section) for number, section in enumerate(sections)]
    return Rewards(made, lambda: rows, PromptForm(False), None, 10, 2, "cpu", ExitStack())


def function(folder: Path, body: str) -> str:
    (folder / "mine.py").write_text(body)
    return f"{folder / 'mine.py'}:score"


def test_each_reward_has_its_value_and_the_sum_is_weighted(tmp_path: Path) -> None:
    score = function(tmp_path, "def score(completion, row):\n    return len(completion) + row['hard']\n")
    found = rewards(
        {"compare": "numeric"},
        {"compare": r"text=\d"},
        {"match": "<b>.*</b>", "weight": 0.5},
        {"compare": score, "weight": -0.1},
        {"overlong": 4, "weight": 2.0},
    )
    values, sums = found.of(COMPLETIONS)
    # The last number; the last digit; the pattern; lengths with `hard`; 0 up to 6 of 10 tokens, and -1 for a cut one.
    assert values.tolist() == [[1, 1, 0, 7, 0], [0, 0, 1, 14, -1], [0, 0, 0, 6, -0.5]]
    assert sums.tolist() == pytest.approx([1 + 1 - 0.7, 0.5 - 1.4 - 2, -0.6 - 1])


def test_a_batched_function_gets_all_completions_of_a_step_at_once(tmp_path: Path) -> None:
    body = "def score(completions, rows):\n    return [len(rows) + row['hard'] for row in rows]\n"
    values, _ = rewards({"compare": function(tmp_path, body), "batched": True}).of(COMPLETIONS)
    assert values[:, 0].tolist() == [3, 4, 5]


@pytest.mark.parametrize(("body", "batched", "expected"), TABLES["NO_NUMBERS"])
def test_a_function_that_returns_no_number_is_named_with_its_row(
    tmp_path: Path, body: str, batched: bool, expected: str
) -> None:
    score = function(tmp_path, f"def score(completion, row):\n    {body}\n")
    with pytest.raises(BadInputError, match=expected):
        rewards({"compare": score, "batched": batched}).of(COMPLETIONS)


def test_a_function_may_abstain_but_not_from_all(tmp_path: Path) -> None:
    score = function(tmp_path, "def score(completion, row):\n    return None if row['hard'] == 1 else row['hard']\n")
    values, sums = rewards({"compare": score, "weight": 2.0}, {"match": "it"}).of(COMPLETIONS)
    assert np.isnan(values).tolist() == [[False, False], [True, False], [False, False]]
    assert (np.isnan(sums).tolist(), sums[[0, 2]].tolist()) == ([False, True, False], [1.0, 4.0])
    with pytest.raises(BadInputError, match=r"objective.rewards: r0 returned None for all 3 completions of the step"):
        rewards({"compare": function(tmp_path, "def score(completion, row):\n    return None\n")}).of(COMPLETIONS)


def test_rows_without_the_number_that_is_compared_are_named_before_the_first_step() -> None:
    rows = [*ROWS, PromptRow("rows.jsonl:3", "q", "q", answers=("ten",))]
    with pytest.raises(BadInputError, match=r"r0: compare: the answer of rows\.jsonl:3 holds no number"):
        rewards({"compare": "numeric"}, rows=rows)


@pytest.mark.parametrize(("section", "expected"), TABLES["REFUSED"])
def test_a_reward_that_cannot_be_meant_is_refused(section: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        RewardSection(name="r", **section)
