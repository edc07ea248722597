"""Opens the path, glob or hub name of a recipe as the shards of a source, and names its rows."""

from __future__ import annotations

import glob
import hashlib
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.data.rows.files import TABLES, expand_files, is_saved_dataset, local_path, suffix_of
from toolkit.data.rows.image_places import COLUMNS, is_image
from toolkit.data.rows.readers import WRAPPERS, Row, Shard, opened, read, unreadable
from toolkit.data.rows.values import RowProblem, is_empty, listed
from toolkit.errors import DataError
from toolkit.paths import COMPRESSIONS, is_file_source, source_name
from toolkit.recipe.schema import ColumnsSection, DataSection, SourceSection
from toolkit.user_function import UserFunction, load_function

if TYPE_CHECKING:
    import datasets

LINES = (".jsonl", ".ndjson")
"""Files with a row on each line."""

WRAPPED = re.compile(rb'\{\s*"(' + "|".join(WRAPPERS).encode() + rb')"\s*:\s*\[\s*\{')
"""Beginning of a JSON file whose rows are a list under a key."""

SHARD_BYTES = 64 * 2**20
"""Size of the pieces of a file of lines that processes tokenise in parallel."""

SHARD_ROWS = 50_000
"""Rows in a piece of a data set with numbered rows."""

ROWS_LOOKED_AT = 100
"""Number of first rows in which a source's columns are searched."""


SPLITS_OF = {"data.train": ["train"], "data.validation": ["validation", "test"]}
"""Field -> the splits of a saved data set that it reads; the first that exists is taken."""


@dataclass(frozen=True)
class Source:
    """The files or data set of a path, a glob or a hub name.

    Attributes:
        name: a name for messages; the file's own if there is a single one.
        field: field of the recipe, for errors.
        weight: weight in the mix, or None if sources are concatenated.
        shards: in the order of their rows.
        columns: columns of the first rows, sorted.
        label_names: names of the numbers of each column that has them.
        paths: path of a shard -> the name that its rows get.
        by_hand: names of its columns, in place of those that hold for all sources.
    """

    name: str
    field: str
    weight: float | None
    shards: list[Shard]
    columns: list[str]
    label_names: dict[str, list[str]]
    paths: dict[str, str]
    by_hand: ColumnsSection | None = None


def map_of(data: DataSection) -> UserFunction | None:
    """Returns the user's function through which all rows go; see `load_function`, also for what it raises."""
    return None if data.map is None else load_function(data.map, "data.map")


def open_source(
    section: SourceSection, field: str, streaming: bool = False, through: UserFunction | None = None
) -> Source:
    """Finds a source's files or data set, and reads its first rows.

    Args:
        field: `data.train` or `data.validation`.
        streaming: whether a hub data set is read from the hub row by row instead of downloaded first.
        through: the user's function through which rows go, see `map_of`.

    Raises:
        DataError: if a source is missing, empty or of an unknown type.
    """
    if not is_file_source(section.path):
        shards, table = _hub_shards(section, field, streaming)
    elif is_saved_dataset(local_path(section.path)):
        shards, table = _saved_shards(section, field)
    else:
        shards, table = _file_shards(section.path, field), None
    name = source_name(section.path)
    names = _label_names(shards, field, name)
    if through is not None:
        stored, shards = shards, [replace(shard, map=through) for shard in shards]
        names = {column: of for column, of in names.items() if _is_kept(column, stored, shards)}
    columns = (
        sorted(table.column_names)
        if table is not None and table.column_names and through is None
        else _columns_of_first_rows(shards, field, name)
    )
    paths = short_names(shard.path for shard in shards)
    return Source(name, field, section.weight, shards, columns, names, paths, section.columns)


def identify(section: SourceSection, field: str, source: Source | None = None) -> list[Any]:
    """Returns what decides which rows a source has; files and tables of the hub count by their content.

    Args:
        source: the source if it is open already; otherwise a data set of the hub is opened.
    """
    if not is_file_source(section.path):
        shards = (source or open_source(section, field)).shards
        # It depends on the builder, its revision and the split, and is equal in every process.
        tables = [getattr(shard.table, "_fingerprint", None) for shard in shards[:1]]
        return [section.path, section.config, section.split, tables]
    # By content, not by path: a run resumes with files that were moved.
    return [[file.name, _digest(file, field)] for file in _files_of(section, field)]


def _files_of(section: SourceSection, field: str) -> list[Path]:
    path = local_path(section.path)
    # Only files of the split that is read: held-out rows must not be taken for those of training.
    saved = is_saved_dataset(path)
    return sorted(_split_folder(path, field).rglob("*.arrow")) if saved else expand_files(section.path, field)


def glimpse(section: SourceSection, field: str) -> list[Any]:
    """Returns what identifies a source that is too large to read, without reading it."""
    if not is_file_source(section.path) or is_saved_dataset(local_path(section.path)):
        return [section.path, section.config, section.split]
    return [[file.name, file.stat().st_size] for file in expand_files(section.path, field)]


