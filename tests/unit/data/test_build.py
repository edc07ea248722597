"""toolkit.data.build and sources: files to samples, kept by content, with every bad file named."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from toolkit.data import build, tokenizer
from toolkit.data.cache import kept
from toolkit.errors import DataError
from toolkit.recipe import DataSection

TEXTS = [f"line number {i} of the story about a fox and a king" for i in range(40)]


def section(tmp_path: Path, train: str | Path | list[str], **fields: Any) -> DataSection:
    source = [str(item) for item in train] if isinstance(train, list) else str(train)
    return DataSection(train=source, max_length=16, cache_dir=str(tmp_path / "cache"), **fields)


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def byte_pairs() -> Any:
    return tokenizer._train_byte_pairs(iter(TEXTS), 320)


def tokens_of(samples: datasets.Dataset) -> int:
    return sum(label != -100 for row in samples for label in row["labels"])


def test_all_file_kinds_give_the_same_samples(tmp_path: Path, byte_pairs: Any) -> None:
    rows = [{"text": text} for text in TEXTS]
    jsonl(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.DictWriter(file, ["text"]).writeheader()
        csv.DictWriter(file, ["text"]).writerows(rows)
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as packed:
        packed.write((tmp_path / "a.jsonl").read_text())
    found = [
        build.build(section(tmp_path, tmp_path / name), byte_pairs, seed=0).train[:]
        for name in ("a.jsonl", "a.json", "a.csv", "a.parquet", "a.jsonl.gz")
    ]
    assert all(other == found[0] for other in found)
    assert len(found[0]["input_ids"]) > 10


def test_a_text_file_is_one_document(tmp_path: Path, byte_pairs: Any) -> None:
    (tmp_path / "a.txt").write_text("\n".join(TEXTS))
    built = build.build(section(tmp_path, tmp_path / "a.txt"), byte_pairs, seed=0)
    assert built.report["train"]["read"] == 1
    expected = byte_pairs("\n".join(TEXTS))["input_ids"]
    assert tokens_of(built.train) == len(expected)  # the end-of-text token makes up for the first


def test_the_report_counts_rows_and_names_the_dropped(tmp_path: Path, byte_pairs: Any) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"text": "one two three"}, {"text": None}, {"text": " "}, {"text": "four"}])
    report = build.build(section(tmp_path, path), byte_pairs, seed=0).report["train"]
    assert (report["read"], report["kept"], report["num_dropped"]) == (4, 2, 2)
    assert report["dropped"] == {"null": [1], "empty": [2]}


def test_the_result_is_kept_by_content(tmp_path: Path, byte_pairs: Any) -> None:
    first = jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    folder = Path(build.build(section(tmp_path, first), byte_pairs, seed=0).train.cache_files[0]["filename"]).parent
    made = folder.stat().st_mtime_ns
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    (copy / "a.jsonl").write_bytes(first.read_bytes())
    same = build.build(section(tmp_path, copy / "a.jsonl"), byte_pairs, seed=0)
    assert Path(same.train.cache_files[0]["filename"]).parent == folder
    assert folder.stat().st_mtime_ns == made
    jsonl(first, [{"text": text} for text in TEXTS[1:]])
    other = build.build(section(tmp_path, first), byte_pairs, seed=0)
    assert Path(other.train.cache_files[0]["filename"]).parent != folder


def test_held_out_rows_are_chosen_by_the_seed_and_not_trained_on(tmp_path: Path, byte_pairs: Any) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    data = section(tmp_path, path, validation_fraction=0.25)
    built = build.build(data, byte_pairs, seed=0)
    assert (built.report["train"]["read"], built.report["validation"]["read"]) == (30, 10)
    assert built.validation is not None
    again = build.build(data, byte_pairs, seed=1)
    assert again.validation is not None
    assert again.validation[:] != built.validation[:]


def test_a_trained_tokenizer_is_kept_and_restores_text(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    folder = tokenizer.train(section(tmp_path, path), 300, seed=0)
    assert tokenizer.train(section(tmp_path, path), 300, seed=0) == folder
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder)
    text = "A fox, a king: né à Paris, 東京 \U0001f98a"
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert loaded.eos_token_id is not None


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "there is no file"),
        ("a.jsonl", b"", "is empty"),
        ("a.jsonl", b'{"other": "x"}\n', "no column 'text'; it has other. Set data.text_column"),
        ("a.jsonl", b"this is no JSON\n", "cannot be read"),
        ("a.jsonl", b'{"text": "half a li', "cannot be read"),
        ("a.jsonl", b"\xff\xfe\x00\x01binary\x00", "cannot be read"),
        ("a.parquet", b"not parquet", "cannot be read"),
        ("a.jsonl", b'{"text": ""}\n{"text": null}\n', "none of its 2 rows"),
        ("a.bin", b"x", "of no known kind; allowed endings: .jsonl"),
    ],
)
def test_bad_files(tmp_path: Path, byte_pairs: Any, name: str, content: bytes | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        build.build(section(tmp_path, f"{tmp_path}/{name}"), byte_pairs, seed=0)
    assert str(caught.value).startswith("data")
    assert not list((tmp_path / "cache").glob("text-*"))
    assert not list((tmp_path / "cache").glob(".unfinished*"))


def test_a_folder_is_no_file(tmp_path: Path, byte_pairs: Any) -> None:
    with pytest.raises(DataError, match=r"is a folder; name files"):
        build.build(section(tmp_path, f"{tmp_path}/"), byte_pairs, seed=0)


def test_a_single_row_cannot_be_held_out(tmp_path: Path, byte_pairs: Any) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"text": "one"}])
    with pytest.raises(DataError, match="single row"):
        build.build(section(tmp_path, path, validation_fraction=0.5), byte_pairs, seed=0)


def test_nothing_half_written_is_ever_kept(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "part").write_text("x")
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError):
        kept(tmp_path / "key", fail)
    assert list(tmp_path.iterdir()) == []
