"""Tar files of rows, as WebDataset writes them."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from support.texts import make_texts, write_rows

from toolkit.data import build
from toolkit.data.rows.readers import Shard, read
from toolkit.data.tokens.tokenizer import _train_byte_pairs
from toolkit.errors import DataError
from toolkit.recipe.schema import DataSection

MESSAGES = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "so"}]


def tar_file(path: Path, members: list[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return path


def rows(path: Path) -> list[Any]:
    return list(read(Shard("tar", str(path))))


@pytest.mark.parametrize(
    ("members", "row"),
    [
        ([("0.json", b'{"messages": [1], "id": 7}')], {"messages": [1], "id": 7}),
        ([("a/0.txt", "fünf".encode())], {"text": "fünf"}),
        ([("0.txt", b"so"), ("0.cls", b"3")], {"text": "so", "cls": b"3"}),
        ([("0.JPG", b"\xff\xd8"), ("0.json", b"{}")], {"image": {"bytes": b"\xff\xd8", "path": None}}),
        ([("0.json", b"[1]")], "its .json is not a JSON object"),
        ([("0.json", b"{")], "its .json is not JSON"),
        ([("0.txt", b"\xff")], "its .txt is not UTF-8"),
        ([("0.txt", b"a"), ("0.json", b'{"text": "b"}')], "two files of its name give the column 'text'"),
        ([("0.png", b"a"), ("0.jpg", b"b")], "two files of its name give the column 'image'"),
    ],
)
def test_a_row_is_the_files_of_one_name(tmp_path: Path, members: list[tuple[str, bytes]], row: Any) -> None:
    other = ("1.txt", b"next")
    found = rows(tar_file(tmp_path / "a.tar", [*members, other]))
    assert len(found) == 2
    assert (found[0] if isinstance(row, dict) else str(found[0])) == row
    assert found[1] == {"text": "next"}


def test_names_of_one_stem_in_two_folders_are_two_rows(tmp_path: Path) -> None:
    assert rows(tar_file(tmp_path / "a.tar", [("a/0.txt", b"x"), ("b/0.txt", b"y")])) == [{"text": "x"}, {"text": "y"}]


def test_links_and_folders_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for name, kind in (("a", tarfile.DIRTYPE), ("0.txt", tarfile.SYMTYPE), ("1.txt", tarfile.LNKTYPE)):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, "/etc/passwd"
            tar.addfile(entry)
    assert rows(path) == []


@pytest.mark.parametrize("ending", ["tar", "tar.gz"])
def test_its_samples_are_those_of_the_same_rows_in_lines(tmp_path: Path, ending: str) -> None:
    texts = make_texts(30)
    tokens = _train_byte_pairs(iter(texts), 300)
    plain = tar_file(tmp_path / "a.tar", [(f"{i}.json", json.dumps({"text": t}).encode()) for i, t in enumerate(texts)])
    if ending == "tar.gz":
        (tmp_path / "b.tar.gz").write_bytes(gzip.compress(plain.read_bytes()))
    lines = write_rows(tmp_path / "c.jsonl", ({"text": t} for t in texts))

    def samples(path: Path, **settings: Any) -> list[list[int]]:
        data = DataSection(
            train=[str(path)],  # type: ignore[list-item]
            max_length=32,
            cache_dir=str(tmp_path / "cache"),
            **settings,
        )
        found = build.build(data, tokens, seed=0)
        return [found.train.batch([i])["input_ids"].tolist() for i in range(len(found.train))]

    path = tmp_path / ("b.tar.gz" if ending == "tar.gz" else "a.tar")
    assert samples(path) == samples(lines)
    assert samples(path, streaming=True) == samples(lines, streaming=True)


@pytest.mark.parametrize("content", [b"no tar", b"\0" * 512, b"\x1f\x8b" + b"a" * 600])
def test_what_is_no_tar_is_an_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.tar"):
        build.build(
            DataSection(train=[str(tmp_path / "a.tar")], max_length=32, cache_dir=str(tmp_path / "cache")),  # type: ignore[list-item]
            _train_byte_pairs(iter(["a"]), 300),
            seed=0,
        )
