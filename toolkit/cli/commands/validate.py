"""`toolkit validate`: check a recipe, and show where each value came from."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from toolkit.cli.shared.arguments import AsJson, RecipeArguments, load_recipe, split_arguments
from toolkit.cli.shared.hub import require_inputs
from toolkit.recipe.recipe import find_recipe

VERDICT = "valid: the keys and the places of models and data. `toolkit train --dry-run` looks at what they hold"

EveryKey = Annotated[bool, typer.Option("--all", help="Show the keys that have their defaults, too.")]


def validate(
    arguments: RecipeArguments = None,
    every_key: EveryKey = False,
    as_json: AsJson = False,
) -> None:
    """Check a recipe, and print what it sets, and where each value comes from.

    Looks for the folders of models and for the data files on this machine. Reads neither rows nor weights, and asks
    neither the hub nor a store.
    """
    loaded = load_recipe(arguments)
    require_inputs(loaded, of_stores=False)
    origins = loaded.origins()
    if as_json:
        print(json.dumps({key: {"value": value, "from": origin} for key, (value, origin) in origins.items()}, indent=2))
        print(VERDICT, file=sys.stderr)
        return
    shown = {key: found for key, found in origins.items() if every_key or found[1] != "default"}
    path = str(find_recipe(split_arguments(arguments)[0]))
    width = max(map(len, shown))
    print(f"recipe: {path}\n")
    for key, (value, origin) in shown.items():
        print(f"{key:{width}}  {_value_text(value)}" + (f"  # {origin}" if origin != path else ""))
    if left_out := len(origins) - len(shown):
        print(f"{left_out} more keys have their defaults; --all shows them")
    print(VERDICT)


def _value_text(value: Any) -> str:
    """Returns a value as it could be given on the command line, without the unset fields of its sources."""
    if isinstance(value, list):
        value = [
            {key: one for key, one in item.items() if one is not None} if isinstance(item, dict) else item
            for item in value
        ]
        value = [item["path"] if isinstance(item, dict) and [*item] == ["path"] else item for item in value]
    return json.dumps(value, ensure_ascii=False)
