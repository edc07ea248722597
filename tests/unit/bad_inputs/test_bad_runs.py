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
import yaml
from s3fs import S3FileSystem
from support.refusals import finetune, toolkit
from support.tiny import recipe_values, save_llama

from toolkit.checkpoint import consolidate
from toolkit.errors import BadInputError
from toolkit.generation.sampling import samples
from toolkit.recipe import adapter_file

TEXTS = ["a king and a queen walked by the river", "the moon was high"]
STEP = "checkpoints/step_00000002"

Spoil = Callable[[Path], object]


def told(**fields: Any) -> Spoil:
    """The manifest with other fields, and a mark that fits; `...` takes one out."""

    def spoil(run: Path) -> None:
        manifest = run / STEP / "manifest.json"
        values = json.loads(manifest.read_text()) | fields
        manifest.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))
        (run / STEP / "COMPLETE").write_text(hashlib.sha256(manifest.read_bytes()).hexdigest())

    return spoil


def written(name: str, content: str) -> Spoil:
    return lambda run: (run / name).write_text(content)


WRONG: dict[str, list[Any]] = {
    "step": [..., None, "x", -1, [], 10**30],
    "samples": [..., None, "x", -1, {}],
    "world_size": [..., "x", -1, 10**30],
    "strategy": [..., None, -1],
    "precision": [None, []],
    "recipe": [..., None, "x", [], {}, {"adapter": 3}],
    "data": [..., -1, []],
    "trainer": [..., None, "x"],
    "scaler": [[], "x"],
    "eval_loss": ["x", []],
    "date": [..., -1],
    "versions": [..., [], "x"],
    "stream": ["x", []],
    "content": [-1, {}],
    "base": [[], 3],
    "teacher": [-1, {}],
    "adapter": [3, []],
    "non_finite": [-1, []],
    "merit": ["x", []],
    "tensors": [None, "x", []],
    "files": [..., None, "x", {}],
    "format": [None, "x", 10**30],
}
"""Field of a manifest -> values that no run writes."""

MANIFESTS = {f"{field}={value!r}": told(**{field: value}) for field, values in WRONG.items() for value in values}

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

ASKED: list[tuple[str, str]] = [
    ("export {run} --to {run}", "exists; name a new folder"),
    ("export {run} --to /dev/null/out", "--to: '/dev/null/out' cannot be made"),
    ("export {run} --checkpoint 2 --to /proc/x", "--to: '/proc/x' cannot be made"),
    ("export {run} --checkpoint 2 --to /proc/x/y", "--to: '/proc/x/y' cannot be made"),
    ("export {run} --to out --checkpoint 1", "there is no checkpoint"),
    ("export {run} --to out --checkpoint -1", "there is no checkpoint"),
    ("export {run} --to out --checkpoint 99999999999999999999", "there is no checkpoint"),
    ("export {run}/checkpoints --to out", "has no whole checkpoint"),
    ("export {run}/" + STEP + " --to out", "export {run} --checkpoint 2 --to FOLDER"),
    ("generate {run}/" + STEP + " --prompt a", "export {run} --checkpoint 2 --to FOLDER"),
    ("generate {run}/checkpoints --prompt a", "holds neither a model"),
    ("generate {rows} --prompt a", "is a file"),
    ("checkpoints {rows}", "no such folder"),
    ("status {rows}", "no such folder"),
    ("compare {run} {run}", "is named twice"),
    ("compare {run} {run}/model", "is no run"),
    ("compare {run} {rows}", "no such folder"),
    ("reproduce {run} --to out", "has no training.json"),
    ("sample {run}/export {prompts} --to {run}", "holds files of something else"),
    ("sample {run}/export {prompts} --to {rows}", "--to"),
    ("sample {run}/export {prompts} --to /dev/null/out", "--to"),
    ("sample {run}/export {prompts} --to out --reward {run}/export", "is no reward model"),
    ("sample {run}/export {rows} --to out", "correct them, or take them out"),
    ("generate {run}/export --file {run}", "is of an unknown kind"),
    ("generate {run}/export --eval {rows}", "correct them, or take them out"),
    ("generate {run}/export --file {prompts} --output /dev/null/out", "--output"),
    ("generate {run}/export --file {prompts} --output {prompts}", "is the file of --file"),
    ("generate {run}/export --file {prompts} --output {run}", "--output"),
    ("generate {run}/export --eval {prompts} --numeric", "--numeric"),
    ("generate {run}/export --eval {prompts} --structured", "--structured"),
    ("data {recipe} --output /dev/null/out", "/dev/null/out"),
    ("data {recipe} --output {rows}", "rows.jsonl"),
]
"""Commands on a run, and what the error says."""

