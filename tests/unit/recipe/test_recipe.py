"""toolkit.recipe.recipe: everything wrong is reported together, before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.cases import cases

from toolkit.errors import BadInputError, RecipeError
from toolkit.pages.card import recipe_for_readers
from toolkit.recipe.recipe import Recipe, apply_overrides, find_recipe, sections_of, shipped_recipes
from toolkit.recipe.schema import steps_of_run
from toolkit.suggest.draft import _lines

TABLES = cases(__file__)

MINIMAL = {
    "model": {"name_or_path": "someone/model"},
    "data": {"train": "rows.jsonl", "max_length": 128},
    "optimizer": {"learning_rate": 1e-4},
    "training": {"output_dir": "out", "max_steps": 10},
}


def write(path: Path, values: object) -> Path:
    path.write_text(values if isinstance(values, str) else yaml.safe_dump(values), encoding="utf-8")
    return path


def problems(tmp_path: Path, values: object, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        Recipe.load(write(tmp_path / "r.yaml", values), overrides)
    return caught.value.problems


def test_a_minimal_recipe_gets_defaults(tmp_path: Path) -> None:
    recipe = Recipe.load(write(tmp_path / "r.yaml", MINIMAL))
    assert recipe.training.micro_batch_size == 1
    assert recipe.schedule.kind == "cosine"
    assert recipe.origins()["training.max_steps"] == (10, str(tmp_path / "r.yaml"))
    assert recipe.origins()["training.micro_batch_size"] == (1, "default")


def test_a_no_without_quotes_is_no_mixed_precision(tmp_path: Path) -> None:
    path = write(tmp_path / "r.yaml", MINIMAL)
    recipe = Recipe.load(path, ["training.mixed_precision=no"])
    assert recipe.training.mixed_precision == "no"
    assert Recipe.load(write(tmp_path / "again.yaml", recipe.to_yaml())).training.mixed_precision == "no"


def test_overrides_replace_and_are_named_as_origin(tmp_path: Path) -> None:
    path = write(tmp_path / "r.yaml", MINIMAL)
    recipe = Recipe.load(path, ["training.max_steps=null", "training.num_epochs=2", "optimizer.learning_rate=3e-4"])
    assert (recipe.training.max_steps, recipe.training.num_epochs) == (None, 2.0)
    assert recipe.origins()["optimizer.learning_rate"] == (3e-4, "override")
    assert Recipe.load(path, "training.max_steps=7").training.max_steps == 7, "a single one"
    globbed = Recipe.load(path, ["data.train=*.jsonl"])
    assert [source.path for source in globbed.data.train] == ["*.jsonl"], "no alias"


@pytest.mark.parametrize(("override", "message"), TABLES["RANGES"])
def test_an_error_lists_values_types_and_ranges(tmp_path: Path, override: str, message: str) -> None:
    (problem,) = problems(tmp_path, MINIMAL, "adapter.kind=lora", override)
    assert problem == f"{override.partition('=')[0]}: {message}"


@pytest.mark.parametrize(("values", "overrides", "left", "note"), TABLES["REPLACED"])
def test_an_override_replaces_its_rival(
    tmp_path: Path, values: object, overrides: list[str], left: dict[str, object], note: str
) -> None:
    recipe = Recipe.load(write(tmp_path / "r.yaml", values), overrides)
    assert recipe.notes == (note,)
    origins = recipe.origins()
    assert {key: origins[key][0] for key in left} == left
    for key, value in left.items():
        if value is None:
            assert origins[key][1].startswith("replaced by "), key


def test_every_problem_is_reported_with_path_value_and_choices(tmp_path: Path) -> None:
    values = yaml.safe_load(yaml.safe_dump(MINIMAL))
    values["training"]["max_step"] = 3
    values["optimizer"]["learning_rate"] = -1
    values["model"]["dtype"] = "fp8"
    values["data"]["validation_fraction"] = 1.5
    found = "\n".join(problems(tmp_path, values, "data.shuffle=maybe", "nonsense", "max_steps=3"))
    assert "training.max_step: unknown key (did you mean 'max_steps'?);" in found
    assert "optimizer.learning_rate: found -1" in found
    assert "greater than 0" in found
    assert "model.dtype: found 'fp8'" in found
    assert "float32, bfloat16, float16" in found
    assert "data.validation_fraction: found 1.5" in found
    assert "data.shuffle: found 'maybe'" in found
    assert "override 'nonsense': expected key.sub=value" in found
    assert "max_steps: unknown key (did you mean 'training.max_steps'?);" in found


CONTRADICTIONS = TABLES["CONTRADICTIONS"]
"""Overrides, and what the error says. Pairs of settings are in tests/unit/recipe/test_combinations.py."""


def test_contradictions_and_settings_without_effect(tmp_path: Path) -> None:
    found = {message: "\n".join(problems(tmp_path, MINIMAL, *overrides)) for overrides, message in CONTRADICTIONS}
    assert [(message, told) for message, told in found.items() if message not in told] == []


def test_a_missing_recipe_lists_the_shipped_ones() -> None:
    with pytest.raises(
        BadInputError,
        match=r"there is no recipe of that name \(did you mean 'quickstart'\?\)\. Shipped recipes: .*quickstart",
    ):
        find_recipe("quickstar")
    with pytest.raises(BadInputError, match="there is no such file"):
        find_recipe("nowhere/x.yaml")


def test_the_resolved_recipe_is_the_same_recipe(tmp_path: Path) -> None:
    for name in shipped_recipes():
        recipe = Recipe.load(name)
        again = Recipe.load(write(tmp_path / f"{name}.yaml", recipe.to_yaml()))
        assert again.model_dump() == recipe.model_dump()


def test_files_in_a_recipe_are_relative_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "images").mkdir()
    of_home = {"validation": "~/rows.csv", "image_root": "images", "map": "~/mine.py:rows", "chat_template": "a.jinja"}
    recipe = Recipe.load(write(tmp_path / "r.yaml", {**MINIMAL, "data": {**MINIMAL["data"], **of_home}}))
    assert recipe.data.train[0].path == str(tmp_path / "rows.jsonl")
    assert (recipe.data.image_root, recipe.data.chat_template) == (str(tmp_path / "images"), str(tmp_path / "a.jinja"))
    assert recipe.data.validation is not None
    assert (recipe.data.validation[0].path, recipe.data.map) == ("/home/me/rows.csv", "/home/me/mine.py:rows")
    assert recipe.model.name_or_path == "someone/model"


def test_a_recipe_is_frozen(tmp_path: Path) -> None:
    recipe = Recipe.load(write(tmp_path / "r.yaml", MINIMAL))
    with pytest.raises(ValueError, match="frozen"):
        recipe.training.seed = 1  # type: ignore[misc]


def test_steps_of_a_run() -> None:
    training = Recipe.from_mapping({**MINIMAL, "training": {"output_dir": "o", "num_epochs": 1.5}}).training
    assert steps_of_run(training, num_samples=100, samples_per_step=16) == 10  # 150 / 16, rounded up
    assert steps_of_run(Recipe.from_mapping(MINIMAL).training, 100, 16) == 10


def test_importing_the_package_or_a_recipe_imports_no_torch() -> None:
    code = (
        "import sys, toolkit\n"
        "from toolkit.recipe.recipe import Recipe; Recipe.load('quickstart')\n"
        "import toolkit.cli.app\n"
        "assert not {'torch', 'transformers', 'accelerate'} & set(sys.modules), 'heavy imports'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_steps_to_profile(tmp_path: Path) -> None:
    for steps in ("[3]", "[5, 4]", "[1, 40]"):
        (problem,) = problems(tmp_path, MINIMAL, f"training.profile_steps={steps}")
        assert problem.startswith("training.profile_steps: "), problem
    assert Recipe.load(tmp_path / "r.yaml", ["training.profile_steps=[3, 5]"]).training.profile_steps == [3, 5]


def test_a_run_is_known_by_the_recipe_that_it_has_written(tmp_path: Path) -> None:
    """What is written leaves out fields without effect, and a bare path stands for a source."""
    from toolkit.checkpoint.state import same_run

    recipe = Recipe.load("quickstart", ["training.max_steps=7"])
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    assert same_run(tmp_path / "recipe.yaml", recipe.model_dump(mode="json"))
    other = Recipe.load("quickstart", ["training.max_steps=7", "training.seed=5"])
    assert not same_run(tmp_path / "recipe.yaml", other.model_dump(mode="json"))
    (tmp_path / "recipe.yaml").write_text("")
    assert not same_run(tmp_path / "recipe.yaml", recipe.model_dump(mode="json"))


AS_WRITTEN: dict[str, Any] = TABLES["AS_WRITTEN"]
"""What stands in a recipe or behind an override's `=` -> its value. YAML 1.1 reads many of them as another one."""

