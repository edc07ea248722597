"""Folders of runs that are broken in one place each, and addresses of rows: one clear error of the command for each."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.cases import cases
from support.refusals import Outcome, finetune, toolkit, unclear

from toolkit.checkpoint import consolidate
from toolkit.errors import BadInputError
from toolkit.recipe import adapter_file

TABLES = cases(__file__)
STEP = "checkpoints/step_00000002"

Spoil = Callable[[Path], object]


def told(**fields: Any) -> Spoil:
    """The manifest with other fields, and a mark that fits; `gone` takes one out."""

    def spoil(run: Path) -> None:
        manifest = run / STEP / "manifest.json"
        values = json.loads(manifest.read_text()) | fields
        manifest.write_text(json.dumps({key: value for key, value in values.items() if value != "gone"}))
        (run / STEP / "COMPLETE").write_text(hashlib.sha256(manifest.read_bytes()).hexdigest())

    return spoil


def written(name: str, content: str) -> Spoil:
    return lambda run: (run / name).write_text(content)


MANIFESTS = {
    f"{field}={value!r}": (told(**{field: value}), "step_00000002")
    for field, values in TABLES["WRONG"].items()
    for value in values
}

EXPORTS: dict[str, tuple[Spoil, str]] = {
    "no configuration": (lambda run: (run / "model" / "config.json").unlink(), "holds no configuration and tokenizer"),
    "a configuration that is a list": (written("model/config.json", "[]"), "holds no configuration and tokenizer"),
    "an unknown type": (written("model/config.json", '{"model_type": "lama"}'), "model"),
    "no tokenizer": (lambda run: (run / "model" / "tokenizer.json").unlink(), "holds no configuration and tokenizer"),
    "a shard that is gone": (
        lambda run: next((run / STEP).glob("shard-*")).unlink(),
        "shard-00001-model-00001-of-00001.safetensors is missing",
    ),
    "a shard that is cut": (
        lambda run: next((run / STEP).glob("shard-*")).write_bytes(b"x"),
        "shard-00001-model-00001-of-00001.safetensors",
    ),
    "no mark": (lambda run: (run / STEP / "COMPLETE").unlink(), STEP),
    "a mark of something else": (written(f"{STEP}/COMPLETE", "0" * 64), "COMPLETE does not fit manifest.json"),
    "a manifest that is cut": (written(f"{STEP}/manifest.json", "{"), "COMPLETE does not fit manifest.json"),
    "no checkpoint": (lambda run: shutil.rmtree(run / "checkpoints"), "there is no checkpoint"),
}
"""What is done to a run, and what `toolkit export` names."""

ASKED: list[tuple[str, str]] = TABLES["ASKED"]
"""Commands on a run, and what the error says."""


@pytest.fixture(scope="module")
def good(place: Path) -> Path:
    """A run of two steps, whose export holds a model."""
    (place / "prompts.jsonl").write_text('{"prompt": "a king", "answer": "a queen"}\n')
    settings = ["training.max_steps=2", "checkpoint.every_steps=2", "export.enabled=false"]
    settings.append(f"training.output_dir={place / 'good'}")
    assert finetune(str(place / "recipe.yaml"), *settings).code == 0
    shutil.copytree(place / "model", place / "good" / "export")
    return place / "good"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, which is empty; the terminal is wide."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    return tmp_path


@pytest.mark.parametrize("table", [MANIFESTS, EXPORTS], ids=["manifests", "exports"])
def test_exports_of_broken_runs(table: dict[str, tuple[Spoil, str]], good: Path, elsewhere: Path) -> None:
    run = good.parent / "run"

    def outcome(spoil: Spoil) -> Outcome:
        shutil.rmtree(run, ignore_errors=True)
        spoil(Path(shutil.copytree(good, run)))
        return toolkit("export", str(run), "--checkpoint", "2", "--to", "out")

    assert unclear((name, outcome(spoil), named) for name, (spoil, named) in table.items()) == []
    assert not list(elsewhere.iterdir()), "nothing is left"


def test_commands_on_a_run(good: Path, place: Path, elsewhere: Path) -> None:
    files = {"rows": place / "rows.jsonl", "prompts": place / "prompts.jsonl", "recipe": place / "recipe.yaml"}
    given = [(line.format(run=good, **files), named.format(run=good, **files)) for line, named in ASKED]
    before = sorted(good.rglob("*"))
    assert unclear((line, toolkit(*line.split()), named) for line, named in given) == []
    assert not list(elsewhere.iterdir()), "nothing is left"
    assert sorted(good.rglob("*")) == before


def test_a_file_where_a_store_is_meant_to_be(place: Path) -> None:
    outcome = finetune(str(place / "recipe.yaml"), f"checkpoint.to=file://{place}/rows.jsonl/x", "--dry-run")
    assert outcome.problems("rows.jsonl' is not a folder; name another place") == [], outcome.told


def test_json_without_a_bottom_and_a_file_without_an_end(tmp_path: Path) -> None:
    """What an export, a run's model files and an adapter hold beside weights may come from anybody."""
    folder = tmp_path
    (folder / "adapter_model.safetensors").touch()
    (folder / "model").mkdir()
    reads: dict[str, Callable[[Path], Any]] = {
        "adapter_config.json": lambda path: adapter_file.read_config(path.parent, str(path.parent)),
        "model/names.json": lambda path: consolidate._told_of_base(folder, path.name) or None,
    }
    wrong = []
    for name, read in reads.items():
        for content in (b"[" * 200_000, b"\xff", None):
            path = folder / name
            path.unlink(missing_ok=True)
            os.mkfifo(path) if content is None else path.write_bytes(content)
            signal.alarm(30)
            try:
                wrong += [] if read(path) is None else [(name, content)]
            except BadInputError:
                pass
            finally:
                signal.alarm(0)
    assert not wrong
