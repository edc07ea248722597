"""Arguments, Accelerate configs, variables and folders that no command can use: one clear error for each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from support.refusals import finetune, shown, toolkit
from support.tiny import recipe_values, save_llama

TEXTS = ["a king and a queen walked by the river", "the moon was high"]

ARGUMENTS: list[tuple[str, str]] = [
    ("nothing", "nothing"),
    ("validate nothing", "nothing"),
    ("validate quikstart", "quickstart"),
    ("validate nowhere/recipe.yaml", "nowhere/recipe.yaml"),
    ("validate .", "'.'"),
    ("validate quickstart sft", "sft"),
    ("validate quickstart --recipe sft", "two recipes"),
    ("validate --json --yaml", "--yaml"),
    ("validate --recipe", "--recipe"),
    ("data nothing", "nothing"),
    ("data quickstart --output /proc/nowhere", "/proc/nowhere"),
    ("recipes copy nothing a.yaml", "nothing"),
    ("recipes copy quickstart /proc/nowhere/a.yaml", "/proc/nowhere"),
    ("recipes copy quickstart", "path"),
    ("recipes show quickstart", "show"),
    ("configs copy nothing a.yaml", "nothing"),
    ("configs copy zero3 /proc/nowhere/a.yaml", "/proc/nowhere"),
    ("train nothing --cpu 2", "nothing"),
    ("train quickstart --cpu 0", "--cpu"),
    ("train quickstart --cpu two", "--cpu"),
    ("train quickstart --gpus 0", "--gpus"),
    ("train quickstart --gpus 2 --cpu 2", "--gpus and --cpu"),
    ("train quickstart --cpu 2 --strategy zero4", "--strategy"),
    ("train quickstart --cpu 2 --strategy zero3+nothing", "--strategy"),
    ("train quickstart --cpu 2 --config nothing", "--config"),
    ("train quickstart --config two_nodes", "two_nodes"),
    ("plan nothing", "nothing"),
    ("plan quickstart --hardware abacus", "hardware"),
    ("plan quickstart --gpus 0", "--gpus"),
    ("plan quickstart --gpus -1", "--gpus"),
    ("plan quickstart --gpus many", "--gpus"),
    ("plan quickstart --device-memory-gib -1", "device_memory_gib"),
    ("plan quickstart --device-memory-gib nan", "device_memory_gib"),
    ("plan quickstart --link-gbs 0", "link_gbs"),
    ("plan quickstart --gpus-per-node 0", "gpus_per_node"),
    ("plan quickstart --config nothing", "--config"),
    ("plan quickstart --config /", "--config"),
    ("verify nothing", "nothing"),
    ("verify quickstart --config nothing", "--config"),
    ("verify quickstart --steps 0", "--steps"),
    ("verify quickstart --layers 0", "--layers"),
    ("checkpoints nowhere", "nowhere"),
    ("checkpoints", "run"),
    ("compare", "RUN"),
    ("compare nowhere", "two or more"),
    ("compare nowhere there", "nowhere"),
    ("compare s3x://bucket/a s3x://bucket/b", "s3x"),
    ("compare nowhere there --to page.pdf", ".html"),
    ("export nowhere --to out", "nowhere"),
    ("export nowhere", "--to"),
    ("export . --to out", "checkpoint"),
    ("export . --to out --dtype int8", "--dtype"),
    ("export . --to out --checkpoint 3", "3"),
    ("export . --to out --checkpoint last", "--checkpoint"),
    ("generate . --prompt a", "."),
    ("generate .", "--prompt"),
    ("generate . --prompt a --chat", "--chat"),
    ("generate . --prompt a --temperature -1", "--temperature"),
    ("generate . --prompt a --temperature nan", "--temperature"),
    ("generate . --prompt a --top-p 2", "--top-p"),
    ("generate . --prompt a --max-new-tokens 0", "--max-new-tokens"),
    ("generate . --prompt a --seed -1", "--seed"),
    ("generate . --prompt a --seed 100000000000000000000", "--seed"),
    ("generate . --prompt a --dtype fp8", "--dtype"),
    ("generate . --prompt a --device tpu", "--device"),
    ("generate . --file nowhere.txt", "config.json"),
    ("generate . --prompt a --strict", "--strict"),
    ("doctor --nothing", "--nothing"),
]
"""Arguments of `toolkit`, and what the error names."""

CONFIGS: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "nothing"),
    "a list": ("- 1\n", "list"),
    "no YAML": ("a: [", "YAML"),
    "no text": (b"\xff\xfe\x00", "YAML"),
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
]
"""Variable, value, and what a dry run names."""


def as_run(**files: str) -> Callable[[Path], None]:
    """An output folder with these files; `/` is written `__`."""

    def make(folder: Path) -> None:
        for name, content in files.items():
            path = folder / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)

    return make


MANIFEST = "checkpoints__step_00000003__manifest"

FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a run's metrics": (as_run(**{"metrics.jsonl": "{}"}), "metrics.jsonl"),
    "a finished run of another recipe": (
        as_run(**{"recipe.yaml": "a: 1", "finished.json": json.dumps({"export": None})}),
        "finished run",
    ),
    "a recipe that is no YAML": (as_run(**{"recipe.yaml": "a: ["}), "recipe.yaml"),
    "an empty recipe": (as_run(**{"recipe.yaml": ""}), "recipe.yaml"),
    "a checkpoint without a manifest": (as_run(checkpoints__step_00000003__a="x"), "checkpoints"),
    "a manifest that is no JSON": (as_run(**{f"{MANIFEST}.json": "{"}), "checkpoints"),
    "a manifest that is a list": (as_run(**{f"{MANIFEST}.json": "[]"}), "checkpoints"),
    "checkpoints as a file": (as_run(checkpoints="x"), "checkpoints"),
}
"""What lies in the output folder, and what the error of a dry run names."""

RESUMED: list[tuple[str, str]] = [
    ("/nowhere", "checkpoint.resume"),
    ("{place}", "checkpoint.resume"),
    ("{place}/rows.jsonl", "checkpoint.resume"),
    ("always", "checkpoint.resume"),
]
"""`checkpoint.resume`, and what the error names."""

ADAPTERS: dict[str, str | bytes | None] = {
    "cut": "{",
    "a list": "[]",
    "null": "null",
    "no text": b"\xff\xfe",
    "without a base": "{}",
    "of an unknown kind": '{"peft_type": "OTHER", "base_model_name_or_path": "{model}"}',
    "with a base that is gone": '{"peft_type": "LORA", "base_model_name_or_path": "/nowhere/model"}',
    "with a base that is a number": '{"peft_type": "LORA", "base_model_name_or_path": 3}',
    "without weights": '{"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"], '
    '"base_model_name_or_path": "{model}"}',
}
"""adapter_config.json of a folder that `toolkit generate` is given."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("commands")
    save_llama(place / "model", TEXTS, tied=True)
    (place / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS * 10))
    values = recipe_values(place / "model", place / "rows.jsonl", place / "out", place / "cache")
    (place / "recipe.yaml").write_text(yaml.safe_dump(values))
    return place


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working folder, and a wide terminal, so that typer breaks no line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")


