"""Packing that the recipe leaves open, on models whose rows cannot share a sample: rows are padded, and it is said."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from accelerate import Accelerator
from refusals import Outcome, finetune
from tiny import llama, recipe_values, save_llama

from toolkit.run.parts import _prepared

TEXTS = ["a king and a queen walked by the river", "the moon was high"]
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
STATE_SPACE = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
"""A model that takes no positions."""

CONVOLUTION = {
    **SIZES,
    "model_type": "lfm2",
    "num_hidden_layers": 2,
    "layer_types": ["conv", "full_attention"],
    # Large weights: the leak must not drown in rounding.
    "initializer_range": 0.5,
}
"""One that takes them, and whose convolutions run over the ends of documents."""

EXPERTS = {**SIZES, "model_type": "mixtral", "num_hidden_layers": 2, "num_local_experts": 4}
"""One whose experts in float32 do not run without values."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("padding")
    save_llama(place / "llama", TEXTS, tied=True)
    (place / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS * 10))
    return place


def rehearsed(place: Path, config: dict[str, Any], *overrides: str) -> Outcome:
    values = recipe_values(place / "llama", place / "rows.jsonl", place / "out", place / "cache")
    values["model"] = {"config": config, "tokenizer": str(place / "llama")}
    (place / "recipe.yaml").write_text(yaml.safe_dump(values))
    return finetune(str(place / "recipe.yaml"), *overrides, "--dry-run")


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (STATE_SPACE, "MambaForCausalLM takes no position_ids"),
        (CONVOLUTION, "rows that share a sample see each other in Lfm2ForCausalLM with attention"),
    ],
    ids=["no positions", "leaks"],
)
def test_left_open_rows_are_padded_and_asked_for_it_is_an_error(place: Path, config: dict[str, Any], why: str) -> None:
    padded = rehearsed(place, config)
    assert padded.code == 0, padded.told
    assert f"packing: none, each row is padded: {why}" in padded.told
    assert ", 20 samples," in padded.told, "a sample for each of the 20 rows"
    asked = rehearsed(place, config, "data.packing=true")
    assert asked.problems(f"data.packing: {why}") == [], asked.told
    assert "none, each row" not in rehearsed(place, config, "data.packing=false").told


def test_experts_in_float32_leave_no_traceback_and_the_hint_is_theirs_alone(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    told = rehearsed(place, EXPERTS).told
    assert "not planned: MixtralForCausalLM cannot run on tensors without values" in told
    assert "plan experts with training.mixed_precision=bf16" in told
    assert "Traceback" not in told + capfd.readouterr().err


@pytest.mark.parametrize(("attention", "told"), [("flex_attention", True), ("sdpa", False)])
def test_what_compiles_for_minutes_says_so_before(
    attention: str, told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    plugin: Any = SimpleNamespace(strategy=SimpleNamespace(sharded=True), compilation=None)
    accelerator: Any = SimpleNamespace(is_main_process=True)
    _prepared(accelerator, llama(attention), cast(Any, None), plugin)
    line = "flex_attention compiles its kernels in the first forward, which can take minutes\n"
    assert capsys.readouterr().err == line * told


def test_an_accelerator_that_was_built_before_does_not_hand_its_settings_on(place: Path) -> None:
    Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=3)
    told = rehearsed(place, {**SIZES, "model_type": "llama", "num_hidden_layers": 2})
    assert told.code == 0, told.told
    assert "bf16" not in told.told
