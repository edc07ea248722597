"""What ends an answer is learned in every answer, and the export stops at it in anybody's `generate`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.chat_templates import GEMMA, ChatTemplate
from support.chat_templates import tokenizer_for as new_tokenizer
from support.conversations import assistant, user
from support.texts import make_texts
from support.tiny import VOCAB_SIZE, recipe_values, save_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from toolkit import Recipe, finetune
from toolkit.checkpoint.manifest import MODEL_FILES
from toolkit.data import build
from toolkit.data.kinds.source_target import SourceTargetSamples
from toolkit.data.samples.packing import whole
from toolkit.data.samples.samples import TextSamples
from toolkit.data.templates.templates import MARKERS
from toolkit.data.tokens.tokenizer import _train_byte_pairs
from toolkit.recipe.schema import DataSection
from toolkit.run.parts.stops import teach_to_stop

ANSWERS = {"the king": "bread", "a fox": "wine and the moon", "so": "no"}


def test_a_tiny_model_stops_at_the_end_of_its_turn(tmp_path: Path) -> None:
    """The base's configuration has its own end token alone, as Gemma's."""
    base = save_llama(tmp_path / "base", make_texts(60), tied=True)
    tokenizer = _train_byte_pairs(iter(make_texts(60)), VOCAB_SIZE, MARKERS["chatml"])
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(base)
    config = json.loads((base / "config.json").read_text()) | {"eos_token_id": tokenizer.eos_token_id}
    (base / "config.json").write_text(json.dumps(config))
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.eos_token_id}))
    rows = [{"messages": [user(asked), assistant(answer)]} for asked, answer in ANSWERS.items()]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    values = recipe_values(base, tmp_path / "a.jsonl", tmp_path / "out", tmp_path / "cache", max_steps=60)
    values["data"] |= {"chat_template": "chatml", "max_length": 64}
    values["optimizer"] = {"learning_rate": 1e-2}
    result = finetune(Recipe.from_mapping(values))
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for folder in (result.export_dir, tmp_path / "out" / MODEL_FILES):
        settings = json.loads((Path(folder) / "generation_config.json").read_text())
        assert settings["eos_token_id"] == [tokenizer.eos_token_id, end]
    model, tokens = (kind.from_pretrained(result.export_dir) for kind in (AutoModelForCausalLM, AutoTokenizer))
    for asked, answer in ANSWERS.items():
        prompt = tokens.apply_chat_template([user(asked)], add_generation_prompt=True, return_tensors="pt")
        found = model.generate(**prompt, max_new_tokens=40, do_sample=False, pad_token_id=tokens.pad_token_id)
        assert tokens.decode(found[0, prompt["input_ids"].shape[1] :]) == f"{answer}<|im_end|>"


def samples_of(rows: list[tuple[list[int], list[int]]]) -> TextSamples:
    """Rows of ids and of the places that are learned, one to a sample."""

    class InMemory:
        def __len__(self) -> int:
            return len(rows)

        def tokens(self, row: int, start: int = 0, stop: int | None = None) -> tuple[Any, Any]:
            ids, learned = rows[row]
            return np.array(ids)[start:stop], np.isin(np.arange(len(ids)), learned)[start:stop]

        def turns(self) -> dict[int, list[int]]:
            return {}

    numbers = np.arange(len(rows))
    lengths = np.array([len(ids) for ids, _ in rows])
    return TextSamples(InMemory(), whole(numbers, lengths, 99), list(numbers + 1), 99, False, 0)


def model_of(eos: Any) -> Any:
    return SimpleNamespace(can_generate=lambda: True, generation_config=SimpleNamespace(eos_token_id=eos))


@pytest.mark.parametrize("eos", [1, [1], None, [1, 5]], ids=str)
def test_the_end_of_a_turn_is_put_among_the_models_own_ends(eos: Any) -> None:
    tokens = new_tokenizer(GEMMA)  # <eos> is 1, <end_of_turn> 5
    model = model_of(eos)
    told = teach_to_stop(model, tokens, samples_of([([2, 9, 9, 5], [2, 3])]))
    has = eos == [1, 5]
    assert model.generation_config.eos_token_id == ([1, 5] if eos else 5)
    assert told == "<end_of_turn> (5) is learned as an end" + (
        ", and generation_config.eos_token_id has it"
        if has
        else f"; generation_config.eos_token_id of the export is {model.generation_config.eos_token_id}, "
        f"and not {eos} as before"
    )


def test_only_what_ends_a_turn_or_a_text_is_taken() -> None:
    """A row that is cut ends with any token, and Harmony's earlier turns with one that also ends thoughts."""
    tokens, model = new_tokenizer(GEMMA), model_of(1)
    assert teach_to_stop(model, tokens, samples_of([([2, 9, 9, 4], [2, 3])])).startswith("no special token is learned")
    assert model.generation_config.eos_token_id == 1
    beside = SourceTargetSamples(samples_of([([2, 9, 9, 5], [2, 3])]).rows, np.arange(1), 99, 0, 99)  # type: ignore[arg-type]
    assert teach_to_stop(model, tokens, beside) is None


OPEN = ChatTemplate(
    name="leaves calls open",
    template="{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{% if 'open' not in m.content %}{{ '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    eos="<|im_end|>",
)


@pytest.mark.parametrize("place", ["last", "first"])
def test_answers_without_an_end_are_counted_over_all_rows(tmp_path: Path, place: str) -> None:
    good, bad = [user("a"), assistant("b")], [user("a"), assistant("open")]
    mixed = [*good, *bad] if place == "last" else [*bad, *good]
    parts = assistant("b c") | {"train_detail": [{"begin_offset": 1, "end_offset": 2, "train": False}]}
    rows = [good, [*good, *good], mixed, good, mixed, [user("a"), parts]]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    fields = {"train": str(tmp_path / "a.jsonl"), "cache_dir": str(tmp_path / "cache"), "max_length": 64}
    report = build.build(DataSection.model_validate(fields), new_tokenizer(OPEN), seed=0).report
    assert "a.jsonl: 2 rows with an answer that no special token ends: a.jsonl:3, a.jsonl:5; there" in str(
        report.warnings
    )
