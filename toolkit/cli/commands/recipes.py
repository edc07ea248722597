"""`toolkit recipes`: list the shipped recipes, or copy one."""

from __future__ import annotations

import re
import shlex
from typing import Annotated

import typer

from toolkit.cli.shared.arguments import LOOK, AsJson, NewFile
from toolkit.cli.shared.console import print_rows
from toolkit.cli.shared.new_files import new_copy
from toolkit.cli.shared.shipped import recipe_rows
from toolkit.errors import BadInputError
from toolkit.paths import shown_path
from toolkit.recipe.json_schema import schema_line
from toolkit.recipe.load import find_recipe, shipped_recipes, text_of

recipes_app = typer.Typer(invoke_without_command=True, **LOOK)


@recipes_app.callback(epilog="toolkit recipes")
def recipes(context: typer.Context, as_json: AsJson = False) -> None:
    """List the shipped recipes with one line each, or copy one."""
    if context.invoked_subcommand is None:
        print_rows(recipe_rows(), {"name": "recipe", "description": "what it does"}, as_json)


@recipes_app.command("copy", epilog="toolkit recipes copy quickstart own.yaml")
def copy_recipe(
    name: Annotated[str, typer.Argument(help="Name of a shipped recipe.")],
    path: NewFile,
) -> None:
    """Copy a shipped recipe to edit it, and the files that it and the commands in its comments name."""
    source = find_recipe(name)
    if source not in shipped_recipes().values():
        raise BadInputError(f"{name!r} is no shipped recipe; copy a file of your own by cp")
    text = text_of(source)
    target = new_copy(source, path, re.findall(r"\bdata/\w[\w.]*\w", text))
    text = text.replace("recipes/data/", shlex.quote(shown_path(target.parent / "data")) + "/")
    target.write_text(schema_line(target.parent) + text, encoding="utf-8")
    print(f"{target}: a copy of {name}. Train it: toolkit train {shlex.quote(str(target))}")
