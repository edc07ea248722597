"""`toolkit recipes`: list the shipped recipes, or copy one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from toolkit.cli.shared.arguments import LOOK, AsJson, NewFile
from toolkit.cli.shared.console import print_rows
from toolkit.cli.shared.new_files import new_yaml
from toolkit.cli.shared.shipped import recipe_rows
from toolkit.recipe.json_schema import schema_line
from toolkit.recipe.load import anchor_paths, find_recipe, sections_of, text_of

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
    """Copy a shipped recipe to edit it. Paths of data files are made absolute."""
    source = find_recipe(name)
    target = new_yaml(path, source)
    target.write_text(schema_line(target.parent) + _with_absolute_files(source), encoding="utf-8")
    print(f"{target}: a copy of {name}. Train it: toolkit train {shlex.quote(str(target))}")


def _with_absolute_files(source: Path) -> str:
    """Returns a recipe's text, comments included, with the files it names relative to itself made absolute."""
    text = text_of(source)
    anchored = sections_of(text, str(source))
    named = list(_leaves(anchored))
    anchor_paths(anchored, source.parent)
    for relative, absolute in set(zip(named, _leaves(anchored), strict=True)):
        if relative != absolute:
            text = re.sub(rf"(?<![\w./-]){re.escape(relative)}", absolute.replace("\\", r"\\"), text)
    return text


def _leaves(value: Any) -> Iterator[Any]:
    """Yields the values of nested mappings and lists."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    else:
        yield value
