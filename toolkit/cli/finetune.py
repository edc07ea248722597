"""What recipes/finetune.py runs on every rank."""

from __future__ import annotations

import argparse

from toolkit.cli.console import print_error
from toolkit.cli.recipes import recipe_rows
from toolkit.errors import ToolkitError
from toolkit.recipe.recipe import Recipe


def finetune_command(arguments: list[str]) -> int:
    """`recipes/finetune.py [--recipe NAME_OR_PATH] [section.key=value ...]`; returns the exit code."""
    options = _parser().parse_intermixed_args(arguments)
    try:
        recipe = Recipe.load(options.recipe, options.overrides)
        from toolkit.run.run import finetune  # torch is imported only for a recipe that is right

        finetune(recipe)
    except ToolkitError as error:
        return print_error(error)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="finetune.py",
        description="Fine-tune a model by a recipe.",
        epilog="recipes:\n" + "\n".join(f"  {row['name']:<16} {row['description']}" for row in recipe_rows()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--recipe", default="quickstart", metavar="NAME_OR_PATH", help="default: quickstart")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="replaces a value of the recipe, for example training.max_steps=50",
    )
    return parser
