"""Files that unpack to more than the memory: told within bounds of memory."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from toolkit.data.rows import readers
from toolkit.data.rows.readers import Shard, read
from toolkit.data.rows.values import RowProblem
from toolkit.errors import DataError

MIB = 2**20


def peak_of(action: Any) -> tuple[Any, int]:
    """What `action()` gives, and the most bytes that it held."""
    tracemalloc.start()
    try:
        return action(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def packed(path: Path, *parts: bytes) -> Path:
    with gzip.open(path, "wb", compresslevel=1) as file:
        for part in parts:
            file.write(part)
    return path


def refusal(shard: Shard) -> str:
    with pytest.raises(DataError) as caught:
        list(read(shard))
    return str(caught.value)


@pytest.fixture
def small_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MAX_ROW_BYTES", MIB)
    monkeypatch.setattr(readers, "MAX_TEXT_BYTES", MIB)
    monkeypatch.setattr(readers, "MAX_LIST_BYTES", MIB)


@pytest.mark.usefixtures("small_rows")
def test_a_list_that_unpacks_to_more_than_is_read(tmp_path: Path) -> None:
    path = packed(tmp_path / "bomb.json.gz", b'[{"text": "', *[b"1" * MIB] * 30)
    told, peak = peak_of(lambda: refusal(Shard("list", str(path))))
    assert told == f"data: {str(path)!r} is a list of more than 1 MiB; write an object on each line (.jsonl)"
    assert peak < 12 * MIB


@pytest.mark.usefixtures("small_rows")
@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_an_endless_line_of_csv_is_one_bad_row(tmp_path: Path, kind: str) -> None:
    path = packed(tmp_path / f"a.{kind}.gz", b"text\nfirst\n", *[b"a" * MIB] * 30, b"\nthird\n", b'"fourth\nrow"\n')
    rows, peak = peak_of(lambda: list(read(Shard(kind, str(path)))))
    assert [row if isinstance(row, dict) else str(row) for row in rows] == [
        {"text": "first"},
        "a line of more than 1 MiB",
        {"text": "third"},
        {"text": "fourth\nrow"},
    ]
    assert isinstance(rows[1], RowProblem)
    assert peak < 16 * MIB


@pytest.mark.usefixtures("small_rows")
@pytest.mark.parametrize(("kind", "words"), [("csv", "a line of more than 1 MiB"), ("text", "more than 1 MiB")])
def test_an_endless_header_and_an_endless_text(tmp_path: Path, kind: str, words: str) -> None:
    path = packed(tmp_path / "a.gz", *[b"a" * MIB] * 30)
    told, peak = peak_of(lambda: refusal(Shard(kind, str(path))))
    assert words in told
    assert str(path) in told
    assert peak < 12 * MIB


def values_in(content: bytes, folder: Path) -> list[Any]:
    (folder / "a.json").write_bytes(content)
    return list(read(Shard("list", str(folder / "a.json"))))


def test_a_list_may_stand_under_a_key(tmp_path: Path) -> None:
    rows = [{"text": "é"}, {"text": 'a "king"', "tags": [1.5, None, {"b": True}]}]
    for value in (rows, {"version": [1], "rows": rows, "end": 1}):
        assert values_in(json.dumps(value, indent=2, ensure_ascii=False).encode(), tmp_path) == rows
    assert [str(row) for row in values_in(b"[2.5, null]", tmp_path)] == [
        "a number, not a JSON object",
        "null, not a JSON object",
    ]
    with pytest.raises(DataError, match="holds two lists, rows and data"):
        values_in(b'{"rows": [1], "data": [2]}', tmp_path)
    with pytest.raises(DataError, match=r"is not JSON: Expecting value \(line 2, column 2\); correct it there"):
        values_in(b'[{"a": 1},\n x]', tmp_path)
    for content in (b'[{"text": "\xe9"}]', b'{"data": [1],}', b"[1] x", b"", b"[" * 100_000):
        with pytest.raises(DataError, match=r"is not (JSON|UTF-8)"):
            values_in(content, tmp_path)
