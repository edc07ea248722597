"""Packing that the recipe leaves open, on models whose rows cannot share a sample: rows are padded, and it is said."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from accelerate import Accelerator
from support.refusals import Outcome as Refusal
from support.refusals import finetune
from support.texts import write_rows
from support.tiny import llama, recipe_values, save_llama
from typer.testing import CliRunner

from toolkit.cli.app import app
from toolkit.errors import BadInputError
from toolkit.recipe.recipe import Recipe
from toolkit.run.stages.sharded_model import prepare_forwards
from toolkit.run.stages.stages import OpenedRun
from toolkit.verify import Outcome, ShardedRun, verify
from toolkit.verify.launch import Launch

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
    write_rows(place / "rows.jsonl", ({"text": text} for text in TEXTS * 10))
    return place


def written(place: Path, config: dict[str, Any]) -> str:
    """The path of a recipe."""
    values = recipe_values(place / "llama", place / "rows.jsonl", place / "out", place / "cache")
    values["model"] = {"config": config, "tokenizer": str(place / "llama")}
    (place / "recipe.yaml").write_text(yaml.safe_dump(values))
    return str(place / "recipe.yaml")


def rehearsed(place: Path, config: dict[str, Any], *overrides: str) -> Refusal:
    return finetune(written(place, config), *overrides, "--dry-run")


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
    assert ", samples 20," in padded.told, "a sample for each of the 20 rows"
    asked = rehearsed(place, config, "data.packing=true")
    assert asked.problems(f"data.packing: {why}") == [], asked.told
    assert "none, each row" not in rehearsed(place, config, "data.packing=false").told


@pytest.mark.parametrize(
    ("config", "packed"),
    [
        (STATE_SPACE, False),
        ({**SIZES, "model_type": "llama", "num_hidden_layers": 2}, True),
        ({"model_type": "x"}, None),
    ],
    ids=["no positions", "llama", "no model"],
)
def test_data_shows_the_rows_as_a_run_would_train_on_them(
    place: Path, config: dict[str, Any], packed: bool | None
) -> None:
    recipe = written(place, config)
    told = CliRunner().invoke(app, ["data", recipe, "--json"])
    report = json.loads(told.stdout)
    assert report["packing"] is (packed is not False)
    assert report["train"]["samples"] == 20 if packed is False else report["train"]["samples"] < 20
    expected = {
        False: ["packing: none, each row is padded: MambaForCausalLM takes no position_ids"],
        True: [],
        None: ["shown packed, as the model that decides it could not be built: model.config: no model can be built"],
    }[packed]
    assert [warning[: len(line)] for warning, line in zip(report["warnings"][-1:], expected, strict=False)] == expected
    assert [warning for warning in report["warnings"] if "pack" in warning][len(expected) :] == []
    asked = CliRunner().invoke(app, ["data", recipe, "data.packing=true", "--json"])
    assert json.loads(asked.stdout)["packing"], "asked for, it is shown, and the run refuses it"


@pytest.mark.parametrize(("config", "why"), [(STATE_SPACE, "no position_ids"), (CONVOLUTION, "see each other in Lfm2")])
def test_verify_compares_the_rows_that_a_run_would_train_on(
    place: Path, config: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def ranks(recipe: Recipe, launch: Launch, steps: int, folder: Path, seconds: float) -> ShardedRun:
        asked.append(recipe.data.packing)
        return ShardedRun(Outcome([], [], {}, [], {}), {"packing": "none", "ranks": "2"}, "no", None)

    monkeypatch.setattr("toolkit.verify.run_ranks", ranks)
    monkeypatch.setattr("toolkit.verify.compare", lambda *_: [])
    report = verify(Recipe.load(written(place, config)), steps=1)
    assert asked == [False], "the ranks take the plain side's rows"
    assert report.facts["packing"].startswith("none, each row is padded: ")
    assert why in report.facts["packing"]
    with pytest.raises(BadInputError, match=r"data\.packing") if config is STATE_SPACE else nullcontext():
        verify(Recipe.load(written(place, config), ["data.packing=true"]), steps=1)
    assert asked[1:] == ([] if config is STATE_SPACE else [True]), "asked for, a leak is told by a row of the report"


def test_experts_in_float32_are_planned(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """torch 2.13 has no grouped product of them without values."""
    told = rehearsed(place, EXPERTS).told
    assert "not planned" not in told
    assert "Traceback" not in told + capfd.readouterr().err


@pytest.mark.parametrize(("attention", "told"), [("flex_attention", True), ("sdpa", False)])
def test_what_compiles_for_minutes_says_so_before(
    attention: str, told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    plugin: Any = SimpleNamespace(strategy=SimpleNamespace(sharded=True), compilation=None)
    accelerator: Any = SimpleNamespace(is_main_process=True)
    nothing: Any = None
    loaded: Any = SimpleNamespace(model=llama(attention), load_weights=None)
    prepare_forwards(OpenedRun(nothing, accelerator, plugin, nothing, nothing), loaded)
    line = "flex_attention compiles its kernels in the first forward, which can take minutes\n"
    assert capsys.readouterr().err == line * told


def test_an_accelerator_that_was_built_before_does_not_hand_its_settings_on(place: Path) -> None:
    Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=3)
    told = rehearsed(place, {**SIZES, "model_type": "llama", "num_hidden_layers": 2})
    assert told.code == 0, told.told
    assert "bf16" not in told.told
