"""When held-out prompts are continued while a run trains."""

from __future__ import annotations

import pytest

from toolkit.run.held_out_samples import steps_between


@pytest.mark.parametrize(
    ("num_steps", "every", "expected"),
    [
        (100, None, []),
        (100, 100, []),
        (10, 5, [5]),
        (11, 5, [5, 10]),
        (100, 20, [20, 40, 60, 80]),
        (100, 10, [20, 40, 60, 80]),
        (70, 10, [10, 20, 40, 50]),
        (100_000, 1, [20_000, 40_000, 60_000, 80_000]),
    ],
)
def test_evaluations_that_continue_prompts_are_few_and_spread(
    num_steps: int, every: int | None, expected: list[int]
) -> None:
    assert steps_between(num_steps, every) == expected