NOT_AS_WRITTEN = TABLES["NOT_AS_WRITTEN"]
"""What stands there -> what is wrong with it."""

NO_VALUES = TABLES["NO_VALUES"]
"""Overrides of which YAML leaves a part out."""


def test_a_value_is_what_is_written_or_refused_with_its_line() -> None:
    wrong = []
    for written, value in AS_WRITTEN.items():
        found = sections_of(f"description: x\nmodel:\n  revision: {written}\n", "r")["model"]["revision"]
        values: dict[str, Any] = {}
        problems = apply_overrides(values, [f"model.revision={written}"], {})
        if (found, type(found)) != (value, type(value)) or problems or values != {"model": {"revision": value}}:
            wrong.append((written, found, values, problems))
    for written, problem in NOT_AS_WRITTEN.items():
        with pytest.raises(RecipeError) as error:
            sections_of(f"description: x\nmodel:\n  revision: {written}\n", "r")
        (told,) = apply_overrides({}, [f"model.revision={written}"], {})
        if "not readable as YAML: line 3, column " not in str(error.value) or problem not in str(error.value):
            wrong.append((written, str(error.value)))
        if not told.startswith("override ") or problem not in told:
            wrong.append((written, told))
    for written in NO_VALUES:
        told = apply_overrides({}, [f"model.revision={written}"], {})
        if len(told) != 1 or "put quotes around it" not in told[0]:
            wrong.append((written, told))
    assert wrong == []


