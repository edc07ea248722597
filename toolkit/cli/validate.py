"""`toolkit validate`: check a recipe and show where each value came from."""

from __future__ import annotations

import json

from toolkit.cli.arguments import AsJson, RecipeArguments, RecipeOption, load_recipe
from toolkit.cli.console import print_table


def validate(arguments: RecipeArguments = None, recipe: RecipeOption = None, as_json: AsJson = False) -> None:
    """Check a recipe and print it resolved, with where each value came from."""
    origins = load_recipe(arguments, recipe).origins()
    if as_json:
        print(json.dumps({key: {"value": value, "from": origin} for key, (value, origin) in origins.items()}, indent=2))
        return
    rows = [[key, json.dumps(value, ensure_ascii=False), origin] for key, (value, origin) in origins.items()]
    print_table(["key", "value", "from"], rows)