SAMPLES, SAMPLE_BYTES = 64, 2**16
"""Pieces of a streamed file that are read to recognise it, and their length. A file of up to 4 MiB is read whole."""


def sampled(section: SourceSection, field: str) -> list[Any]:
    """Returns digests of pieces of a streamed source's files, which differ from those of other content."""
    if not is_file_source(section.path):
        return [section.path, section.config, section.split]
    return [_digest(file, field, in_pieces=True) for file in _files_of(section, field)]


def _digest(path: Path, field: str, in_pieces: bool = False) -> str:
    """Returns a digest of a file's content, or of pieces of it."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            if not in_pieces:
                return hashlib.file_digest(file, "sha256").hexdigest()
            size = os.fstat(file.fileno()).st_size
            stride = max(SAMPLE_BYTES, size // SAMPLES)
            for start in range(0, size, stride):
                file.seek(start)
                digest.update(file.read(SAMPLE_BYTES))
            file.seek(max(0, size - SAMPLE_BYTES))
            digest.update(file.read(SAMPLE_BYTES))
    except OSError as error:
        raise unreadable(field, str(path), error) from error
    return digest.hexdigest()


def identify_rows(data: DataSection) -> list[Any]:
    """Returns what decides which rows are read to train on, and from which columns."""
    mapped = map_of(data)
    through = [] if mapped is None else [mapped.identity]
    return [[identify(source, "data.train") for source in data.train], data.columns_key(), *through]


def _columns_of_first_rows(shards: list[Shard], field: str, name: str) -> list[str]:
    """Returns the column names of the first rows; raises DataError if no row can be read."""
    found: list[set[str]] = []
    problems: dict[str, list[str]] = {}
    for row_name, row in itertools.islice(
        named_rows(shards, short_names(shard.path for shard in shards)), ROWS_LOOKED_AT
    ):
        if isinstance(row, RowProblem):
            problems.setdefault(str(row), []).append(row_name)
        else:
            found.append(set(row))
    if found:
        return sorted(set().union(*found))
    if not problems:
        raise DataError(f"{field}: {name!r} holds no rows; name another file")
    reasons = "; ".join(f"{why}: {len(rows):,} ({', '.join(rows[:3])})" for why, rows in problems.items())
    raise DataError(
        f"{field}: {name!r} cannot be read. {reasons}. Needed: UTF-8, and in a .jsonl file an object on each line"
    )


def named_rows(shards: list[Shard], names: dict[str, str]) -> Iterator[tuple[str, Row]]:
    """Yields every row with its name, such as `chat.jsonl:12`; `names` are those of the shards' paths."""
    for path, parts in itertools.groupby(shards, key=lambda shard: shard.path):
        for number, row in enumerate(itertools.chain.from_iterable(map(read, parts)), start=1):
            yield f"{names[path]}:{number}", row


def has_images(source: Source) -> bool:
    """Returns whether one of a source's first rows holds an image, in a column or in a part of a message."""
    return any(map(_holds_image, first_rows(source.shards)))


def first_rows(shards: list[Shard]) -> Iterator[dict[str, Any]]:
    """Yields the readable ones of a source's first rows."""
    rows = itertools.islice(itertools.chain.from_iterable(map(read, shards)), ROWS_LOOKED_AT)
    return (row for row in rows if not isinstance(row, RowProblem))


def _holds_image(row: dict[str, Any]) -> bool:
    if any(not is_empty(row.get(name)) for name in COLUMNS):
        return True
    messages = (message for value in row.values() if isinstance(value, list) for message in value)
    contents = (message.get("content") for message in messages if isinstance(message, dict))
    return any(is_image(part) for content in contents if isinstance(content, list) for part in content)


def short_names(paths: Iterable[str]) -> dict[str, str]:
    """Returns for each path the shortest ending that differs from those of all others."""
    parts = {path: Path(path).parts for path in paths}
    ends = Counter(whole[-count:] for whole in set(parts.values()) for count in range(1, len(whole) + 1))
    found = {}
    for path, whole in parts.items():
        told = next((count for count in range(1, len(whole)) if ends[whole[-count:]] == 1), len(whole))
        found[path] = str(Path(*whole[-told:]))
    return found


def _label_names(shards: list[Shard], field: str, name: str) -> dict[str, list[str]]:
    """Returns the names of the numbers of each column that has them in all files.

    Raises:
        DataError: if two files give a number different names.
    """
    of_files = {shard.path: _class_labels(shard.table) for shard in shards}
    found: dict[str, list[str]] = {}
    for column in dict.fromkeys(itertools.chain.from_iterable(of_files.values())):
        named = {path: names[column] for path, names in of_files.items() if column in names}
        first, *others = named
        if other := next((path for path in others if named[path] != named[first]), None):
            raise DataError(
                f"{field}: {name!r}: the numbers in column {column} mean {listed(named[first])} in {first!r} and "
                f"{listed(named[other])} in {other!r}; write the names in place of the numbers, or make them alike"
            )
        if len(named) == len(of_files):
            found[column] = named[first]
    return found