def test_an_anchor_repeats_values_and_shares_none() -> None:
    values = sections_of("model: &m\n  config: &c {a: 1}\ndata: {<<: *m, b: 2}\nadapter: {config: *c}\n", "r")
    assert values == {
        "model": {"config": {"a": 1}},
        "data": {"config": {"a": 1}, "b": 2},
        "adapter": {"config": {"a": 1}},
    }
    assert apply_overrides(values, ["model.config.a=5"], {}) == []
    assert (values["data"]["config"], values["adapter"]["config"]) == ({"a": 1}, {"a": 1}), "an override changes one"


def test_text_that_looks_like_something_else_is_written_in_quotes(tmp_path: Path) -> None:
    looks = ["0100", "1:30", "1e5", "2E-3", "yes", "off", "2026-11-25", ".inf", "null", "=", "08", "1_000", "#a"]
    looks += ["a: b", "a\x85# b", "a\u2028---\u2029b"]
    recipe = Recipe.load("classify", {"objective.labels": looks, "model.revision": None})
    text = recipe.to_yaml()
    assert Recipe.from_yaml(text, tmp_path, "r").objective.labels == looks
    assert yaml.safe_load(text)["objective"]["labels"] == looks, "readers of YAML 1.1 agree"
    assert Recipe.from_yaml(recipe_for_readers(recipe), tmp_path, "r").objective.labels == looks, "of training.json"
    drafted = "\n".join(_lines("objective.labels", looks, "", {}))
    assert sections_of(drafted, "r") == {"labels": looks}
