"""`toolkit validate`: check a recipe and the files that it names, and show where each value came from."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from toolkit.cli.shared.arguments import AsJson, RecipeArguments, load_recipe, split_arguments
from toolkit.cli.shared.hub import models_of
from toolkit.data.rows.files import expand_files, is_saved_dataset, local_path
from toolkit.errors import BadInputError, RecipeError
from toolkit.paths import is_file_source, is_hub_name, is_store, require_folder, shown_path, without_query
from toolkit.recipe.load import find_recipe
from toolkit.recipe.objectives.section import TEMPLATE_NAMES
from toolkit.recipe.recipe import Recipe

EveryKey = Annotated[bool, typer.Option("--all", help="Show the keys that have their defaults, too.")]

MODEL_FILES: dict[str, Sequence[str]] = {"configuration": ["config.json"], "weights": ["*.safetensors"]}

TOKENIZER_FILES = ["*token*", "vocab*", "*.model", "*.tiktoken", "tekken.json"]
"""Of a model's folder: at least one belongs to its tokenizer."""


def validate(
    arguments: RecipeArguments = None,
    every_key: EveryKey = False,
    as_json: AsJson = False,
) -> None:
    """Check a recipe and the files that it names, and print what it sets, and where each value comes from.

    Looks for the model's folder and for the data files on this machine. Does not look at rows and weights, and asks
    neither the hub nor a store.
    """
    loaded = load_recipe(arguments)
    verdict = _verdict(loaded)
    origins = loaded.origins()
    if as_json:
        print(json.dumps({key: {"value": value, "from": origin} for key, (value, origin) in origins.items()}, indent=2))
        print(verdict, file=sys.stderr)
        return
    shown = {key: found for key, found in origins.items() if every_key or found[1] != "default"}
    path = str(find_recipe(split_arguments(arguments)[0]))
    width = max(map(len, shown))
    print(f"recipe: {path}\n")
    for key, (value, origin) in shown.items():
        print(f"{key:{width}}  {_value_text(value)}" + (f"  # {origin}" if origin != path else ""))
    if left_out := len(origins) - len(shown):
        print(f"{left_out} more keys have their defaults; --all shows them")
    print(verdict)


def _value_text(value: Any) -> str:
    """Returns a value as it could be given on the command line, without the unset fields of its sources."""
    if isinstance(value, list):
        value = [
            {key: one for key, one in item.items() if one is not None} if isinstance(item, dict) else item
            for item in value
        ]
        value = [item["path"] if isinstance(item, dict) and [*item] == ["path"] else item for item in value]
    return json.dumps(value, ensure_ascii=False)


def _verdict(recipe: Recipe) -> str:
    """Returns what was looked at and what was not. Raises RecipeError with a line for each file that is missing."""
    found: list[str] = []
    elsewhere: list[str] = []
    problems: list[str] = []

    def look(name: str, is_elsewhere: bool, check: Callable[[], object]) -> None:
        if is_elsewhere:
            elsewhere.append(without_query(name))
            return
        try:
            check()
            found.append(shown_path(local_path(name)))
        except BadInputError as problem:
            problems.append(str(problem))

    for field, name in models_of(recipe).items():
        needed = {} if field == "model.tokenizer" else {**MODEL_FILES}
        if field != "model.name_or_path" or recipe.model.tokenizer is None:
            needed["tokenizer"] = TOKENIZER_FILES
        look(name, is_hub_name(name), partial(_require_model, name, field, needed))
    for field, sources in (("data.train", recipe.data.train), ("data.validation", recipe.data.validation or [])):
        for path in (source.path for source in sources):
            is_elsewhere = is_store(path) or not is_file_source(path)
            look(path, is_elsewhere, partial(_require_rows, path, field))
    template = recipe.data.chat_template
    for field, place, exists in (
        ("answers.file", recipe.answers.file, Path.is_file),
        ("data.image_root", recipe.data.image_root, Path.is_dir),
        ("data.chat_template", None if template in TEMPLATE_NAMES else template, Path.is_file),
    ):
        if place is not None:
            look(place, is_store(place), partial(_require, place, field, exists))
    for field, name in recipe.own_code().items():
        file = name.rpartition(":")[0]
        if file.endswith(".py"):
            look(file, False, partial(_require, file, field, Path.is_file))
    if problems:
        raise RecipeError("files of the recipe", problems)
    here = f"the keys, and the files {', '.join(dict.fromkeys(found))}" if found else "the keys"
    there = f" {', '.join(dict.fromkeys(elsewhere))} (not on this machine)," if elsewhere else ""
    return f"valid: {here}. Not looked at:{there} the rows and the weights; `toolkit train --dry-run` does"


def _require_model(name: str, field: str, needed: Mapping[str, Sequence[str]]) -> None:
    """Raises BadInputError if a folder holds no file of one of these patterns, by what they are."""
    require_folder(name, field)
    folder = local_path(name)
    for what, patterns in needed.items():
        if not any(path for pattern in patterns for path in folder.glob(pattern)):
            raise BadInputError(
                f"{field}: the folder {name!r} holds no {what} ({', '.join(patterns)}); download it again, or name "
                "another"
            )


def _require_rows(path: str, field: str) -> None:
    if not is_saved_dataset(local_path(path)):
        expand_files(path, field)


def _require(name: str, field: str, exists: Callable[[Path], bool]) -> None:
    if not exists(local_path(name)):
        raise BadInputError(f"{field}: there is no {name!r}; correct the path")
