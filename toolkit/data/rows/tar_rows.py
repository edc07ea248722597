"""Reads rows of tar files as WebDataset writes them: a row is the files of one name, `0001.json` and `0001.jpg`."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import IO, Any

from toolkit.data.rows.values import RowProblem

MEDIA = {
    "image": ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff"),
    "audio": ("wav", "mp3", "flac", "ogg", "opus", "m4a"),
    "video": ("mp4", "webm", "mov", "avi", "mkv"),
}
"""Column of a row -> the endings of its files."""

_COLUMN_OF = {ending: column for column, endings in MEDIA.items() for ending in endings}


def rows_of_tar(file: IO[bytes], max_bytes: int) -> Iterator[dict[str, Any] | RowProblem]:
    """Yields the rows of a tar file, in its order. Nothing is unpacked, and links and folders are skipped.

    The fields of a `.json` are the row's; a `.txt` is its `text`; an image, sound or video is its `image`, `audio` or
    `video`, as in `datasets`; any other file is a column named by its ending. Reference: webdataset's file format.

    Args:
        max_bytes: the most bytes of a member; a larger one makes its row a RowProblem.
    """
    name, members = "", dict[str, bytes | RowProblem]()
    with tarfile.open(fileobj=file, mode="r|") as tar:
        for member in tar:
            if not member.isfile():
                continue
            path = PurePosixPath(member.name)
            # Endings begin at the first dot of a name: `0001.cls.txt` belongs to row 0001.
            stem, _, ending = path.name.partition(".")
            key = str(path.parent / stem)
            if members and key != name:
                yield _row(members)
                members = {}
            name = key
            content: bytes | RowProblem = RowProblem(f"a file of more than {max_bytes // 2**20} MiB")
            if member.size <= max_bytes and (held := tar.extractfile(member)) is not None:
                content = held.read()
            members[ending.lower()] = content
    if members:
        yield _row(members)


def _row(members: dict[str, bytes | RowProblem]) -> dict[str, Any] | RowProblem:
    row: dict[str, Any] = {}
    for ending, content in members.items():
        if isinstance(content, RowProblem):
            return content
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
    if column is not None:
        return {column: {"bytes": content, "path": None}}
    return {ending: content}
