"""`toolkit sample` on two ranks writes what one process writes, and the toolkit trains on each of its files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.launches import clean_environment
from support.ranks import run_on_ranks
from support.runs import finetuned
from support.tiny import recipe_values
from support.unsure import save_unsure
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from toolkit import ranks
from toolkit.generation.sampling.sample_options import SampleOptions
from toolkit.generation.sampling.sampling import sample

FILES = ("samples", "sft", "pairs", "labels")
OBJECTIVES = {"sft": {}, "pairs": {"kind": "preference"}, "labels": {"kind": "kto"}}


def options(folder: Path, to: str, **others: str) -> SampleOptions:
    told = {"samples": 3, "seed": 1, "temperature": 1.3, "max_new_tokens": 12, "batch_size": 3}
    return SampleOptions(str(folder / "model"), folder / "questions.jsonl", folder / to, **told, **others)  # type: ignore[arg-type]


def on_two_ranks(folder: Path) -> dict[str, int]:
    """Samples, goes on after a kill, has a reward model score, and trains a step on each file; the steps."""
    sample(options(folder, "two"))
    (folder / "killed").mkdir(exist_ok=True)
    if os.environ["RANK"] == "0":
        lines = (folder / "two/samples.jsonl").read_text().splitlines(keepends=True)
        (folder / "killed/samples.jsonl").write_text("".join(lines[:7]) + lines[7][:20])
        (folder / "killed/sampling.json").write_text((folder / "two/sampling.json").read_text())
    ranks.gather_objects(None)
    sample(options(folder, "killed"))
    sample(options(folder, "judged-two", reward=str(folder / "judge")))
    steps = {}
    for name, objective in OBJECTIVES.items():
        rows = folder / f"two/{name}.jsonl"
        values = recipe_values(folder / "model", rows, folder / f"runs/{name}", folder / "cache", max_steps=1)
        values["data"] |= {"max_length": 128}
        values["training"] |= {"micro_batch_size": 1}
        values["objective"] = {**values.get("objective", {}), **objective}
        steps[name] = finetuned(values).metrics[-1]["step"]
    return steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sampled")
    save_unsure(folder)
    judge = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
    judge.config.pad_token_id = 0
    judge.save_pretrained(folder / "judge")
    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(folder / "judge")
    sample(options(folder, "one"))
    sample(options(folder, "judged-one", reward=str(folder / "judge")))
    return folder


def test_two_ranks_write_the_same_and_each_file_is_trained_on(folder: Path) -> None:
    assert run_on_ranks(on_two_ranks, 2, folder) == [{"sft": 1, "pairs": 1, "labels": 1}] * 2
    for one, two in (("one", "two"), ("one", "killed"), ("judged-one", "judged-two")):
        for name in FILES:
            assert (folder / two / f"{name}.jsonl").read_text() == (folder / one / f"{name}.jsonl").read_text()


def on_four_ranks(folder: Path) -> None:
    sample(options(folder, "four"))
    sample(options(folder, "judged-four", reward=str(folder / "judge")))


@pytest.mark.grid
def test_four_ranks_write_the_same(folder: Path) -> None:
    run_on_ranks(on_four_ranks, 4, folder)
    for one, four in (("one", "four"), ("judged-one", "judged-four")):
        for name in FILES:
            assert (folder / four / f"{name}.jsonl").read_text() == (folder / one / f"{name}.jsonl").read_text()


def test_the_command_starts_ranks(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "model", tmp_path / "model")
    words = "sample model questions.jsonl --to two -n 3 --seed 1 --temperature 1.3 --max-new-tokens 12 --batch-size 3"
    environment = clean_environment(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    (tmp_path / "questions.jsonl").write_text((folder / "questions.jsonl").read_text())
    told = ["toolkit", *words.split(), "--cpu", "2", "--json"]
    done = subprocess.run(told, cwd=tmp_path, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_samples"] == 15
    for name in FILES:
        assert (tmp_path / f"two/{name}.jsonl").read_text() == (folder / f"one/{name}.jsonl").read_text()
