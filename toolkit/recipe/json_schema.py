"""The schema of recipes for editors, which complete and check what is typed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolkit.recipe.recipe import Recipe

SCHEMA_FILE = "recipe.schema.json"
"""The schema's name in a folder of recipes."""


def recipe_schema() -> dict[str, Any]:
    """Returns the JSON schema of a recipe. It has no rules about several fields: `toolkit validate` checks those."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Recipe.model_json_schema()}


def schema_line(folder: Path) -> str:
    """Returns the first line of a recipe in a folder that has the schema; empty without it."""
    return f"# yaml-language-server: $schema={SCHEMA_FILE}\n" if (folder / SCHEMA_FILE).is_file() else ""
