"""`toolkit recipes`: list the shipped recipes, or copy one."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.shared.arguments import AsJson, NewFile
from toolkit.cli.shared.console import print_table
from toolkit.cli.shared.help import HelpedCommand, new_app
from toolkit.cli.shared.shipped import new_yaml, recipe_rows
from toolkit.paths import DATA_SUFFIXES
from toolkit.recipe.json_schema import schema_line
from toolkit.recipe.load import find_recipe
from toolkit.recipe.recipe import Recipe

recipes_app = new_app(invoke_without_command=True)


@recipes_app.callback()
def recipes(context: typer.Context, as_json: AsJson = False) -> None:
    """List the shipped recipes, or copy one."""
    if context.invoked_subcommand is None:
        list_recipes(as_json)


@recipes_app.command("list", cls=HelpedCommand, epilog="toolkit recipes list")
def list_recipes(as_json: AsJson = False) -> None:
    """List the shipped recipes with one line each."""
    rows = recipe_rows()
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    print_table(["recipe", "what it does"], [[row["name"], row["description"]] for row in rows])


@recipes_app.command("copy", cls=HelpedCommand, epilog="toolkit recipes copy quickstart own.yaml")
def copy_recipe(
    name: Annotated[str, typer.Argument(help="Name of a shipped recipe.")],
    path: NewFile,
) -> None:
    """Copy a shipped recipe to edit it. Paths of data files are made absolute."""
    source = find_recipe(name)
    target = new_yaml(path, source)
    target.write_text(schema_line(target.parent) + _with_absolute_files(source), encoding="utf-8")
    print(f"{target}: a copy of {name}. Train it: toolkit train {shlex.quote(str(target))}")


def _with_absolute_files(source: Path) -> str:
    """Returns a recipe's text, comments included, with the files it names relative to itself made absolute."""
    text = source.read_text(encoding="utf-8")
    recipe = Recipe.load(source)
    for absolute in [source.path for source in [*recipe.data.train, *(recipe.data.validation or [])]]:
        if absolute.endswith(DATA_SUFFIXES) and Path(absolute).is_relative_to(source.parent):
            text = text.replace(str(Path(absolute).relative_to(source.parent)), absolute)
    return text
