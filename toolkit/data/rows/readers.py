"""Reads the rows of a shard.

A row that cannot be read (half a line, bytes that are not text) becomes a `RowProblem`, so that one bad
row neither ends a run nor shifts the numbers of the others. Memory holds a few rows, however large the
file is.
"""

from __future__ import annotations

import csv
import json
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any

import fsspec

from toolkit.data.rows.hub_refusals import DATA_SET, hub_error
from toolkit.data.rows.values import RowProblem, listed, type_of
from toolkit.errors import BadInputError, DataError, ToolkitError, first_line
from toolkit.user_function import UserFunction, seeded_by, shown

if TYPE_CHECKING:
    import datasets

Row = dict[str, Any] | RowProblem

MAX_FIELD_BYTES = 64 * 2**20
"""The longest field of a CSV file. After a quote that is never closed the rest of the file would be one."""

MAPPED_ROWS = 100
"""Rows that a user's function maps in one fence."""

WRAPPERS = ("data", "rows", "examples")
"""Keys under which a JSON file may hold its list of rows."""

BLANK = "blank line"
"""Why a blank line is no row. It is counted, and is no sign that a file is damaged."""

JOINED_ROWS = "a record of several lines, each with as many fields as the header: a stray quote joins rows"


@dataclass(frozen=True)
class Shard:
    """A part of a source.

    Attributes:
        kind: `lines`, `list`, `csv`, `tsv`, `text` or `tar` for a file; `table` for parquet or arrow; `rows` for rows
            of `table`.
        path: the file; if the kind is `rows`, a name for messages.
        start: first byte of a piece of lines, or first row.
        stop: the end, or None for the end of the file.
        table: an opened data set.
        map: a user's function that makes each row from the row that is stored, or None.
    """

    kind: str
    path: str
    start: int = 0
    stop: int | None = None
    table: datasets.Dataset | datasets.IterableDataset | None = None
    map: UserFunction | None = None


def read(shard: Shard) -> Iterator[Row]:
    """Yields the rows of a shard, in order; every line of a file of lines is a row, even a blank one.

    Raises:
        DataError: if the rest of the file cannot be read.
        BadInputError: if the function that maps rows fails, or returns no row.
    """
    rows = stored_in(shard)
    if shard.kind == "lines":
        rows = (row_of_line(line, shard.start == 0 and number == 0) for number, line in enumerate(rows))
    yield from rows if shard.map is None else mapped(rows, shard.map, shard)


def stored_in(shard: Shard) -> Iterator[Any]:
    """Yields the rows of a shard before the user's function: of a file of lines each line, for `row_of_line`.

    Raises:
        DataError: if the rest of the file cannot be read.
    """
    try:
        yield from _READERS[shard.kind](shard)
    except ToolkitError:
        raise
    except Exception as error:  # the libraries that read files raise many types
        raise unreadable("data", shard.path, error) from error


def mapped(rows: Iterator[Row], function: UserFunction, shard: Shard, before: int = 0) -> Iterator[Row]:
    """Yields the row that a function makes of each row; one that could not be read stays what it is.

    Args:
        before: number of rows of the shard that come before these, for errors.
    """
    name, first = Path(shard.path).name, 1 + before
    if shard.kind == "rows":
        first += shard.start
    elif shard.start:  # a piece of a file of lines, of whose first line only the byte is known
        name += f" from byte {shard.start:,}"
    numbered = ((f"{name}:{number}", row) for number, row in enumerate(rows, start=first))
    while batch := list(islice(numbered, MAPPED_ROWS)):
        stored = [(where, row) for where, row in batch if not isinstance(row, RowProblem)]
        calls = [partial(seeded_by, where, function.function, row) for where, row in stored]
        made = iter(function.call_each([where for where, _ in stored], calls))
        for where, row in batch:
            yield row if isinstance(row, RowProblem) else _require_row(next(made), function, where)


def _require_row(made: Any, function: UserFunction, where: str) -> Row:
    if isinstance(made, dict) and all(isinstance(name, str) for name in made):
        return made
    raise BadInputError(
        f"{function.field}: {function.name} returned {shown(made)} for {where}; needs a row: a dict whose keys are the "
        "names of columns"
    )


def opened(path: str | Path) -> IO[bytes]:
    """Opens a file for its bytes, decompressed if its name says so."""
    return fsspec.open(str(path), "rb", compression="infer").open()  # type: ignore[no-any-return]


def unreadable(field: str, path: str, error: Exception) -> ToolkitError:
    """Returns the error for a file or data set that a library could not read."""
    refused = hub_error(error, field, path, DATA_SET)
    if refused is not None:
        return refused
    why = first_line(error.__cause__ or error).removesuffix(".")
    return DataError(f"{field}: {path!r} cannot be read: {why}; name another, or make it again")


