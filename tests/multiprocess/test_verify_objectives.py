"""`toolkit verify` of a student with a teacher, and of sequence to sequence: right runs pass, wrong ones are told."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.texts import make_texts
from support.tiny import VOCAB_SIZE, recipe_values, save_llama
from support.verified import run_in_this_process, save_launches
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, T5Config

from toolkit.data.tokens.tokenizer import _train_byte_pairs
from toolkit.objectives.losses.divergence import Divergence
from toolkit.objectives.seq2seq import Seq2Seq
from toolkit.recipe.recipe import Recipe
from toolkit.verify import FAILED, OK, Report, verify

CASES: dict[str, dict[str, Any]] = {
    "distillation": {
        "model": "student",
        "data": {"max_length": 64},
        "objective": {"divergence": "jsd", "beta": 0.3, "temperature": 1.5, "kd_ratio": 0.7},
    },
    "seq2seq": {
        "model": "t5",
        "data": {"max_length": 64, "max_target_length": 32, "source_prefix": "turn: "},
        "objective": {},
    },
}

BROKEN = {
    "distillation": (
        "import dataclasses\n"
        "from toolkit.objectives import build\n"
        "made = build.Divergence\n"
        "def twice(kind, beta, temperature, ratio):\n"
        "    return made(kind, beta, temperature**2, ratio)\n"
        "build.Divergence = twice\n"
    ),
    "seq2seq": (
        "from toolkit.objectives.seq2seq import Seq2Seq\n"
        "right = Seq2Seq.decoder_inputs\n"
        "Seq2Seq.decoder_inputs = lambda self, labels: right(self, labels).roll(1, dims=1)\n"
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify-objectives")
    texts = make_texts(60)
    save_llama(folder / "student", texts, tied=True)
    # More rows of embeddings than the student has.
    save_llama(folder / "teacher", texts, tied=False, layers=3, seed=7)
    teacher = AutoModelForCausalLM.from_pretrained(folder / "teacher")
    teacher.resize_token_embeddings(teacher.config.vocab_size + 8)
    torch.nn.init.normal_(teacher.lm_head.weight, std=0.5)
    teacher.save_pretrained(folder / "teacher")
    tokenizer = _train_byte_pairs(iter(texts), VOCAB_SIZE)
    own = {"vocab_size": len(tokenizer), "d_model": 32, "pad_token_id": 1, "eos_token_id": 0}
    config = T5Config(**own, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.1, decoder_start_token_id=1)
    torch.manual_seed(1)
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(folder / "t5")
    tokenizer.save_pretrained(folder / "t5")
    rows = [text.split()[: 4 + number % 9] for number, text in enumerate(make_texts(26, seed=6))]
    for name, made in (
        ("distillation", [{"text": " ".join(words)} for words in rows]),
        ("seq2seq", [{"source": " ".join(words), "target": " ".join(words[::-1][:4])} for words in rows]),
    ):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    save_launches(folder)
    return folder


def report_of(folder: Path, kind: str, tmp_path: Path, ranks: str, steps: int) -> Report:
    case = CASES[kind]
    values = recipe_values(folder / case["model"], folder / f"{kind}.jsonl", tmp_path / "out", tmp_path / "cache")
    values["data"] |= case["data"]
    values["objective"] = {"kind": kind, **case["objective"]}
    if kind == "distillation":
        values["objective"]["teacher"] = str(folder / "teacher")
    values["training"] |= {"micro_batch_size": 2, "gradient_accumulation_steps": 2}
    return verify(Recipe.from_mapping(values), folder / f"{ranks}.yaml", steps=steps)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    run_in_this_process(monkeypatch)


def twice_the_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Divergence.compare

    def compare(self: Divergence, z: torch.Tensor, y: torch.Tensor, targets: torch.Tensor) -> Any:
        return right(dataclasses.replace(self, temperature=self.temperature**2), z, y, targets)

    monkeypatch.setattr(Divergence, "compare", compare)


def shifted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Seq2Seq.decoder_inputs
    monkeypatch.setattr(Seq2Seq, "decoder_inputs", lambda self, labels: right(self, labels).roll(1, dims=1))


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(("kind", "spoil"), [("distillation", twice_the_temperature), ("seq2seq", shifted_twice)])
def test_a_right_run_passes_and_a_wrong_one_is_told(
    kind: str,
    spoil: Callable[[pytest.MonkeyPatch], None],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = report_of(folder, kind, tmp_path, "one", steps=2)
    assert report.verdict == OK, report
    spoil(monkeypatch)
    report = report_of(folder, kind, tmp_path, "one", steps=1)
    assert {row.check for row in report.rows if row.verdict == FAILED} >= {"loss", "gradients"}


@pytest.mark.grid
@pytest.mark.parametrize("kind", CASES)
def test_right_runs_pass(kind: str, folder: Path, tmp_path: Path) -> None:
    report = report_of(folder, kind, tmp_path, "two", steps=3)
    assert report.verdict == OK, report
    rows = {row.check: row for row in report.rows}
    assert rows["loss"].found <= 1e-6


@pytest.mark.grid
@pytest.mark.parametrize("kind", CASES)
def test_wrong_runs_are_told(kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A temperature is applied twice; the decoder's inputs are one place too far to the right."""
    (tmp_path / "broken").mkdir()
    lines = "".join(f"    {line}\n" for line in BROKEN[kind].splitlines())
    (tmp_path / "broken/sitecustomize.py").write_text(f"import os\nif 'LOCAL_WORLD_SIZE' in os.environ:\n{lines}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"), prepend=os.pathsep)
    report = report_of(folder, kind, tmp_path, "two", steps=2)
    assert {row.check for row in report.rows if row.verdict == FAILED} >= {"loss", "gradients"}
