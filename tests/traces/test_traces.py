"""The shipped recipes train as they did when their traces were recorded; see update.py for bit-identity."""

from __future__ import annotations

import copy

import pytest
from update import FIGURES, RECIPES, differences, record, recorded

TOLERANCE = 1e-6
NAMES = [path.stem for path in RECIPES]
FIRST = ["dpo", "moe", "quickstart", "vision"]
"""Compared by default: pairs, text, what `dpo` begins with, and images. The others begin with two of them."""


@pytest.mark.parametrize(
    ("num_ranks", "names"),
    [
        pytest.param(2, FIRST, marks=pytest.mark.first, id="2 ranks, four"),
        pytest.param(2, [name for name in NAMES if name not in ("dpo", "moe")], id="2 ranks, the others"),
        pytest.param(1, NAMES, marks=pytest.mark.grid, id="1 rank"),
    ],
)
def test_recipes_train_as_recorded(num_ranks: int, names: list[str]) -> None:
    expected = recorded()
    assert list(expected) == NAMES, "a trace for each recipe: run tests/traces/update.py"
    expected = {name: [line for line in expected[name] if line["ranks"] == num_ranks] for name in names}
    told = list(differences(expected, record([num_ranks], names), TOLERANCE))
    assert not told, "\n".join(told)


@pytest.mark.first
@pytest.mark.parametrize("figure", FIGURES)
def test_the_first_step_that_differs_is_told(figure: str) -> None:
    expected = recorded()
    changed = copy.deepcopy(expected)
    lines = [line for line in changed["quickstart"] if line["ranks"] == 2 and line["split"] == "train"]
    for line in lines[4:]:
        line[figure] *= 1 + 3e-6
    (told,) = differences(expected, changed, TOLERANCE)
    assert told.startswith("quickstart on 2 ranks, train step 5: ")
    lines[2][figure] *= 1 + 3e-7
    (told,) = differences(expected, changed)
    assert told.startswith("quickstart on 2 ranks, train step 3: ")


@pytest.mark.first
def test_a_missing_line_is_a_difference() -> None:
    expected = recorded()
    changed = {**expected, "dpo": expected["dpo"][:-1]}
    assert list(differences(expected, changed)) == ["dpo on 2 ranks: 8 lines recorded, 7 found"]