def _read_lines(shard: Shard) -> Iterator[bytes]:
    """Yields each line that starts in the shard."""
    # `datasets`' JSON reader would end at the first line that is not JSON, and unify the types of all rows, which
    # fills tools and messages with nulls.
    with opened(shard.path) as file:
        if shard.start > 0:
            # Start one byte earlier, so that a line that begins exactly here is not skipped.
            file.seek(shard.start - 1)
            file.readline()
        # A compressed file is one shard without an end, so its position is not needed.
        position = file.tell() if shard.stop is not None else 0
        while (shard.stop is None or position < shard.stop) and (line := file.readline()):
            position += len(line)
            yield line


def row_of_line(line: bytes, at_start: bool) -> Row:
    """Returns the row of a line; `at_start` says whether it is a file's first one."""
    try:
        # A byte-order mark is allowed only at the start of a file, and json refuses it.
        text = line.decode("utf-8-sig" if at_start else "utf-8").strip()
    except UnicodeDecodeError:
        return RowProblem("not UTF-8")
    if not text:
        return RowProblem(BLANK)
    try:
        return _as_row(json.loads(text))
    except json.JSONDecodeError:
        return RowProblem("not JSON")
    except (ValueError, RecursionError):  # Python reads whole numbers of up to 4300 digits
        return RowProblem("JSON nested too deeply, or with a number that is too long")


def _as_row(value: Any) -> Row:
    return value if isinstance(value, dict) else RowProblem(f"{type_of(value)}, not a JSON object")


def _read_list(shard: Shard) -> Iterator[Row]:
    """Yields the values of a JSON file's list, bare or under one of `WRAPPERS`."""
    try:
        value = json.loads(_whole_text(shard.path))
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise DataError(f"data: {shard.path!r} is not JSON: {error.msg} ({place}); correct it there") from error
    except (ValueError, RecursionError) as error:  # Python reads whole numbers of up to 4300 digits
        raise DataError(
            f"data: {shard.path!r} is not JSON: nested too deeply, or with a number that is too long; correct it"
        ) from error
    yield from map(_as_row, _list_in(value, shard.path))


def _list_in(value: Any, path: str) -> list[Any]:
    if isinstance(value, list):
        return value
    if not isinstance(value, dict):
        raise DataError(f"data: {path!r} is neither a list of objects nor an object on each line; write one of them")
    found = [key for key in value if key in WRAPPERS and isinstance(value[key], list)]
    if len(found) > 1:
        raise DataError(f"data: {path!r} holds two lists, {found[0]} and {found[1]}; leave one of them")
    if not found:
        raise DataError(
            f"data: {path!r} holds one object with the keys {listed(list(value))}; allowed: a list of objects, bare or "
            f"under one of {', '.join(WRAPPERS)}, or an object on each line"
        )
    return value[found[0]]  # type: ignore[no-any-return]


def _whole_text(path: str) -> str:
    with opened(path) as file:
        content = file.read()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"data: {path!r} is not UTF-8 (byte {error.start}); save it as UTF-8") from error


def _read_csv(shard: Shard) -> Iterator[Row]:
    """Yields a row for each record of a file with comma-separated values, or with tabs if the kind is `tsv`."""
    # csv's own limit of 131,072 characters would refuse long texts.
    csv.field_size_limit(MAX_FIELD_BYTES)
    # Bytes that are not UTF-8 become surrogates, so that only their row is lost. csv wants line breaks untouched.
    with fsspec.open(
        shard.path, "rt", compression="infer", encoding="utf-8-sig", errors="surrogateescape", newline=""
    ).open() as file:
        lines: list[str] = []  # of one record

        def taken() -> Iterator[str]:
            for line in file:
                lines.append(line)
                yield line

        records = csv.reader(taken(), strict=True, delimiter="\t" if shard.kind == "tsv" else ",")
        header = _csv_header(next(records, []), shard.path)
        while True:
            lines.clear()
            try:
                fields = next(records)
            except StopIteration:
                return
            except csv.Error as error:
                # A stray quote takes up rows: each of its lines counts as one that cannot be read.
                yield from [RowProblem(f"not CSV: {error}")] * len(lines)
                continue
            if len(fields) == len(header) and _are_rows(lines, len(header), records.dialect.delimiter):
                yield from [RowProblem(JOINED_ROWS)] * len(lines)
                continue
            # Inner lines of a record are never rows, even if one of them has the right number of fields.
            yield _csv_row(header, fields, len(lines))


def _are_rows(lines: list[str], num_columns: int, delimiter: str) -> bool:
    """Returns whether each line of a record would be a row itself: a stray quote and its end may join them.

    Two lines of two columns do not count, because the second may be a text with one comma.
    """
    if len(lines) < 2 or num_columns + len(lines) < 5 or num_columns < 2:
        return False
    return all(line.count(delimiter) == num_columns - 1 for line in lines)


def _csv_header(header: list[str], path: str) -> list[str]:
    if any(_has_surrogate(column) for column in header):
        raise DataError(f"data: {path!r} is not UTF-8; save it as UTF-8")
    if len(set(header)) < len(header):
        raise DataError(f"data: {path!r}: a column appears twice in the header: {listed(header)}; rename one")
    return header


