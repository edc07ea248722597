"""The shipped recipes and Accelerate configs, and new files made of them."""

from __future__ import annotations

from pathlib import Path

from toolkit.errors import BadInputError, did_you_mean
from toolkit.paths import shipped_files
from toolkit.recipe.load import shipped_recipes
from toolkit.recipe.recipe import Recipe


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
