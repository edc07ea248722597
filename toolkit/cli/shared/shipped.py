"""The shipped recipes and Accelerate configs, and new files made of them."""

from __future__ import annotations

from pathlib import Path

from toolkit.errors import BadInputError, did_you_mean
from toolkit.paths import atomic_write, shipped_files
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


def require_new(file: Path, force: bool) -> None:
    """Raises BadInputError, of --to, if the file exists and may not be replaced."""
    if file.exists() and not force:
        raise BadInputError(f"--to: {str(file)!r} exists; name another file, or replace it with --force")


def write_to(file: Path, text: str) -> None:
    """Writes the file of --to, and makes its folder. Raises BadInputError if it cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(file, text)
    except OSError as error:
        raise BadInputError(f"--to: {str(file)!r} cannot be written: {error.strerror}; name another file") from error
