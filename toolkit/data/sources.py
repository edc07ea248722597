"""Rows from files or the hub, through `datasets`."""

from __future__ import annotations

import glob
import hashlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import datasets

from toolkit.errors import DataError, first_line
from toolkit.recipe import COMPRESSIONS, DATA_SUFFIXES, DataSection, as_list, is_file_source

BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}


def open_rows(data: DataSection, seed: int, cache: Path) -> tuple[datasets.Dataset, datasets.Dataset | None]:
    """Training and held-out rows.

    Args:
        data: names the sources.
        seed: chooses the rows of `validation_fraction`.
        cache: folder for what `datasets` converts.

    Raises:
        DataError: a source that is missing, unreadable, empty or without the text column.
    """
    train = _concatenate(as_list(data.train), "data.train", data, cache)
    if data.validation is not None:
        return train, _concatenate(as_list(data.validation), "data.validation", data, cache)
    if data.validation_fraction is None:
        return train, None
    return _hold_out(train, data.validation_fraction, seed)


def identify_rows(data: DataSection, seed: int) -> list[Any]:
    """All that decides which rows are read and which of them train: a file counts by its content."""
    return [
        [_identify(source, "data.train", data) for source in as_list(data.train)],
        [_identify(source, "data.validation", data) for source in as_list(data.validation)],
        data.validation_fraction,
        seed if data.validation_fraction is not None else None,
        data.text_column,
    ]


def _identify(source: str, field: str, data: DataSection) -> list[Any]:
    if is_file_source(source):
        return [[path.name, _sha256(path)] for path in expand_files(source, field)]
    return [source, data.hub_config, data.hub_split]


def expand_files(source: str, field: str) -> list[Path]:
    """The files of a path or glob, sorted. Raises DataError where there is none."""
    pattern = str(Path(source).expanduser())
    paths = [Path(match) for match in sorted(glob.glob(pattern, recursive=True))]
    if not paths:
        raise DataError(f"{field}: there is no file {source!r}")
    for path in paths:
        if path.is_dir():
            raise DataError(f"{field}: {source!r} is a folder; name files, for example {source.rstrip('/')}/*.jsonl")
        _suffix(path, field)
    return paths


def _suffix(path: Path, field: str) -> str:
    name = path.name
    for ending in COMPRESSIONS:
        name = name.removesuffix(ending)
    for suffix in DATA_SUFFIXES:
        if name.endswith(suffix):
            return suffix
    raise DataError(f"{field}: {str(path)!r} is of no known kind; allowed endings: {', '.join(DATA_SUFFIXES)}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _concatenate(sources: list[str], field: str, data: DataSection, cache: Path) -> datasets.Dataset:
    parts = []
    for source in sources:
        read = _read_files if is_file_source(source) else _read_hub
        part = read(source, field, data, cache)
        if data.text_column not in part.column_names:
            columns = ", ".join(part.column_names) or "none"
            raise DataError(
                f"{field}: {source!r} has no column {data.text_column!r}; it has {columns}. "
                "Set data.text_column to one of them"
            )
        parts.append(part.select_columns([data.text_column]))
    rows = datasets.concatenate_datasets(parts)
    if len(rows) == 0:
        raise DataError(f"{field}: {', '.join(sources)} holds no rows")
    return rows


def _read_files(source: str, field: str, data: DataSection, cache: Path) -> datasets.Dataset:
    by_suffix = defaultdict(list)
    for path in expand_files(source, field):
        if path.stat().st_size == 0:
            raise DataError(f"{field}: {str(path)!r} is empty")
        by_suffix[_suffix(path, field)].append(str(path))
    parts = []
    for suffix, files in by_suffix.items():
        settings: dict[str, Any] = {"sample_by": "document"} if suffix == ".txt" else {}
        parts.append(
            _load(BUILDERS[suffix], field, source, data_files=files, split="train", cache_dir=str(cache), **settings)
        )
    return datasets.concatenate_datasets(parts)


def _read_hub(source: str, field: str, data: DataSection, cache: Path) -> datasets.Dataset:
    return _load(source, field, source, name=data.hub_config, split=data.hub_split or "train")


def _load(builder: str, field: str, source: str, **settings: Any) -> datasets.Dataset:
    try:
        return datasets.load_dataset(builder, **settings)
    except Exception as error:  # the libraries behind `datasets` raise a great many kinds
        raise DataError(f"{field}: {source!r} cannot be read: {first_line(error.__cause__ or error)}") from error


def _hold_out(rows: datasets.Dataset, fraction: float, seed: int) -> tuple[datasets.Dataset, datasets.Dataset]:
    if len(rows) < 2:
        raise DataError("data.validation_fraction: data.train has a single row, so no row can be held out")
    held_out = min(max(1, round(fraction * len(rows))), len(rows) - 1)
    parts = rows.train_test_split(test_size=held_out, seed=seed)
    return parts["train"], parts["test"]
