"""Arguments, Accelerate configs, variables and folders that no command can use: one clear error for each."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Annotated, get_args, get_origin, get_type_hints
from unittest.mock import patch

import pytest
from support.cases import cases
from support.refusals import Outcome, finetune, toolkit, unclear

from toolkit.cli.app import app

TABLES = cases(__file__)
ARGUMENTS: list[tuple[str, str]] = TABLES["ARGUMENTS"]
"""Arguments of `toolkit`, and what the error names."""

CONFIGS: dict[str, tuple[str, str]] = TABLES["CONFIGS"]
"""What an Accelerate config holds, and what `toolkit plan --config` names."""

VARIABLES: list[tuple[str, str, str]] = TABLES["VARIABLES"]
"""Variable, value, and what a dry run names."""


FOLDERS: dict[str, tuple[dict[str, str], str]] = TABLES["FOLDERS"]
"""The files of the output folder, and what the error of a dry run names."""

OVERRIDES = TABLES["OVERRIDES"]
"""An override of a dry run, and what the error names."""

ADAPTERS: dict[str, str] = TABLES["ADAPTERS"]
"""adapter_config.json of a folder that `toolkit generate` is given."""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working folder, and a wide terminal, so that typer breaks no line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")


def dry_run(place: Path, *overrides: str) -> Outcome:
    return finetune(str(place / "recipe.yaml"), *overrides, "--dry-run")


def test_arguments() -> None:
    assert unclear((line, toolkit(*line.split()), named) for line, named in ARGUMENTS) == []


@pytest.mark.parametrize("command", ["plan", "train"])
def test_configs(command: str) -> None:
    def outcome(content: str) -> Outcome:
        Path("config.yaml").write_text(content)
        return toolkit(command, "quickstart", "--config", "config.yaml")

    assert unclear((name, outcome(content), named) for name, (content, named) in CONFIGS.items()) == []


def test_variables(place: Path) -> None:
    def outcome(name: str, value: str) -> Outcome:
        with patch.dict(os.environ, {name: value}):
            return dry_run(place, "data.cache_dir=null")

    assert unclear(((name, value), outcome(name, value), named) for name, value, named in VARIABLES) == []


def test_output_folders(place: Path) -> None:
    def outcome(files: dict[str, str]) -> Outcome:
        shutil.rmtree("out", ignore_errors=True)
        for file, content in files.items():
            path = Path("out", file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        return dry_run(place, "training.output_dir=out")

    assert unclear((name, outcome(files), named) for name, (files, named) in FOLDERS.items()) == []


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters(name: str, place: Path, tmp_path: Path) -> None:
    content = ADAPTERS[name].replace("{model}", str(place / "model"))
    (tmp_path / "adapter_config.json").write_text(content)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(place / "model" / file, tmp_path)
    outcome = toolkit("generate", str(tmp_path), "--prompt", "a", "--max-new-tokens", "1", "--device", "cpu")
    assert outcome.problems("adapter") == [], outcome.told


def test_settings_of_a_run(place: Path) -> None:
    given = [override.format(place=place).partition(": ") for override in OVERRIDES]
    assert unclear((override, dry_run(place, override), named) for override, _, named in given) == []


def test_each_option_for_a_number_says_what_was_found() -> None:
    wrong, options = [], 0
    for command in app.registered_commands:
        assert command.callback is not None
        for key, declared in get_type_hints(command.callback, include_extras=True).items():
            kind = get_args(declared)[0] if get_origin(declared) is Annotated else declared
            if not {int, float} & {kind, *get_args(kind)}:
                continue
            options += 1
            name = command.callback.__name__.replace("_", "-")
            outcome = toolkit(name, option := f"--{key.replace('_', '-')}", "two")
            needed = (f"error: Invalid value for '{option}'", "'two'", f"see `toolkit {name} -h`")
            if not all(words in outcome.told for words in needed) or outcome.code != 2:
                wrong.append((name, outcome))
    assert wrong == []
    assert options > 20
    for option, value in (("--cpu", "0"), ("--gpus", "1.5"), ("--machine-rank", "-1")):
        told = toolkit("train", "quickstart", option, value).told
        assert f"Invalid value for '{option}': " in told
        assert value in told
