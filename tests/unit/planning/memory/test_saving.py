"""What the plan says that a save takes in host memory."""

from __future__ import annotations

import pytest

from toolkit.planning.hardware import hardware_of
from toolkit.planning.planner import Planner
from toolkit.planning.setup import asked_setup
from toolkit.planning.workload.workload import workload_of
from toolkit.recipe.recipe import Recipe


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit", "adamw_4bit", "adamw_fp8"])
def test_moments_of_few_bits_are_saved_in_float32(kind: str) -> None:
    hardware = hardware_of("h100_sxm")
    recipe = Recipe.load("quickstart", [f"optimizer.kind={kind}", "checkpoint.every_steps=1"])
    planner = Planner(recipe, workload_of(recipe, "bf16"), hardware)
    setup = asked_setup(recipe, 1, hardware, None, False, None)
    numel = sum(unit.trainable_numel(1) for unit in planner.model.units)
    # Weights and two moments, in the copy beside which training goes on and in the file that is written.
    assert planner.state.of_rank(setup) == pytest.approx(2 * 12 * numel, rel=0.01)
