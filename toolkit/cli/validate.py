"""`toolkit validate`: check a recipe and show where each value came from."""

from __future__ import annotations

import json

from toolkit.cli.arguments import AsJson, Overrides, RecipeName
from toolkit.cli.console import print_table
from toolkit.recipe.recipe import Recipe


def validate(recipe: RecipeName, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Check a recipe and print it resolved, with where each value came from."""
    origins = Recipe.load(recipe, overrides or []).origins()
    if as_json:
        print(json.dumps({key: {"value": value, "from": origin} for key, (value, origin) in origins.items()}, indent=2))
        return
    rows = [[key, json.dumps(value, ensure_ascii=False), origin] for key, (value, origin) in origins.items()]
    print_table(["key", "value", "from"], rows)
