"""Finds the files of a recipe's sources. Imports nothing heavy: `toolkit train` uses it before it starts ranks."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from fsspec.utils import infer_compression

from toolkit.data.rows.remote import local_copies
from toolkit.errors import DataError
from toolkit.paths import COMPRESSIONS, DATA_SUFFIXES, is_file_source, is_store
from toolkit.recipe.schema import DataSection

TABLES = (".parquet", ".arrow")
"""Endings of files that `datasets` reads."""


def paths_of(data: DataSection, of_stores: bool = True) -> list[str]:
    """Returns the path of every file that a recipe reads; a source that is not a file stands for itself.

    Args:
        of_stores: whether files in stores are downloaded.

    Raises:
        DataError: if one is missing, empty or of an unknown type.
    """
    found = []
    for field, sections in (("data.train", data.train), ("data.validation", data.validation or [])):
        for section in sections:
            is_here = of_stores or not is_store(section.path)
            is_file = is_here and is_file_source(section.path) and not is_saved_dataset(local_path(section.path))
            found += [str(path) for path in expand_files(section.path, field)] if is_file else [section.path]
    return found


def expand_files(source: str, field: str) -> list[Path]:
    """Returns the files of a path or glob, sorted, or the local copies of a URL.

    Raises:
        DataError: if there is none, or one cannot be read.
    """
    if is_store(source):
        paths = list(local_copies(source, field))
    else:
        named = local_path(source)  # a name may hold the signs of a glob, for example brackets
        # `**/**` matches a file more than once.
        found = {str(named)} if os.path.exists(named) else set(glob.glob(str(named), recursive=True))
        paths = [Path(match) for match in sorted(found)]
    if not paths:
        raise DataError(f"{field}: there is no file {source!r}; correct the path, or name a data set of the hub")
    for path in paths:
        if not path.exists():
            raise DataError(f"{field}: {str(path)!r} is a link to a file that does not exist; name another")
        if path.suffix == ".lance":
            raise DataError(f"{field}: {str(path)!r} is a lance table, which is not read; write it as parquet")
        if path.is_dir():
            raise DataError(f"{field}: {source!r} is a folder; name files, for example {source.rstrip('/')}/*.jsonl")
        if path.stat().st_size == 0:
            raise DataError(f"{field}: {str(path)!r} is empty; remove it from {field}, or write rows to it")
        suffix_of(path, field)
    return paths


def local_path(source: str) -> Path:
    """Returns the path with `~` as the user's home; `~` of an unknown user stays."""
    return Path(os.path.expanduser(source))


def suffix_of(path: Path, field: str) -> str:
    """Returns the ending that says what kind of file it is.

    Raises:
        DataError: if such a file cannot be read.
    """
    compression = path.suffix if path.suffix in COMPRESSIONS else ""
    name = path.name.removesuffix(compression)
    suffix = next((suffix for suffix in DATA_SUFFIXES if name.endswith(suffix)), None)
    if suffix is None:
        raise DataError(
            f"{field}: {str(path)!r} is of an unknown file type; allowed endings: {', '.join(DATA_SUFFIXES)}"
        )
    if compression and suffix in TABLES:
        raise DataError(f"{field}: {str(path)!r} is a compressed {suffix} file; decompress it first")
    if compression and infer_compression(path.name) is None:
        package = "zstandard" if compression == ".zst" else "a package that reads it"
        raise DataError(f"{field}: {str(path)!r} cannot be decompressed here; install {package}, or decompress it")
    return suffix


def is_saved_dataset(path: Path) -> bool:
    """Returns whether the folder was saved by `datasets`."""
    return any(os.path.isfile(path / name) for name in ("dataset_info.json", "dataset_dict.json"))
