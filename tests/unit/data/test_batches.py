"""Each kind of row lists the tensors that its batches have, and planning plans with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.texts import write_rows
from support.tiny import objective_of
from transformers import PreTrainedTokenizerFast

from toolkit.data import build
from toolkit.data.kinds.kind import BatchSpec
from toolkit.data.kinds.registry import rows_of
from toolkit.data.samples.samples import Batch
from toolkit.data.tokens import tokenizer
from toolkit.recipe.objectives.registry import SPECS
from toolkit.recipe.schema import DataSection

WORDS = ["one two three four five six", "seven eight", "nine ten one"]

ROWS: dict[str, list[dict[str, Any]]] = {
    "causal_lm": [{"text": words} for words in WORDS],
    "distillation": [{"text": words} for words in WORDS],
    "seq2seq": [{"source": words, "target": words.split()[0]} for words in WORDS],
    "sequence_classification": [{"text": words, "label": words[0]} for words in WORDS],
    "token_classification": [{"tokens": words.split(), "tags": list(words.split())} for words in WORDS],
    "preference": [{"prompt": words, "chosen": " good", "rejected": " not so good"} for words in WORDS],
    "reward": [{"prompt": words, "chosen": " good", "rejected": " not so good"} for words in WORDS],
    "grpo": [{"prompt": words, "id": number} for number, words in enumerate(WORDS)],
    "kto": [{"prompt": words, "completion": " good", "label": i > 0} for i, words in enumerate(WORDS)],
}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder = tmp_path_factory.mktemp("words")
    (folder / "rows.txt").write_text("\n".join(WORDS * 3))
    data = DataSection(train=[{"path": str(folder / "rows.txt")}], max_length=32, cache_dir=str(folder))  # type: ignore[list-item]
    return PreTrainedTokenizerFast.from_pretrained(tokenizer.train(data, 300))


def sizes_of(spec: BatchSpec, batch: Batch) -> dict[str, int]:
    """The size of each letter of the spec in a batch; asserts that names, types and shapes are those of the spec."""
    dims: dict[str, int] = {}
    assert {name for name, field in spec.items() if not field.optional} <= set(batch) <= set(spec)
    for name, tensor in batch.items():
        field = spec[name]
        assert tensor.dtype == getattr(torch, field.dtype), name
        assert tensor.dim() == len(field.shape), name
        for letter, size in zip(field.shape, tensor.shape, strict=True):
            assert size == (int(letter) if letter.isdigit() else dims.setdefault(letter, size)), name
    return dims


@pytest.mark.parametrize("kind", SPECS)
def test_the_batches_of_the_data_are_those_of_the_spec(tmp_path: Path, words: Any, kind: str) -> None:
    write_rows(tmp_path / "rows.jsonl", ROWS[kind])
    section = objective_of(kind)
    target = {"max_target_length": 16} if kind == "seq2seq" else {}
    padded = {} if SPECS[kind].padded else {"packing": False}
    data = DataSection(
        train=[{"path": str(tmp_path / "rows.jsonl")}],  # type: ignore[list-item]
        max_length=48,
        cache_dir=str(tmp_path),
        **target,
        **padded,
    )
    samples = build.build(data, words, 0, section).train
    found = sizes_of(rows_of(data, section).batch, samples.batch([0, 1]))
    assert found["B"] == 2
    # A row to a sample, as nothing is packed. Of prompts, both are completions of the first one.
    assert found.get("R", 2) == 2
    if kind == "grpo":
        assert len(samples) == 2 * len(WORDS)
        ids, place, kept = samples.asked_of_itself.prompt(2)
        assert words.decode(ids) == WORDS[2]
        assert (place, kept["prompt"], kept["row"]) == ("rows.jsonl:3", WORDS[2], {"prompt": WORDS[2], "id": 2})
