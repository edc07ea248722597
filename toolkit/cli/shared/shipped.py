"""The shipped recipes, Accelerate configs and pages of the docs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from toolkit.errors import BadInputError, did_you_mean
from toolkit.paths import shipped_files, shipped_folder
from toolkit.recipe.recipe import Recipe, shipped_recipes


def shipped_configs() -> dict[str, Path]:
    """Returns a dictionary from the name of every shipped Accelerate config to its path."""
    return shipped_files("accelerate_configs")


def find_config(name_or_path: str) -> Path:
    """Returns the file of an Accelerate config.

    Raises:
        BadInputError: if there is none; it lists the shipped configs.
    """
    path, shipped = Path(name_or_path).expanduser(), shipped_configs()
    if path.is_file():
        return path
    if name_or_path in shipped:
        return shipped[name_or_path]
    hint = did_you_mean(name_or_path, shipped)
    raise BadInputError(
        f"--config: there is no file {name_or_path!r}, and no config of that name{hint}. "
        f"Shipped configs: {', '.join(shipped)}"
    )


def recipe_rows() -> list[dict[str, str]]:
    """Returns name and description of every shipped recipe."""
    return [{"name": name, "description": Recipe.load(path).description} for name, path in shipped_recipes().items()]


def help_page(topic: str, commands: Iterable[str]) -> str:
    """Returns a page of the docs or one of their examples: rows, coming_from/trl, docs/data.md, examples/trainer.py.

    Raises:
        BadInputError: if there is none, and no command of that name.
    """
    folder = shipped_folder("docs")
    pages = {path.relative_to(folder).as_posix().removesuffix(".md"): path for path in folder.rglob("*.*")}
    name = topic.removeprefix("docs/").removesuffix(".md")
    if name not in pages:
        hint = did_you_mean(name, [*commands, *pages])
        raise BadInputError(f"there is no command or page {topic!r}{hint}; `toolkit help index` lists the pages")
    return pages[name].read_text(encoding="utf-8")
