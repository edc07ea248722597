"""`toolkit recipes`: list the shipped recipes, or copy one."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.arguments import AsJson, NewFile
from toolkit.cli.console import print_table
from toolkit.errors import BadInputError
from toolkit.paths import DATA_SUFFIXES
from toolkit.recipe.load import find_recipe, shipped_recipes
from toolkit.recipe.recipe import Recipe

recipes_app = typer.Typer(invoke_without_command=True)


@recipes_app.callback()
def recipes(context: typer.Context, as_json: AsJson = False) -> None:
    """List the shipped recipes, or copy one."""
    if context.invoked_subcommand is None:
        list_recipes(as_json)


@recipes_app.command("list")
def list_recipes(as_json: AsJson = False) -> None:
    """List the shipped recipes with one line each."""
    rows = recipe_rows()
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    print_table(["recipe", "what it does"], [[row["name"], row["description"]] for row in rows])


def recipe_rows() -> list[dict[str, str]]:
    """Returns name and description of every shipped recipe."""
    return [{"name": name, "description": Recipe.load(path).description} for name, path in shipped_recipes().items()]


@recipes_app.command("copy")
def copy_recipe(
    name: Annotated[str, typer.Argument(help="Name of a shipped recipe.")],
    path: NewFile,
) -> None:
    """Copy a shipped recipe to edit it. Paths of data files are made absolute."""
    source = find_recipe(name)
    target = new_yaml(path, source)
    target.write_text(_with_absolute_files(source), encoding="utf-8")
    print(f"{target}: a copy of {name}. Train it: toolkit train {shlex.quote(str(target))}")


def new_yaml(path: Path, source: Path) -> Path:
    """Returns the file for a copy of `source`, and makes its folder.

    Raises:
        BadInputError: if the file exists.
    """
    target = path / source.name if path.is_dir() else path
    if target.suffix not in (".yaml", ".yml"):
        raise BadInputError(f"{str(target)!r}: the name of a YAML file ends in .yaml or .yml")
    if target.exists():
        raise BadInputError(f"{str(target)!r} exists; name another file or delete it")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    except OSError as error:
        raise BadInputError(f"{str(target)!r} cannot be written: {error.strerror}; name another file") from error
    return target


def _with_absolute_files(source: Path) -> str:
    """Returns a recipe's text, comments included, with the files it names relative to itself made absolute."""
    text = source.read_text(encoding="utf-8")
    recipe = Recipe.load(source)
    for absolute in [source.path for source in [*recipe.data.train, *(recipe.data.validation or [])]]:
        if absolute.endswith(DATA_SUFFIXES) and Path(absolute).is_relative_to(source.parent):
            text = text.replace(str(Path(absolute).relative_to(source.parent)), absolute)
    return text
