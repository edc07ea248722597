"""The table of what cannot go together: every row is told, by the recipe too, and says what to do."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from support.cases import cases

import toolkit
from toolkit.errors import BadInputError, RecipeError
from toolkit.recipe.combinations import COMBINATIONS, refusals, refuse
from toolkit.recipe.features import Surroundings, settings_of_backend
from toolkit.recipe.recipe import Recipe
from toolkit.sharding.plan.strategy import STRATEGIES

BASE = "data.chat_template=null | logging.held_out_samples=0 | training.eval_every_steps=null"
TABLES = cases(__file__)


def found_in(row: str | tuple[str, dict[str, Any]], names: dict[str, str]) -> list[str]:
    words, around = (row, {}) if isinstance(row, str) else row
    words = re.sub(r"\b[A-Z][A-Z_0-9]+\b", lambda name: names[name[0]], words)
    try:
        recipe = Recipe.load("quickstart", f"{BASE} | {words}".split(" | "))
    except RecipeError as error:
        return error.problems
    return list(map(str, refusals(recipe, Surroundings(**around))))


def test_every_row_is_told_alone_and_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").touch()
    config = '{"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": "all-linear"}'
    (tmp_path / "adapter_config.json").write_text(config)
    wrong, names = [], TABLES["NAMES"] | {"ADAPTER": str(tmp_path)}
    for combination, row in zip(COMBINATIONS, TABLES["ROWS"], strict=True):
        told = found_in(row, names)
        verb = "has no effect with" if combination.is_idle else "is not possible with"
        ends = verb in told[0] and told[0].endswith(f"; {combination.mend}") if len(told) == 1 else False
        wrong += [] if ends and not re.search(r"[{}]|None", told[0]) else [(row, told)]
    assert wrong == []


KEY = re.compile(rf"\b({'|'.join(Recipe.model_fields)})\.[a-z_]+")
PACKAGE = Path(toolkit.__file__).parent


def refused_elsewhere(source: str) -> list[str]:
    """Texts that refuse settings of two sections; those of `contradiction` know nothing but settings."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise):
            parts = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
            text = " ".join(part for part in parts if isinstance(part, str))
            is_of_settings = re.search(
                "has no effect|is not possible|exclude", text
            ) or "contradiction(" in ast.unparse(node)
            if is_of_settings and len({key.split(".")[0] for key in (m[0] for m in KEY.finditer(text))}) > 1:
                found.append(text)
    return found


def test_settings_of_two_sections_are_refused_by_the_table_alone() -> None:
    sources = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
    assert {name: found for name, source in sources.items() if (found := refused_elsewhere(source))} == {}


def test_a_refusal_outside_the_table_is_found() -> None:
    source = """
raise contradiction("training.patience needs data.validation; set it")
raise BadInputError(f"export.merge has no effect {why}; set adapter.kind=lora")
raise contradiction("data.min_pixels is more than data.max_pixels")
raise RecipeError(path, ["checkpoint.resume: undo it, or choose another training.output_dir"])
"""
    assert len(refused_elsewhere(source)) == 2


def test_by_block_is_refused_for_the_strategies_that_gather_once_a_step() -> None:
    for strategy in STRATEGIES.values():
        by_block = settings_of_backend(strategy=strategy.name, accumulate="by_block", activation_checkpointing=1)
        told = any("strategy" in refusal.problem for refusal in refusals(by_block))
        assert told == (not strategy.reshard_each_micro_batch), strategy.name
        for setting in ({"experts": 2}, {"offload": "optimizer"}):
            settings = settings_of_backend(strategy=strategy.name, **setting)
            assert bool(refusals(settings)) == (not strategy.sharded), strategy.name
    with pytest.raises(BadInputError, match=r"offload optimizer is not possible with sharding.strategy ddp"):
        refuse(settings_of_backend(strategy="ddp", offload="optimizer"))


def test_several_at_once_are_told_at_once() -> None:
    with pytest.raises(RecipeError) as error:
        Recipe.load("quickstart", ["sharding={experts: 2, strategy: ddp, offload: optimizer}"])
    assert [line.partition(" is not")[0].partition(" has no")[0] for line in error.value.problems] == [
        "sharding.experts",
        "sharding.offload optimizer",
    ]


def test_by_block_checkpoints_every_block_without_being_asked() -> None:
    words = ["sharding.accumulate=by_block", "training.gradient_accumulation_steps=2"]
    recipe = Recipe.load("quickstart", words)
    assert recipe.sharding.activation_checkpointing == 1
    assert recipe.origins()["sharding.activation_checkpointing"] == (1, "implied by sharding.accumulate")
    assert Recipe.load("quickstart", [*words, "sharding.activation_checkpointing=auto"]).sharding == recipe.sharding
    with pytest.raises(RecipeError, match=r"by_block is not possible with sharding.activation_checkpointing 2"):
        Recipe.load("quickstart", [*words, "sharding.activation_checkpointing=2"])