def _csv_row(header: list[str], fields: list[str], num_lines: int) -> Row:
    if not fields:
        return RowProblem(BLANK)
    if len(fields) != len(header):
        # A stray quote that a later one closes takes up the rows between them; the error says where to look.
        several = ", in a record of several lines" if num_lines > 1 else ""
        return RowProblem(f"the number of fields differs from the header's{several}")
    if any(_has_surrogate(field) for field in fields):
        return RowProblem("not UTF-8")
    return dict(zip(header, fields, strict=True))


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= letter <= "\udfff" for letter in text) if not text.isascii() else False


def _read_text(shard: Shard) -> Iterator[Row]:
    """Yields one row, because a text file is one document."""
    yield {"text": _whole_text(shard.path)}


def _read_tar(shard: Shard) -> Iterator[Row]:
    with opened(shard.path) as file:
        yield from rows_of_tar(file)


def _read_table(shard: Shard) -> Iterator[Row]:
    assert shard.table is not None
    kinds = shard.table.features or {}
    yield from (_without_filled_nulls(row, kinds) for row in shard.table)


def _read_rows(shard: Shard) -> Iterator[Row]:
    table: Any = shard.table
    for number in range(shard.start, shard.stop or 0, 100):
        columns = table[number : min(number + 100, shard.stop or 0)]
        for values in zip(*columns.values(), strict=True):
            yield _without_filled_nulls(dict(zip(columns, values, strict=True)), table.features)


def _without_filled_nulls(row: dict[str, Any], kinds: Mapping[str, Any]) -> Row:
    """Returns a table's row without the nulls in its objects, which share one type and so have each other's keys.

    Args:
        kinds: the type of each column. Objects of the type `Json` have their own keys, and keep their nulls.
    """
    return {column: _without_nulls(value, kinds.get(column)) for column, value in row.items()}


@cache
def _free_type() -> Any:
    """Returns the type of `datasets` whose objects have keys of their own; () in versions without one, such as 4.0."""
    import datasets

    return getattr(datasets, "Json", ())


def _without_nulls(value: Any, kind: Any) -> Any:
    if isinstance(kind, _free_type()):
        return value
    if isinstance(value, dict):
        kinds = kind if isinstance(kind, dict) else {}
        return {key: _without_nulls(held, kinds.get(key)) for key, held in value.items() if held is not None}
    of_item = getattr(kind, "feature", kind[0] if isinstance(kind, list) and kind else None)
    return [_without_nulls(item, of_item) for item in value] if isinstance(value, list) else value


_READERS = {
    "lines": _read_lines,
    "list": _read_list,
    "csv": _read_csv,
    "tsv": _read_csv,
    "text": _read_text,
    "tar": _read_tar,
    "table": _read_table,
    "rows": _read_rows,
}

# ---- Rows of tar files as WebDataset writes them: a row is the files of one name, `0001.json` and `0001.jpg` ----

MEDIA = {
    "image": ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff"),
    "audio": ("wav", "mp3", "flac", "ogg", "opus", "m4a"),
    "video": ("mp4", "webm", "mov", "avi", "mkv"),
}
"""Column of a row -> the endings of its files."""

_COLUMN_OF = {ending: column for column, endings in MEDIA.items() for ending in endings}


def rows_of_tar(file: IO[bytes]) -> Iterator[Row]:
    """Yields the rows of a tar file, in its order. Nothing is unpacked, and links and folders are skipped.

    The fields of a `.json` are the row's; a `.txt` is its `text`; an image, sound or video is its `image`, `audio` or
    `video`, as in `datasets`; any other file is a column named by its ending. Reference: webdataset's file format.
    """
    name, members = "", dict[str, bytes]()
    with tarfile.open(fileobj=file, mode="r|") as tar:
        for member in tar:
            if not member.isfile() or (content := tar.extractfile(member)) is None:
                continue
            path = PurePosixPath(member.name)
            # Endings begin at the first dot of a name: `0001.cls.txt` belongs to row 0001.
            stem, _, ending = path.name.partition(".")
            key = str(path.parent / stem)
            if members and key != name:
                yield _row(members)
                members = {}
            name = key
            members[ending.lower()] = content.read()
    if members:
        yield _row(members)


def _row(members: dict[str, bytes]) -> Row:
    row: dict[str, Any] = {}
    for ending, content in members.items():
        try:
            columns = _columns(ending, content)
        except (UnicodeDecodeError, ValueError, RecursionError):
            return RowProblem(f"its .{ending} is not {'JSON' if ending == 'json' else 'UTF-8'}")
        if isinstance(columns, RowProblem):
            return columns
        if twice := sorted(row.keys() & columns.keys()):
            return RowProblem(f"two files of its name give the column {twice[0]!r}")
        row |= columns
    return row


def _columns(ending: str, content: bytes) -> dict[str, Any] | RowProblem:
    if ending == "json":
        fields = json.loads(content)
        return fields if isinstance(fields, dict) else RowProblem("its .json is not a JSON object")
    if ending == "txt":
        return {"text": content.decode("utf-8-sig")}
    column = _COLUMN_OF.get(ending)
    return {column: {"bytes": content, "path": None}} if column is not None else {ending: content}
