"""New files that commands write, and folders that are made for them."""

from __future__ import annotations

import filecmp
import shutil
from collections.abc import Iterable
from pathlib import Path

from toolkit.errors import BadInputError
from toolkit.paths import atomic_write


def new_copy(source: Path, path: Path, named: Iterable[str] = ()) -> Path:
    """Copies a YAML file, and the files and folders next to it that are named, to the same places next to the copy.

    Raises:
        BadInputError: if the file exists, or another one in the place of a named file; then nothing is written.
    """
    target = path / source.name if path.is_dir() else path
    if target.suffix not in (".yaml", ".yml"):
        raise BadInputError(f"{str(target)!r}: the name of a YAML file ends in .yaml or .yml")
    files = (file for name in named for file in (source.parent / name, *(source.parent / name).glob("*")))
    copies = {target.parent / file.relative_to(source.parent): file for file in files if file.is_file()}
    for copy in (target, *copies):
        if copy.exists() and not (copy in copies and filecmp.cmp(copies[copy], copy, shallow=False)):
            raise BadInputError(f"{str(copy)!r} exists; name another file or delete it")
    try:
        for copy, file in {**copies, target: source}.items():
            if not copy.exists():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)
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
