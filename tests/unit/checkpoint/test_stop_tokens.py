"""What ends an answer is learned in every answer, and the export stops at it in anybody's `generate`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.chat_templates import GEMMA, ChatTemplate
from support.chat_templates import tokenizer_for as new_tokenizer
from support.conversations import assistant, user
from support.texts import make_texts, write_rows
from support.tiny import VOCAB_SIZE, recipe_values, save_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from toolkit import Recipe, finetune
from toolkit.checkpoint.beside_weights.model_files import write_model_files
from toolkit.checkpoint.consolidate import export_run
from toolkit.checkpoint.manifest import MODEL_FILES
from toolkit.data import build
from toolkit.data.kinds.source_target import SourceTargetSamples
from toolkit.data.samples.packing import whole
from toolkit.data.samples.samples import TextSamples
from toolkit.data.templates.templates import MARKERS
from toolkit.data.tokens.tokenizer import _train_byte_pairs
from toolkit.model.load import load
from toolkit.recipe.schema import DataSection, ModelSection
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


CHAT = {"eos_token_id": [0, 5], "do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.05}
BEAMS = {"eos_token_id": 0, "num_beams": 4, "early_stopping": True, "length_penalty": 2.0}
REFUSED = {"eos_token_id": [0, 5], "do_sample": False, "temperature": 0.6, "top_p": 0.9, "early_stopping": True}
"""transformers does not save it: temperature without sampling, stopping without beams."""

TEXTS = make_texts(60)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_llama(tmp_path / "base", TEXTS, tied=True)


def settings_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "generation_config.json").read_text())  # type: ignore[no-any-return]


def give(base: Path, settings: dict[str, Any]) -> None:
    (base / "generation_config.json").write_text(json.dumps(settings))


def written(base: Path, folder: Path, ends: list[int] | None = None) -> dict[str, Any]:
    """What is written beside the weights of the base, after ends of an answer were taught."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    loaded = load(ModelSection(name_or_path=str(base)), tokenizer, 0)
    model = loaded.model
    model.generation_config.eos_token_id = ends or model.generation_config.eos_token_id
    write_model_files(model, tokenizer, folder, torch.float32, loaded.fit.files)
    return settings_in(folder)


@pytest.mark.parametrize("settings", [CHAT, BEAMS, REFUSED], ids=["chat", "beams", "refused"])
def test_a_bases_settings_are_written_beside_its_weights(base: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    give(base, settings)
    written(base, tmp_path / "out")
    file = "generation_config.json"
    assert (tmp_path / "out" / file).read_bytes() == (base / file).read_bytes()


def test_taught_ends_are_all_that_changes(base: Path, tmp_path: Path) -> None:
    """With `_from_model_config` transformers 4 may make the settings anew of config.json, and lose the ends."""
    give(base, {"_from_model_config": True, **REFUSED})
    assert written(base, tmp_path / "out", [0, 5, 7]) == {**REFUSED, "eos_token_id": [0, 5, 7]}


def test_without_settings_the_configuration_serves(base: Path, tmp_path: Path) -> None:
    """A base without the file has an export without it, unless ends were taught."""
    (base / "generation_config.json").unlink()
    with pytest.raises(FileNotFoundError):
        written(base, tmp_path / "out")
    found = written(base, tmp_path / "taught", [0, 5])
    assert found["eos_token_id"] == [0, 5]
    assert "_from_model_config" not in found
    for text in ("{", "[]"):
        (base / "generation_config.json").write_text(text)
        assert written(base, tmp_path / "out")["eos_token_id"] == 0


def test_a_run_and_the_export_of_its_checkpoint_keep_them(base: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", ({"text": text} for text in TEXTS))
    give(base, CHAT)
    recipe = recipe_values(base, tmp_path / "rows.jsonl", tmp_path / "out", tmp_path / "cache", max_steps=1)
    finetune(Recipe.from_mapping({**recipe, "checkpoint": {"every_steps": 1}}))
    export_run(tmp_path / "out", to=tmp_path / "again")
    for folder in (tmp_path / "out" / "export", tmp_path / "out" / MODEL_FILES, tmp_path / "again"):
        assert settings_in(folder) == CHAT
    text = (base / "config.json").read_text()
    (base / "config.json").write_text(text.replace("{", '{"colour": "red",', 1))
    export_run(tmp_path / "out", to=tmp_path / "changed")
    base.rename(tmp_path / "elsewhere")
    export_run(tmp_path / "out", to=tmp_path / "gone")
    for name in ("changed", "gone"):
        assert (tmp_path / name / "config.json").read_text() == text
