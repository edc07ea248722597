"""Files that unpack to more than the memory: told within bounds of memory."""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from toolkit.data.rows import json_list, readers
from toolkit.data.rows.json_list import values_of
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
    monkeypatch.setattr(json_list, "CHUNK_BYTES", 2**16)


@pytest.mark.usefixtures("small_rows")
@pytest.mark.parametrize("start", [b'[{"text": "', b'{"version": "', b'{"data": [{}, "', b"[1"])
def test_a_value_that_unpacks_to_more_than_a_row_may_hold(tmp_path: Path, start: bytes) -> None:
    path = packed(tmp_path / "bomb.json.gz", start, *[b"1" * MIB] * 30)
    told, peak = peak_of(lambda: refusal(Shard("list", str(path))))
    assert str(path) in told
    assert ("more than 1 MiB" in told) or (start == b"[1" and "a number that is too long" in told)
    assert peak < 12 * MIB


@pytest.mark.usefixtures("small_rows")
def test_a_list_larger_than_memory_is_read_row_by_row(tmp_path: Path) -> None:
    row = json.dumps({"text": "a king " * 1000}).encode()
    path = packed(tmp_path / "list.json.gz", b"[" + row, *[b"," + row] * 2000, b" " * 20 * MIB + b"]")
    number, peak = peak_of(lambda: sum(1 for _ in read(Shard("list", str(path)))))
    assert number == 2001
    assert peak < 8 * MIB


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


def values_in_pieces(content: bytes, monkeypatch: pytest.MonkeyPatch, size: int, folder: Path) -> Any:
    monkeypatch.setattr(json_list, "CHUNK_BYTES", size)
    (folder / "a.json").write_bytes(content)
    with (folder / "a.json").open("rb") as file:
        return list(values_of(file, "a.json", MIB))


def any_value(chance: random.Random, depth: int) -> Any:
    leaves = [None, True, False, -0.0, 1e-30, 12345678901234567890, 3.25, "", 'é"\\\n\U0001f98a', [], {}]
    if depth == 0 or chance.random() < 0.4:
        return chance.choice(leaves)
    if chance.random() < 0.5:
        return [any_value(chance, depth - 1) for _ in range(chance.randrange(4))]
    return {f"k{number}": any_value(chance, depth - 1) for number in range(chance.randrange(4))}


@pytest.mark.parametrize("size", [1, 7, 2**20])
def test_values_are_what_json_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    chance = random.Random(size)
    for number in range(60):
        values = [any_value(chance, 3) for _ in range(chance.randrange(5))]
        indent = chance.choice([None, 2])
        wrapped: Any = values if number % 2 else {"version": any_value(chance, 2), "rows": values, "end": 1}
        content = json.dumps(wrapped, indent=indent, ensure_ascii=chance.random() < 0.5).encode()
        assert values_in_pieces(content, monkeypatch, size, tmp_path) == values


@pytest.mark.parametrize("size", [1, 2**20])
def test_what_json_refuses_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    whole = json.dumps({"a": [1, {"b": None}], "data": [{"text": "é"}, 2.5, True], "z": "end"}).encode()
    wrong = [whole[:end] for end in range(1, len(whole))]
    wrong += [b"[1,]", b"[1 2]", b"[,1]", b"[1]]", b"[1] x", b"[01]", b"[1.]", b"[tru]", b'{"data": [1],}', b"{,}"]
    wrong += [b"{data: [1]}", b"['a']", b'["\n"]', b'["\\x"]', b"", b" ", b'{"data" [1]}', b"{1: 2}", b"[1}"]
    for content in wrong:
        with pytest.raises(DataError, match=r"is not (JSON|UTF-8)"):
            values_in_pieces(content, monkeypatch, size, tmp_path)
    with pytest.raises(DataError, match="holds two lists, rows and data"):
        values_in_pieces(b'{"rows": [1], "data": [2]}', monkeypatch, size, tmp_path)
