"""`toolkit init --from`: configurations of other tools become recipes, and no key of theirs goes without a word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from toolkit.cli.app import app
from toolkit.recipe.load import dotted
from toolkit.recipe.recipe import Recipe
from toolkit.suggest.from_tools import axolotl, llamafactory, trl
from toolkit.suggest.from_tools.convert import CONVERTERS, convert_file

FILE = Path(__file__).with_name("other_tools.yaml")
CASES = {
    f"{tool} {name}": case for tool, cases in yaml.safe_load(FILE.read_text()).items() for name, case in cases.items()
}
TABLES = {"axolotl": axolotl, "llamafactory": llamafactory, "trl": trl}


@pytest.mark.parametrize("name", CASES)
def test_a_configuration_becomes_a_recipe(name: str, tmp_path: Path) -> None:
    tool, case = name.split()[0], CASES[name]
    file = tmp_path / "theirs.yaml"
    file.write_text(yaml.safe_dump(case["given"]) if tool != "trl" else json.dumps(case["given"]))
    found = convert_file(file)
    assert found.tool.lower().replace("-", "") == tool
    values = dotted(found.draft.nested())
    assert {key: values.get(key) for key in case["recipe"]} == case["recipe"]
    assert set(found.no_counterpart) == set(case["lost"])
    taken = {reason.split()[1].rstrip(".:") for reason in found.draft.reasons.values() if reason.startswith("From ")}
    assert taken | found.not_needed.keys() | found.no_counterpart.keys() >= case["given"].keys()
    text = found.text("theirs.yaml")
    (tmp_path / "r.yaml").write_text(text)
    loaded = Recipe.load(tmp_path / "r.yaml")
    assert loaded.optimizer == found.recipe().optimizer
    for key in (*found.not_needed, *found.no_counterpart):
        assert f"#   {key}: " in text
    comments = [line for line in text.splitlines() if line.strip().startswith("# From") or "The default of" in line]
    assert len(comments) >= len(case["recipe"]) - 1, "a comment for each value"


@pytest.mark.parametrize("tool", TABLES)
def test_a_table_names_fields_that_exist(tool: str) -> None:
    """Each key alone, with a value of its kind: it is taken into a field, or left out with a reason."""
    sections = {name: getattr(field.annotation, "model_fields", {}) for name, field in Recipe.model_fields.items()}
    known = {f"{name}.{key}" for name, fields in sections.items() for key in fields}
    for key in TABLES[tool].TABLE:
        for value in (True, 1, 0.5, "zero2", ["a"], [{"path": "a"}], {"a": 1}):
            try:
                found = CONVERTERS[tool]({key: value})
            except (AttributeError, TypeError):  # another kind of value than the tool has there
                continue
            assert set(found.draft.values) - {"data.columns.text"} <= known, key
            told = " ".join(found.draft.reasons.values())
            assert key in told or key in found.not_needed or any(one.startswith(key) for one in found.no_counterpart), (
                key
            )


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["init", *map(str, arguments)])


def test_the_command_writes_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lora-1b.yml").write_text(yaml.safe_dump(CASES["axolotl lora-1b"]["given"]))
    done = invoke("--from", "lora-1b.yml")
    assert done.exit_code == 0, done.exception
    assert "lora-1b.yaml: 33 keys of axolotl, of which 4 have no counterpart\n" in done.output
    assert "  evals_per_epoch: training.eval_every_steps counts steps" in done.output
    assert Recipe.load("lora-1b.yaml").adapter.r == 16
    assert "exists; name another file, or replace it with --force" in str(invoke("--from", "lora-1b.yml").exception)
    told = json.loads(invoke("--from", "lora-1b.yml", "--force", "--json").output)
    assert told["tool"] == "axolotl"
    assert told["recipe"]["adapter"]["r"] == 16
    assert "special_tokens" in told["no_counterpart"]


def test_what_cannot_be_converted_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text("model: {name_or_path: x}\n")
    Path("torn.yaml").write_text("base_model: [\n")
    Path("axo.yml").write_text("base_model: x/y\ndatasets: [{path: a.jsonl}]\nlearning_rate: -1\n")
    for arguments, told in (
        (
            ["--from", "own.yaml", "--output", "new.yaml"],
            "does not look like a configuration of axolotl, LLaMA-Factory or",
        ),
        (["--from", "own.yaml"], "is the file to convert; name another with --output"),
        (["--from", "torn.yaml", "--output", "new.yaml"], "not readable as YAML: line 2"),
        (["--from", "gone.yaml"], "cannot be read: No such file"),
        (["model", "--from", "axo.yml"], "'model' has no effect with --from"),
        ([], "MODEL and DATA are missing"),
        (["--from", "axo.yml"], "optimizer.learning_rate: found -1"),
    ):
        assert told in str(invoke(*arguments).exception), arguments
    assert Path("axo.yaml").exists(), "there to be corrected"
    assert not Path("new.yaml").exists()
