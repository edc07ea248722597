"""New files that commands write, and folders that are made for them."""

from __future__ import annotations

from pathlib import Path

from toolkit.errors import BadInputError
from toolkit.paths import atomic_write


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