@pytest.mark.parametrize(("line", "named"), ARGUMENTS, ids=[shown(line.split()) for line, _ in ARGUMENTS])
def test_arguments(line: str, named: str) -> None:
    outcome = toolkit(*line.split())
    assert outcome.problems(named) == [], outcome.told


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("command", ["plan", "train"])
def test_no_config(command: str, name: str, tmp_path: Path) -> None:
    content, named = CONFIGS[name]
    path = tmp_path / "config.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    outcome = toolkit(command, "quickstart", "--config", str(path))
    assert outcome.problems(named) == [], outcome.told


@pytest.mark.parametrize(("name", "value", "named"), VARIABLES, ids=[f"{name}={value}" for name, value, _ in VARIABLES])
def test_variables(name: str, value: str, named: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    outcome = finetune(str(place / "recipe.yaml"), "data.cache_dir=null", "--dry-run")
    assert outcome.problems(named) == [], outcome.told


@pytest.mark.parametrize("name", FOLDERS)
def test_output_folders(name: str, place: Path, tmp_path: Path) -> None:
    make, named = FOLDERS[name]
    make(tmp_path / "out")
    outcome = finetune(str(place / "recipe.yaml"), f"training.output_dir={tmp_path / 'out'}", "--dry-run")
    assert outcome.problems(named) == [], outcome.told


@pytest.mark.parametrize(("resume", "named"), RESUMED)
def test_resumed(resume: str, named: str, place: Path) -> None:
    where = resume.format(place=place)
    outcome = finetune(str(place / "recipe.yaml"), f"checkpoint.resume={where}", "--dry-run")
    assert outcome.problems(named) == [], outcome.told


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters(name: str, place: Path, tmp_path: Path) -> None:
    content = ADAPTERS[name]
    text = content.replace("{model}", str(place / "model")) if isinstance(content, str) else content
    folder = tmp_path / "adapter"
    folder.mkdir()
    assert text is not None
    (folder / "adapter_config.json").write_bytes(text.encode() if isinstance(text, str) else text)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(place / "model" / file, folder)
    outcome = toolkit("generate", str(folder), "--prompt", "a", "--max-new-tokens", "1", "--device", "cpu")
    assert outcome.problems("adapter") == [], outcome.told


@pytest.mark.parametrize("output", ["/proc/nowhere/out", "/dev/null", "/dev/null/out"])
def test_outputs(output: str, place: Path) -> None:
    outcome = finetune(str(place / "recipe.yaml"), f"training.output_dir={output}", "--dry-run")
    assert outcome.problems("training.output_dir") == [], outcome.told
