"""`toolkit reproduce`: the same weights bit for bit, and a clear word where rows, base or ranks are others."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from support import refusals
from support.launches import clean_environment
from support.texts import make_texts
from support.tiny import recipe_values, save_llama


def toolkit(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = clean_environment(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}", OMP_NUM_THREADS="1")
    return subprocess.run(["toolkit", *words], cwd=folder, env=environment, text=True, capture_output=True)


def told(folder: Path, *words: str) -> str:
    """What the command says as it refuses its input, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        outcome = refusals.toolkit(*words)
    assert outcome.code == 2
    return outcome.told


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks in `first`, with its rows and its model beside it."""
    folder = tmp_path_factory.mktemp("reproduce")
    texts = make_texts(16, seed=1)
    save_llama(folder / "model", texts, tied=False)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    values = recipe_values(folder / "model", folder / "rows.jsonl", folder / "first", folder / "cache", max_steps=3)
    values["model"]["name_or_path"] = "model"
    values["data"]["train"] = "rows.jsonl"
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
    done = toolkit(folder, "train", "recipe.yaml", "--cpu=2", "--strategy=zero2")
    assert done.returncode == 0, done.stderr
    return folder


def test_the_same_weights_by_the_command_of_the_card(folder: Path) -> None:
    export = folder / "first" / "export"
    (command,) = re.findall(r"`(toolkit reproduce [^`]*)`", (export / "README.md").read_text())
    done = toolkit(export, *shlex.split(command)[1:], "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["different"], told["largest"], told["changed"]) == (0, 0.0, {})
    one, other = (load_file(path / "model.safetensors") for path in (export, folder / "first" / "again" / "export"))
    assert one.keys() == other.keys()
    assert told["tensors"] == len(one)
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert any(not torch.equal(tensor, load_file(folder / "model/model.safetensors")[n]) for n, tensor in one.items())


def test_an_export_elsewhere_on_fewer_ranks(folder: Path) -> None:
    elsewhere = folder / "elsewhere"
    shutil.copytree(folder / "first" / "export", elsewhere)
    text = (elsewhere / "training.json").read_text()
    assert str(folder) not in text, "a path of this machine"
    (folder / "moved").mkdir()
    shutil.copy(folder / "rows.jsonl", folder / "moved" / "rows.jsonl")
    words = ["data.train=moved/rows.jsonl", "--to", "fewer", "--cpu", "1"]
    done = toolkit(folder, "reproduce", "elsewhere", *words)
    assert done.returncode == 1, done.stderr
    assert "  ranks: 2 before, 1 now" in done.stdout
    one, other = (load_file(f / "model.safetensors") for f in (elsewhere, folder / "fewer" / "export"))
    share, name = max(((one[n] - other[n]).abs().max() / one[n].abs().max(), n) for n in one)
    different = sum(not torch.equal(one[n], other[n]) for n in one)
    assert f"different: {different} of {len(one)} tensors, by at most {share:.1e} of the largest value ({name})" in (
        done.stdout
    )


def test_other_rows_and_another_base_are_refused(folder: Path) -> None:
    rows = folder / "rows.jsonl"
    text = rows.read_text()
    rows.write_text(text.replace("a", "b", 1))
    words = told(folder, "reproduce", "first", "--to", "never")
    assert "data.train: the rows of" in words
    assert "rows.jsonl" in words
    rows.write_text(text)
    weights = folder / "model" / "model.safetensors"
    kept = load_file(weights)
    save_file({name: tensor * 1.001 for name, tensor in kept.items()}, weights, {"format": "pt"})
    words = told(folder, "reproduce", "first", "--to", "never")
    save_file(kept, weights, {"format": "pt"})
    assert "model.name_or_path: the weights of" in words
    assert not (folder / "never").exists()


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "has no training.json"), ("{}", "recipe: Field required"), ("[", "is not what")],
)
def test_no_origin(folder: Path, tmp_path: Path, content: str | None, problem: str) -> None:
    export = tmp_path / "export"
    export.mkdir()
    if content is not None:
        (export / "training.json").write_text(content)
    assert problem in told(folder, "reproduce", str(export), "--to", "never")


def test_a_folder_that_exists(folder: Path) -> None:
    assert "--to: 'model' exists; name a new folder" in told(folder, "reproduce", "first", "--to", "model")