ADDRESSES: list[tuple[str, str]] = [
    ("s3://", "'s3://' names no file; name one"),
    ("file://", "'file://' names no file"),
    ("http://", "'http://' names no file"),
    ("ftp://", "'ftp://' names no file"),
    ("https:///a.jsonl", "https:///a.jsonl"),
    ("file:///nowhere.jsonl", "there is no file 'file:///nowhere.jsonl'"),
    ("file:///nowhere/*.jsonl", "there is no file"),
    ("file:///proc", "is a folder; name files, for example file:///proc/*.jsonl"),
    ("http://localhost:1/a.jsonl", "http://localhost:1/a.jsonl"),
    ("http://localhost:99999/a.jsonl", "Port out of range"),
    ("http://[::1/a.jsonl", "Invalid IPv6 URL"),
    ("az://a/b.jsonl", "the driver of az:// cannot be imported"),
    ("sftp://localhost:1/a.jsonl", "sftp://"),
    ("S3://a/b.jsonl", "Protocol not known: S3"),
    ("://a.jsonl", "there is no file '://a.jsonl'"),
    ("zip://a.jsonl::/nowhere.zip", "there is no file"),
    ("hf://a", "Repository id must be"),
    ("file://host/a.jsonl", "there is no file 'file://host/a.jsonl'"),
]
"""`data.train`, and what `toolkit data` says."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two steps, whose export holds a model."""
    place = tmp_path_factory.mktemp("runs")
    save_llama(place / "model", TEXTS, tied=True)
    (place / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS * 10))
    (place / "prompts.jsonl").write_text('{"prompt": "a king", "answer": "a queen"}\n')
    values = recipe_values(place / "model", place / "rows.jsonl", place / "good", place / "cache", max_steps=2)
    values |= {"checkpoint": {"every_steps": 2}, "export": {"enabled": False}}
    (place / "recipe.yaml").write_text(yaml.safe_dump(values))
    assert finetune(str(place / "recipe.yaml")).code == 0
    shutil.copytree(place / "model", place / "good" / "export")
    return place


@pytest.fixture
def run(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run; the working folder is an empty one, and the terminal wide."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("COLUMNS", "300")
    shutil.copytree(place / "good", tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests(name: str, run: Path) -> None:
    MANIFESTS[name](run)
    outcome = toolkit("export", str(run), "--checkpoint", "2", "--to", "out")
    assert outcome.problems("step_00000002") == [], outcome.told
    assert not list(Path().iterdir()), "nothing is left"


@pytest.mark.parametrize("name", EXPORTS)
def test_exports(name: str, run: Path) -> None:
    spoil, named = EXPORTS[name]
    spoil(run)
    outcome = toolkit("export", str(run), "--checkpoint", "2", "--to", "out")
    assert outcome.problems(named) == [], outcome.told
    assert not list(Path().iterdir()), "nothing is left"


@pytest.mark.parametrize(("line", "named"), ASKED, ids=[line[:60] for line, _ in ASKED])
def test_commands(line: str, named: str, run: Path, place: Path) -> None:
    names = {
        "run": run,
        "rows": place / "rows.jsonl",
        "prompts": place / "prompts.jsonl",
        "recipe": place / "recipe.yaml",
    }
    before = sorted(run.rglob("*"))
    outcome = toolkit(*[word.format(**names) for word in line.split()])
    assert outcome.problems(named.format(**names)) == [], outcome.told
    assert not list(Path().iterdir()), "nothing is left"
    assert sorted(run.rglob("*")) == before


@pytest.mark.parametrize(("address", "named"), ADDRESSES)
def test_addresses(address: str, named: str, place: Path, run: Path) -> None:
    outcome = toolkit("data", str(place / "recipe.yaml"), f"data.train={json.dumps(address)}")
    assert outcome.problems(named) == [], outcome.told


@pytest.mark.parametrize(
    ("override", "named"),
    [
        (
            "checkpoint.to=s3://bucket/run",
            "checkpoint.to: s3://bucket/run/checkpoints: its driver finds no credentials (NoCredentialsError: Unable "
            "to locate credentials); set them, for example AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        ),
        (
            "data.train=s3://bucket/rows.jsonl",
            "data.train: 's3://bucket/rows.jsonl' cannot be read: NoCredentialsError: Unable to locate credentials; "
            "set the driver's credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        ),
    ],
)
def test_a_store_without_credentials(
    override: str, named: str, place: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(variable)
    for variable in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(variable, "/nowhere")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")  # a machine that has a role would ask for it
    S3FileSystem.clear_instance_cache()
    new = f"training.output_dir={place / 'new'}"
    outcome = finetune(str(place / "recipe.yaml"), new, override, "--dry-run")
    assert outcome.problems(named) == [], outcome.told


def test_a_file_where_a_store_is_meant_to_be(place: Path, run: Path) -> None:
    outcome = finetune(str(place / "recipe.yaml"), f"checkpoint.to=file://{place}/rows.jsonl/x", "--dry-run")
    assert outcome.problems("rows.jsonl' is no folder; name another place") == [], outcome.told


def test_json_without_a_bottom_and_a_file_without_an_end(tmp_path: Path) -> None:
    """What an export, a run's model files and an adapter hold beside weights may come from anybody."""
    folder = tmp_path
    (folder / "adapter_model.safetensors").touch()
    reads: dict[str, Callable[[Path], Any]] = {
        "adapter_config.json": lambda path: adapter_file.read_config(path.parent, str(path.parent)),
        "names.json": consolidate._read_stored_names,
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
    with pytest.raises(BadInputError, match="no object of JSON"):
        samples._read_object(folder, "[" * 200_000)
