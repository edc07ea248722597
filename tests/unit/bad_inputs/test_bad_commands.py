"""Arguments, Accelerate configs, variables and folders that no command can use: one clear error for each."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Annotated, get_args, get_origin, get_type_hints
from unittest.mock import patch

import pytest
from support.refusals import Outcome, finetune, toolkit, unclear

from toolkit.cli.app import app

ARGUMENTS: list[tuple[str, str]] = [
    ("nothing", "nothing"),
    ("validate quikstart", "quickstart"),
    ("validate --json --yaml", "--yaml"),
    ("data quickstart --to /proc/nowhere", "/proc/nowhere"),
    ("recipes copy quickstart /proc/nowhere/a.yaml", "/proc/nowhere"),
    ("configs copy zero3 /proc/nowhere/a.yaml", "/proc/nowhere"),
    ("train nothing --cpu 2", "nothing"),
    ("train quickstart --cpu 0", "--cpu"),
    ("train quickstart --cpu two", "--cpu"),
    ("train quickstart --cpu 2 --strategy zero3+nothing", "--strategy"),
    ("plan quickstart --config /", "--config"),
    ("verify quickstart --config nothing", "--config"),
    ("verify quickstart --time-limit nan", "--time-limit"),
    ("checkpoints nowhere", "nowhere"),
    ("export nowhere --to out", "nowhere"),
    ("export . --to out", "checkpoint"),
    ("export . --to out --dtype int8", "--dtype"),
    ("export . --to out --checkpoint 3", "3"),
    ("generate . --prompt a", "."),
    ("doctor --nothing", "--nothing"),
    ("validate =", "'='"),
    ("validate quickstart --nothing", "--nothing"),
    ("plan quickstart --device-memory-gib 1e300", "device_memory_gib: 1e+300; allowed: a number above 0, and at most"),
    ("plan quickstart --cpu 2 --gpus 2", "--cpu excludes --gpus"),
    ("plan quickstart --cpu 2 --hardware h100_sxm", "--cpu excludes --gpus and --hardware"),
    ("plan quickstart --hardware nowhere.json", "nowhere.json"),
    ("verify quickstart --strategy nothing", "--strategy"),
    ("train quickstart --machines 2", "--machines"),
    ("init nowhere", "Missing argument 'DATA'"),
    ("init nowhere rows.jsonl", "nowhere"),
    ("checkpoints http://host/run", "'http://host/run' is not a folder in a known store"),
    ("checkpoints s3://", "'s3://' is not a folder in a known store"),
    ("checkpoints file:///nowhere --verify", "file:///nowhere"),
    ("export https://host/run --to out", "'https://host/run' is not a folder in a known store"),
    ("export memory://run --to out", "memory://run"),
    ("export file:// --to out", "'file://' is not a folder in a known store"),
    ("export file:///nowhere --to out", "file:///nowhere"),
    ("export . --to out --max-shard-gib inf", "--max-shard-gib: found inf; allowed: a number greater than 0 and up to"),
    ("status nowhere", "nowhere"),
    ("sample nowhere prompts.jsonl", "--to"),
    ("sample nowhere prompts.jsonl --to out", "PROMPTS: 'prompts.jsonl' cannot be read"),
    ("sample nowhere prompts.csv --to out", "PROMPTS: 'prompts.csv' is of an unknown kind"),
    (
        "sample nowhere prompts.jsonl --to out --temperature 1e-300",
        "allowed: 0 (always the most likely token), or 0.001",
    ),
    ("sample nowhere prompts.jsonl --to out --top-p 0", "--top-p"),
    ("sample nowhere prompts.jsonl --to out --seed -1", "--seed"),
    ("sample nowhere prompts.jsonl --to out --batch-size 0", "--batch-size"),
    ("sample nowhere prompts.jsonl --to out --max-new-tokens 0", "--max-new-tokens"),
    ("sample nowhere prompts.jsonl --to out --compare text=(", "--compare: '(' is not a Python regular expression"),
    ("sample nowhere prompts.jsonl --to out --dtype int8", "--dtype"),
    ("generate . --prompt a --temperature 0 --seed 3", "--seed and --temperature 0 contradict each other"),
    ("generate . --prompt a --temperature 0 --top-p 0.5", "--top-p and --temperature 0 contradict each other"),
    ("generate . --prompt a --temperature 1e-9", "--temperature"),
    ("generate . --eval a.jsonl --image b.png", "--image and --eval contradict"),
    ("generate s3://bucket/run --prompt a", "SOURCE: the folder 's3://bucket/run' does not exist"),
    ("data quickstart --samples 0", "--samples"),
    ("recipes copy quickstart recipe.txt", "recipe.txt"),
    ("configs copy cpu_2 config.json", "config.json"),
]
"""Arguments of `toolkit`, and what the error names."""

CONFIGS: dict[str, tuple[str, str]] = {
    "empty": ("", "nothing"),
    "a list": ("- 1\n", "list"),
    "no YAML": ("a: [", "YAML"),
    "processes as text": ("num_processes: two\n", "num_processes"),
    "no processes": ("num_processes: 0\n", "num_processes"),
    "unknown precision": ("mixed_precision: fp8\n", "mixed_precision"),
    "unknown strategy": ("fsdp_config: {fsdp_sharding_strategy: zero4}\n", "fsdp_sharding_strategy"),
    "a section as text": ("fsdp_config: zero3\n", "fsdp_config"),
    "a shard size of none": ("parallelism_config: {parallelism_config_dp_shard_size: 0}\n", "dp_shard_size"),
}
"""What an Accelerate config holds, and what `toolkit plan --config` names."""

VARIABLES: list[tuple[str, str, str]] = [
    ("ACCELERATE_MIXED_PRECISION", "fp8", "mixed_precision"),
    ("ACCELERATE_MIXED_PRECISION", "", "mixed_precision"),
    ("ACCELERATE_MIXED_PRECISION", "fp16", "fp16"),
    ("FSDP_SHARDING_STRATEGY", "zero4", "zero4"),
    ("FSDP_SHARDING_STRATEGY", "zero3+nothing", "zero3+nothing"),
    ("XDG_CACHE_HOME", "/dev/null", "/dev/null"),
    ("WORLD_SIZE", "8", "WORLD_SIZE is 8, but without RANK"),
]
"""Variable, value, and what a dry run names."""


MANIFEST = "checkpoints/step_00000003/manifest.json"
FOLDERS: dict[str, tuple[dict[str, str], str]] = {
    "a run's metrics": ({"metrics.jsonl": "{}"}, "metrics.jsonl"),
    "a finished run of another recipe": ({"recipe.yaml": "a: 1", "finished.json": '{"export": null}'}, "finished run"),
    "a recipe that is no YAML": ({"recipe.yaml": "a: ["}, "recipe.yaml"),
    "an empty recipe": ({"recipe.yaml": ""}, "recipe.yaml"),
    "a checkpoint without a manifest": ({"checkpoints/step_00000003/a": "x"}, "checkpoints"),
    "a manifest that is no JSON": ({MANIFEST: "{"}, "checkpoints"),
    "a manifest that is a list": ({MANIFEST: "[]"}, "checkpoints"),
    "checkpoints as a file": ({"checkpoints": "x"}, "checkpoints"),
}
"""The files of the output folder, and what the error of a dry run names."""

OVERRIDES = (
    "checkpoint.resume=/nowhere: checkpoint.resume",
    "checkpoint.resume={place}/rows.jsonl: checkpoint.resume",
    "training.output_dir=/proc/nowhere/out: training.output_dir",
    "training.output_dir=/dev/null: training.output_dir",
    "training.output_dir=/dev/null/out: training.output_dir",
    "sharding.sequence=3: sharding.sequence: 3 ranks are needed, and there is 1; start 3, or set it to 1",
)
"""An override of a dry run, and what the error names."""

ADAPTERS: dict[str, bytes] = {
    "not JSON": b"{",
    "a list": b"[]",
    "without a base": b"{}",
    "of an unknown kind": b'{"peft_type": "OTHER", "base_model_name_or_path": "{model}"}',
    "with a base that is gone": b'{"peft_type": "LORA", "base_model_name_or_path": "/nowhere/model"}',
    "with a base that is a number": b'{"peft_type": "LORA", "base_model_name_or_path": 3}',
    "without weights": b'{"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"], '
    b'"base_model_name_or_path": "{model}"}',
}
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
    content = ADAPTERS[name].replace(b"{model}", str(place / "model").encode())
    (tmp_path / "adapter_config.json").write_bytes(content)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(place / "model" / file, tmp_path)
    outcome = toolkit("generate", str(tmp_path), "--prompt", "a", "--max-new-tokens", "1", "--device", "cpu")
    assert outcome.problems("adapter") == [], outcome.told


def test_settings_of_a_run(place: Path) -> None:
    given = [override.format(place=place).partition(": ") for override in OVERRIDES]
    assert unclear((override, dry_run(place, override), named) for override, _, named in given) == []


NUMBERS = {int: "a whole number", float: "a number"}


def test_each_option_for_a_number_says_what_it_takes() -> None:
    """Not in the words of the library that reads options, which change with its version."""
    wrong, options = [], 0
    for command in app.registered_commands:
        assert command.callback is not None
        for key, declared in get_type_hints(command.callback, include_extras=True).items():
            kind = get_args(declared)[0] if get_origin(declared) is Annotated else declared
            number = next((words for each, words in NUMBERS.items() if each in (kind, *get_args(kind))), None)
            if number is None:
                continue
            options += 1
            option = f"--{key.replace('_', '-')}"
            outcome = toolkit(command.callback.__name__, option, "two")
            if f"error: {option}: found 'two'; allowed: {number}" not in outcome.told or outcome.code != 2:
                wrong.append((command.callback.__name__, outcome))
    assert wrong == []
    assert options > 20
    for given, told in (
        ("--cpu 0", "--cpu: found '0'; allowed: a whole number from 1 to 1024"),
        ("--gpus 1.5", "--gpus: found '1.5'; allowed: a whole number of at least 1"),
        ("--machine-rank -1", "--machine-rank: found '-1'; allowed: a whole number of at least 0"),
    ):
        assert told in toolkit("train", "quickstart", *given.split()).told
