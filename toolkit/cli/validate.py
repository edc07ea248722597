"""`toolkit validate`: check a recipe and show where each value came from."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from toolkit.cli.arguments import AsJson, RecipeArguments, RecipeOption, load_recipe
from toolkit.cli.console import print_table

EveryKey = Annotated[bool, typer.Option("--all", help="Show the keys that have their defaults, too.")]


def validate(
    arguments: RecipeArguments = None,
    recipe: RecipeOption = None,
    every_key: EveryKey = False,
    as_json: AsJson = False,
) -> None:
    """Check a recipe and print what it sets, and where each value comes from."""
    origins = load_recipe(arguments, recipe).origins()
    if as_json:
        print(json.dumps({key: {"value": value, "from": origin} for key, (value, origin) in origins.items()}, indent=2))
        return
    shown = {key: found for key, found in origins.items() if every_key or found[1] != "default"}
    rows = [[key, json.dumps(value, ensure_ascii=False), origin] for key, (value, origin) in shown.items()]
    print_table(["key", "value", "from"], rows)
    if left_out := len(origins) - len(shown):
        print(f"{left_out} more keys have their defaults; --all shows them")
