"""`toolkit recipes`: list the shipped recipes and Accelerate configs, or copy one."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from toolkit.cli.shared.arguments import LOOK, AsJson, NewFile, complete_shipped
from toolkit.cli.shared.console import print_rows
from toolkit.cli.shared.new_files import new_copy
from toolkit.cli.shared.shipped import recipe_rows, shipped_configs
from toolkit.errors import BadInputError
from toolkit.paths import shown_path
from toolkit.recipe.json_schema import schema_line
from toolkit.recipe.recipe import find_recipe, shipped_recipes, text_of

recipes_app = typer.Typer(invoke_without_command=True, **LOOK)


@recipes_app.callback(epilog="toolkit recipes")
def recipes(context: typer.Context, as_json: AsJson = False) -> None:
    """List the shipped recipes with one line each, or copy one."""
    if context.invoked_subcommand is None:
        print_rows(recipe_rows(), {"name": "recipe", "description": "what it does"}, as_json)


@recipes_app.command("configs", epilog="toolkit recipes configs")
def configs(as_json: AsJson = False) -> None:
    """List the shipped Accelerate configs: ranks, strategy, and when to choose them."""
    rows = [_config_fields(name, path) for name, path in shipped_configs().items()]
    headings = {"name": "config", "description": "what it is for"}
    print_rows(rows, {key: headings.get(key, key) for key in rows[0]}, as_json)


def _config_fields(name: str, path: Path) -> dict[str, Any]:
    """Returns what is shown of a config; the first sentence of its comment says what it is for."""
    text = path.read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    about = " ".join(line.removeprefix("# ") for line in text.splitlines() if line.startswith("#"))
    return {
        "name": name,
        "ranks": values["num_processes"],
        "strategy": values["fsdp_config"]["fsdp_sharding_strategy"],
        "description": about.split(". ")[0].removesuffix(".") + ".",
    }


@recipes_app.command("copy", epilog="toolkit recipes copy quickstart own.yaml")
def copy_recipe(
    name: Annotated[
        str, typer.Argument(help="Name of a shipped recipe or Accelerate config.", autocompletion=complete_shipped)
    ],
    path: NewFile,
) -> None:
    """Copy a shipped recipe or Accelerate config to edit it, and the files that a recipe and its comments name."""
    if config := shipped_configs().get(name):
        target = new_copy(config, path)
        print(f"{target}: a copy of {name}. Use it: toolkit train RECIPE --config {shlex.quote(str(target))}")
        return
    source = find_recipe(name)
    if source not in shipped_recipes().values():
        raise BadInputError(f"{name!r} is no shipped recipe; copy a file of your own by cp")
    text = text_of(source)
    target = new_copy(source, path, re.findall(r"\bdata/\w[\w.]*\w", text))
    text = text.replace("recipes/data/", shlex.quote(shown_path(target.parent / "data")) + "/")
    target.write_text(schema_line(target.parent) + text, encoding="utf-8")
    print(f"{target}: a copy of {name}. Train it: toolkit train {shlex.quote(str(target))}")
