"""The base's generation settings go with the weights, and change no sample of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.texts import make_texts, write_rows
from support.tiny import recipe_values, save_llama
from transformers import AutoTokenizer

from toolkit import Recipe, finetune
from toolkit.checkpoint.beside_weights.model_files import write_model_files
from toolkit.checkpoint.consolidate import export_run
from toolkit.checkpoint.manifest import MODEL_FILES
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
