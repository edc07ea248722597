"""Arguments, Accelerate configs, variables and folders that no command can use: one clear error for each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, get_args, get_origin, get_type_hints

import pytest
import yaml
from support.refusals import finetune, shown, toolkit
from support.tiny import recipe_values, save_llama

from toolkit.cli.app import app

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
    ("verify quickstart --time-limit nan", "--time-limit"),
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
    ("doctor extra", "extra"),
    ("validate =", "'='"),
    ("validate quickstart --nothing", "--nothing"),
    ("validate --all --json --yaml", "--yaml"),
    ("plan quickstart --device-memory-gib inf", "device_memory_gib"),
    ("plan quickstart --device-memory-gib 0", "device_memory_gib"),
    ("plan quickstart --device-memory-gib 1e300", "device_memory_gib: 1e+300; allowed: a number above 0, and at most"),
    ("plan quickstart --host-memory-gib nan", "host_memory_gib"),
    ("plan quickstart --host-memory-gib -1", "host_memory_gib"),
    ("plan quickstart --nic-gbs 0", "nic_gbs"),
    ("plan quickstart --nic-gbs 1e200", "nic_gbs"),
    ("plan quickstart --pcie-gbs -1", "pcie_gbs"),
    ("plan quickstart --dram-gbs nan", "dram_gbs"),
    ("plan quickstart --link-gbs inf", "link_gbs"),
    ("plan quickstart --gpus-per-node -1", "gpus_per_node"),
    ("plan quickstart --cpu 0", "--cpu"),
    ("plan quickstart --cpu 99999999", "--cpu"),
    ("plan quickstart --cpu 2 --gpus 2", "--cpu excludes --gpus"),
    ("plan quickstart --cpu 2 --hardware h100_sxm", "--cpu excludes --gpus and --hardware"),
    ("plan quickstart --hardware nowhere.json", "nowhere.json"),
    ("plan quickstart --hardware h1000", "hardware: unknown 'h1000' (did you mean 'h100_sxm'?)"),
    ("plan quickstart --plot picture", "--plot: 'picture' is not an image's name; allowed ends: .png, .svg, .pdf"),
    ("plan quickstart --plot picture.xyz", "--plot: 'picture.xyz'"),
    ("plan quickstart --longest-row --trace", "--trace has no effect with --longest-row"),
    ("plan quickstart --longest-row --explain", "--explain has no effect with --longest-row"),
    ("plan quickstart --longest-row --all", "--all has no effect with --longest-row"),
    ("plan quickstart --longest-row --plot a.png", "--plot has no effect with --longest-row"),
    ("plan --calibrate --gpus 0", "--gpus: 0; allowed: 1 to"),
    ("plan --calibrate --gpus 999", "--gpus: 999; allowed: 1 to"),
    ("verify quickstart --steps -1", "--steps"),
    ("verify quickstart --cpu 0", "--cpu"),
    ("verify quickstart --strategy nothing", "--strategy"),
    ("train quickstart --cpu 99999999", "--cpu"),
    ("train quickstart --cpu 1 --retries -1", "--retries"),
    ("train quickstart --cpu 1 --retries two", "--retries"),
    ("train quickstart --cpu 1 --retries 3 --dry-run", "--retries has no effect with --dry-run"),
    ("train quickstart --machines 2", "--machines"),
    ("init", "model"),
    ("init nowhere", "data"),
    ("init nowhere rows.jsonl", "nowhere"),
    ("init nowhere rows.jsonl --output recipe.txt", "--output"),
    ("init nowhere rows.jsonl --gpus 0", "--gpus"),
    ("init nowhere rows.jsonl --cpu 0", "--cpu"),
    ("checkpoints http://host/run", "'http://host/run' is no folder in a store that is known"),
    ("checkpoints s3://", "'s3://' is no folder in a store"),
    ("checkpoints file:///nowhere --verify", "file:///nowhere"),
    ("export https://host/run --to out", "'https://host/run' is no folder in a store that is known"),
    ("export memory://run --to out", "memory://run"),
    ("export file:// --to out", "'file://' is no folder in a store"),
    ("export file:///nowhere --to out", "file:///nowhere"),
    ("export . --to out --max-shard-gib 0", "--max-shard-gib"),
    ("export . --to out --max-shard-gib nan", "--max-shard-gib"),
    ("export . --to out --max-shard-gib inf", "--max-shard-gib: found inf; allowed: a number greater than 0 and up to"),
    ("status nowhere", "nowhere"),
    ("status", "run"),
    ("compare file:// file://nowhere", "'file://' is no folder in a store"),
    ("reproduce nowhere", "--to"),
    ("reproduce nowhere --to out", "training.json"),
    ("reproduce nowhere --to .", "--to: '.' exists"),
    ("reproduce nowhere --to out --cpu 0", "--cpu"),
    ("sample nowhere prompts.jsonl", "--to"),
    ("sample nowhere prompts.jsonl --to out", "PROMPTS: 'prompts.jsonl' cannot be read"),
    ("sample nowhere prompts.csv --to out", "PROMPTS: 'prompts.csv' is of an unknown kind"),
    ("sample nowhere prompts.jsonl --to out -n 0", "--samples: 0 is out of range; allowed: 1 to 10,000"),
    ("sample nowhere prompts.jsonl --to out -n 99999999999", "--samples"),
    ("sample nowhere prompts.jsonl --to out --temperature 0", "--temperature 0 and --samples 8 contradict"),
    ("sample nowhere prompts.jsonl --to out --temperature inf", "--temperature: inf"),
    (
        "sample nowhere prompts.jsonl --to out --temperature 1e-300",
        "allowed: 0 (always the most likely token), or 0.001",
    ),
    ("sample nowhere prompts.jsonl --to out --top-p 0", "--top-p"),
    ("sample nowhere prompts.jsonl --to out --seed -1", "--seed"),
    ("sample nowhere prompts.jsonl --to out --batch-size 0", "--batch-size"),
    ("sample nowhere prompts.jsonl --to out --max-new-tokens 0", "--max-new-tokens"),
    ("sample nowhere prompts.jsonl --to out --extract (", "--extract: '(' is no regular expression"),
    ("sample nowhere prompts.jsonl --to out --numeric --structured", "--numeric and --structured contradict"),
    ("sample nowhere prompts.jsonl --to out --strict --numeric", "--strict and --numeric contradict"),
    ("sample nowhere prompts.jsonl --to out --reward a --strict", "--strict and --reward contradict"),
    ("sample nowhere prompts.jsonl --to out --dtype int8", "--dtype"),
    ("sample nowhere prompts.jsonl --to out --gpus 1 --cpu 1", "--gpus and --cpu exclude each other"),
    ("sample nowhere prompts.jsonl --to out --cpu 0", "--cpu"),
    ("generate . --prompt a --temperature 0 --seed 3", "--seed and --temperature 0 contradict each other"),
    ("generate . --prompt a --temperature 0 --top-p 0.5", "--top-p and --temperature 0 contradict each other"),
    ("generate . --prompt a --temperature 1e-9", "--temperature"),
    ("generate . --prompt a --batch-size 3", "--batch-size and --prompt contradict"),
    ("generate . --prompt a --output x.jsonl", "--output and --prompt contradict"),
    ("generate . --prompt a --json", "--json and --prompt contradict"),
    ("generate . --file a.txt --eval b.jsonl", "--file and --eval contradict"),
    ("generate . --eval a.jsonl --image b.png", "--image and --eval contradict"),
    ("generate . --prompt a --raw --system b", "--raw and --system contradict"),
    ("generate s3://bucket/run --prompt a", "SOURCE: the folder 's3://bucket/run' does not exist"),
    ("data quickstart --samples 0", "--samples"),
    ("data quickstart --samples 99999999999", "--samples"),
    ("recipes copy quickstart recipe.txt", "recipe.txt"),
    ("configs copy cpu_2 config.json", "config.json"),
    ("configs nothing", "nothing"),
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


def test_more_ranks_than_there_are(place: Path) -> None:
    outcome = finetune(str(place / "recipe.yaml"), "sharding.sequence=3", "--dry-run")
    named = "sharding.sequence: 3 ranks are needed, and there is 1; start 3, or set it to 1"
    assert outcome.problems(named) == [], outcome.told


@pytest.mark.parametrize("output", ["/proc/nowhere/out", "/dev/null", "/dev/null/out"])
def test_outputs(output: str, place: Path) -> None:
    outcome = finetune(str(place / "recipe.yaml"), f"training.output_dir={output}", "--dry-run")
    assert outcome.problems("training.output_dir") == [], outcome.told


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
        ("--retries -1", "--retries: found '-1'; allowed: a whole number of at least 0"),
    ):
        assert told in toolkit("train", "quickstart", *given.split()).told
