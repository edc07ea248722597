"""What every command here reads: a tiny model, rows, and a recipe that trains it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from support.texts import write_rows
from support.tiny import recipe_values, save_llama

TEXTS = ["a king and a queen walked by the river", "the moon was high"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model/, rows.jsonl and recipe.yaml."""
    place = tmp_path_factory.mktemp("place")
    save_llama(place / "model", TEXTS, tied=False)
    write_rows(place / "rows.jsonl", ({"text": text} for text in TEXTS * 10))
    values = recipe_values(place / "model", place / "rows.jsonl", place / "out", place / "cache")
    (place / "recipe.yaml").write_text(yaml.safe_dump(values))
    return place
