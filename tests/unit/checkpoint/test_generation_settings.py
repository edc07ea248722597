"""The base's generation settings go with the weights, and change no sample of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.texts import make_texts
from support.tiny import recipe_values, save_llama
from transformers import AutoTokenizer

from toolkit import Recipe, finetune
from toolkit.checkpoint.consolidate import MODEL_FILES, export_run
from toolkit.checkpoint.export import reload, sample_text, write_configuration
from toolkit.model.load import load
from toolkit.recipe.schema import ModelSection

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


def written(base: Path, folder: Path) -> dict[str, Any]:
    """What is written beside the weights of the base."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    write_configuration(load(ModelSection(name_or_path=str(base)), tokenizer, 0), tokenizer, folder, torch.float32)
    return settings_in(folder)


@pytest.mark.parametrize("settings", [CHAT, BEAMS, REFUSED], ids=["chat", "beams", "refused"])
def test_a_bases_settings_are_written_beside_its_weights(base: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    give(base, settings)
    found = written(base, tmp_path / "out")
    # What is transformers' own default may be left out.
    assert {key: found.get(key, False) for key in settings} == settings


@pytest.mark.parametrize("text", [None, "{", "[]", '{"max_new_tokens": 0}'])
def test_without_settings_that_can_be_read_the_configuration_serves(
    base: Path, tmp_path: Path, text: str | None
) -> None:
    (base / "generation_config.json").unlink()
    if text is not None:
        (base / "generation_config.json").write_text(text)
    assert written(base, tmp_path / "out")["eos_token_id"] == 0


def test_a_run_and_the_export_of_its_checkpoint_keep_them(base: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    give(base, CHAT)
    recipe = recipe_values(base, tmp_path / "rows.jsonl", tmp_path / "out", tmp_path / "cache", max_steps=1)
    finetune(Recipe.from_mapping({**recipe, "checkpoint": {"every_steps": 1}}))
    export_run(tmp_path / "out", to=tmp_path / "again")
    for folder in (tmp_path / "out" / "export", tmp_path / "out" / MODEL_FILES, tmp_path / "again"):
        found = settings_in(folder)
        assert {key: found[key] for key in CHAT} == CHAT


def test_samples_are_drawn_as_ever(base: Path) -> None:
    tokenizer, cpu = AutoTokenizer.from_pretrained(base), torch.device("cpu")

    def sample() -> str:
        return sample_text(reload(base, cpu, torch.float32), tokenizer, "the king", 12, 3)

    before = sample()
    give(base, {"eos_token_id": 0, "do_sample": True, "top_k": 1, "repetition_penalty": 9.0, "num_beams": 3})
    assert sample() == before
