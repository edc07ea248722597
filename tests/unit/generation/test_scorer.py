"""A function of the user's that scores completions: what it is given, what may go wrong, and who may have it run."""

from __future__ import annotations

import hashlib
import json
import math
import re
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import refusals
from support.cases import cases
from support.texts import write_rows
from support.unsure import save_unsure
from transformers import AutoModelForCausalLM, AutoTokenizer

import toolkit
from toolkit.errors import BadInputError
from toolkit.generation.text.complete import Completion
from toolkit.generation.text.evaluation import Scorer, evaluate, summary
from toolkit.generation.text.rows import PromptRow, read_rows
from toolkit.user_function import UserFunction, load_function

TABLES = cases(__file__)

SOURCE = """
from pathlib import Path

Path(__file__).with_suffix(".imported").touch()


def length(completion, row):
    row.pop("prompt", None)
    return min(len(completion) / row.get("wanted", 10), 1)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of its own for each test, on Python's path."""
    name = f"scores_of_{hashlib.sha256(str(tmp_path).encode()).hexdigest()[:12]}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_scores_are_averaged_and_those_below_one_are_listed(module: str, tmp_path: Path) -> None:
    rows = [PromptRow(f"f:{n}", "?", "?", fields={"prompt": "?", "wanted": 4}) for n in range(4)]
    texts = ["abcd", "ab", "a", ""]
    scorer = Scorer(load_function(f"{module}:length", "--score"))
    found = evaluate(rows, [Completion(text, 1, True) for text in texts], scorer)
    assert found.accuracy == (1 + 2 / 4 + 1 / 4 + 0) / 4
    assert [wrong.get("score") for wrong in found.to_dict()["mismatches"]] == [0.5, 0.25, None]
    assert "accuracy: 43.8% (1 of 4 rows exact)" in summary(found)
    assert "f:1: 'ab', scored 0.50" in summary(found)
    assert all(row.fields["prompt"] == "?" for row in rows), "a function changes a row for itself alone"
    assert scorer.function.fingerprint == hashlib.sha256((tmp_path / f"{module}.py").read_bytes()).hexdigest()


class Odd(float):
    """A number whose conversion and text are code of the user's."""

    def __float__(self) -> float:
        raise ValueError

    def __repr__(self) -> str:
        raise ValueError


class Masked:
    @property
    def __class__(self) -> Any:  # type: ignore[override]
        raise KeyError("class")


def test_numbers_from_0_to_1_are_scores_and_other_values_name_the_row() -> None:
    def score(value: Any) -> float:
        return Scorer(UserFunction("m:f", lambda _text, _row: value, "", "--score")).score("", PromptRow("f:7", "", ""))

    scores = [True, 1, 0.0, 0.5, np.float32(1), np.int64(0), False, Fraction(1, 4), np.True_, Decimal(1)]
    assert [score(value) for value in scores] == [1, 1, 0, 0.5, 1, 0, 0, 0.25, 1, 1]
    others = [None, "1", 2, -0.1, math.nan, math.inf, [1], 1j, torch.tensor(1.0), 10**400, 10**5000, -(10**400)]
    wrong = []
    for value in [*others, Odd(0.5), Masked(), object]:
        with pytest.raises(BadInputError) as caught:
            score(value)
        if not re.match("--score: m:f returned .* for f:7; needs True, False, or a number", str(caught.value)):
            wrong.append(str(caught.value))
    assert wrong == []


def test_rows_without_answers_and_rows_to_train_on_are_read(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "a fox"}]
    given = [{"prompt": "What?", "keys": [1]}, {"messages": turns}]
    file = write_rows(tmp_path / "rows.jsonl", given)
    found = read_rows(file, "--eval", with_answers=True, is_scored=True)
    assert [row.prompt for row in found] == ["What?", turns[:1]]
    assert [row.answers for row in found] == [(), ("a fox",)]
    assert [row.fields for row in found] == given


def test_the_commands_score_by_it(module: str, tmp_path: Path) -> None:
    save_unsure(tmp_path)
    questions = [{"prompt": "What of?", "wanted": 20}, {"prompt": "And then?", "wanted": 20}]
    file = write_rows(tmp_path / "asked.jsonl", questions)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    scores = []
    for row in questions:
        text = f"<|im_start|>user\n{row['prompt']}<|im_end|>\n<|im_start|>assistant\n"
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        out = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=tokenizer("<|im_end|>")["input_ids"])
        scores.append(min(len(tokenizer.decode(out[0, ids.shape[1] :]).removesuffix("<|im_end|>")) / 20, 1))
    name = f"{module}:length"
    assert toolkit.evaluate(tmp_path / "model", file, compare=name, max_new_tokens=12).accuracy == sum(scores) / 2
    toolkit.sample(tmp_path / "model", file, tmp_path / "samples", compare=name, samples=3, max_new_tokens=12)
    for line in (tmp_path / "samples/samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        assert sample["score"] == min(len(sample["completion"]) / 20, 1)


@pytest.mark.parametrize(("words", "told"), TABLES["CONTRADICTIONS"])
def test_options_that_contradict_it_are_told(words: list[str], told: str) -> None:
    outcome = refusals.toolkit(*words)
    assert outcome.code == 2
    assert told in " ".join(outcome.told.split())