def _class_labels(table: Any) -> dict[str, list[str]]:
    features = getattr(table, "features", None)
    if not features:
        return {}
    import datasets

    kinds = {name: kind.feature if isinstance(kind, datasets.List) else kind for name, kind in features.items()}
    return {name: list(kind.names) for name, kind in kinds.items() if isinstance(kind, datasets.ClassLabel)}


def _is_kept(column: str, stored: list[Shard], mapped: list[Shard]) -> bool:
    """Returns whether the user's function keeps a column in the first rows; numbers that it makes have no names."""
    before, after = ([row.get(column) for row in first_rows(shards)] for shards in (stored, mapped))
    return before == after


# ---- from a source to shards ----


def _file_shards(source: str, field: str) -> list[Shard]:
    shards = []
    for path in expand_files(source, field):
        suffix = suffix_of(path, field)
        if suffix in TABLES:
            # `datasets` takes paths for patterns. With streaming it reads the file in place and makes no copy of it.
            files = [glob.escape(str(path))]
            table = _load_table(suffix[1:], field, source, data_files=files, split="train", streaming=True)
            shards.append(Shard("table", str(path), table=table))
        elif suffix in LINES or (suffix == ".json" and not _is_list(path, field)):
            shards += _line_shards(path)
        else:
            kind = {".json": "list", ".csv": "csv", ".tsv": "tsv", ".txt": "text", ".tar": "tar"}[suffix]
            shards.append(Shard(kind, str(path)))
    return shards


def _is_list(path: Path, field: str) -> bool:
    """Returns whether a JSON file is one list of rows, bare or under a key, and not a row on each line."""
    try:
        with opened(path) as file:
            start = file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")
    except Exception as error:  # the libraries that unpack files raise a great many kinds
        raise unreadable(field, str(path), error) from error
    return (
        start.startswith(b"[") or WRAPPED.match(start) is not None or start.partition(b"\n")[0].rstrip() in (b"{", b"")
    )


def _line_shards(path: Path) -> list[Shard]:
    # A compressed file cannot be read from its middle.
    if path.suffix in COMPRESSIONS:
        return [Shard("lines", str(path))]
    size = path.stat().st_size
    starts = range(0, size, SHARD_BYTES)
    return [Shard("lines", str(path), start, min(start + SHARD_BYTES, size)) for start in starts]


def _split_folder(path: Path, field: str) -> Path:
    """Returns the folder of a saved data set's rows: its own, or that of the split that a field reads."""
    return next((path / name for name in SPLITS_OF[field] if (path / name).is_dir()), path)


def _saved_shards(section: SourceSection, field: str) -> tuple[list[Shard], datasets.Dataset]:
    import datasets

    try:
        table = datasets.load_from_disk(str(local_path(section.path)))
    except IndexError as error:  # saved without a row, it has no file
        raise DataError(f"{field}: {section.path!r} holds no rows; name another folder") from error
    except Exception as error:
        raise unreadable(field, section.path, error) from error
    if isinstance(table, datasets.DatasetDict):
        names = SPLITS_OF[field]
        split = next((name for name in names if name in table), None)
        if split is None:
            raise DataError(
                f"{field}: {section.path!r} has no split {' or '.join(names)}; it has {', '.join(table)}. Name the "
                f"folder of one of them, for example {section.path}/{next(iter(table), 'train')}"
            )
        table = table[split]
    table = undecoded(table.with_format(None))  # a saved format would hide columns, or give tensors
    return _row_shards(section.path, table), table


def _hub_shards(section: SourceSection, field: str, streaming: bool) -> tuple[list[Shard], Any]:
    split = section.split or "train"
    table = _load_table(section.path, field, section.path, name=section.config, split=split, streaming=streaming)
    if streaming:
        return [Shard("table", section.path, table=table)], table
    return _row_shards(section.path, table), table


def _row_shards(path: str, table: datasets.Dataset) -> list[Shard]:
    starts = range(0, len(table), SHARD_ROWS)
    return [Shard("rows", path, start, min(start + SHARD_ROWS, len(table)), table) for start in starts]


def _load_table(builder: str, field: str, source: str, **settings: Any) -> Any:
    import datasets

    try:
        table = datasets.load_dataset(builder, **settings)
        return undecoded(table)
    except Exception as error:  # the libraries behind `datasets` raise a great many kinds
        raise unreadable(field, source, error) from error


def undecoded(table: Any) -> Any:
    """Returns the table with images in their stored form; they are decoded when they are needed."""
    import datasets

    features = dict(table.features or {})
    for name, kind in features.items():
        if isinstance(kind, datasets.Image):
            features[name] = datasets.Image(decode=False)
        elif isinstance(getattr(kind, "feature", None), datasets.Image):
            features[name] = datasets.List(datasets.Image(decode=False))
    return table if features == dict(table.features or {}) else table.cast(datasets.Features(features))
