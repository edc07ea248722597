"""`toolkit recipes schema`: the recipe's JSON schema, for editors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.shared.new_files import write_to
from toolkit.recipe.json_schema import SCHEMA_FILE, recipe_schema


def schema(
    to: Annotated[Path | None, typer.Option(help="Write it to this file. By default: standard output.")] = None,
) -> None:
    """Print the JSON schema of recipes, with which editors complete and check them.

    An editor with yaml-language-server finds it by a recipe's first line. `toolkit init` and `toolkit recipes copy`
    write that line if recipe.schema.json is in the recipe's folder.
    """
    text = json.dumps(recipe_schema(), indent=1)
    if to is None:
        print(text)
        return
    write_to(to, f"{text}\n")
    print(f"{to}: name it in the first line of a recipe: # yaml-language-server: $schema={to.name}")
    if to.name == SCHEMA_FILE:
        print("new recipes in its folder have that line")
