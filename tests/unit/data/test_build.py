"""toolkit.data.build and sources: files to samples, kept by content, with every bad file named."""

from __future__ import annotations

import csv
import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from toolkit.data import build, sources, tokenizer
from toolkit.data.cache import kept
from toolkit.errors import DataError
from toolkit.recipe import DataSection, SourceSection

TEXTS = [f"line number {i} of the story about a fox and a king" for i in range(40)]


def section(tmp_path: Path, train: str | Path | list[str], **fields: Any) -> DataSection:
    source = [str(item) for item in train] if isinstance(train, list) else str(train)
    values = {"train": source, "max_length": 16, "cache_dir": str(tmp_path / "cache"), **fields}
    return DataSection.model_validate(values)


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def byte_pairs() -> Any:
    return tokenizer._train_byte_pairs(iter(TEXTS), 320)


def rows_of(samples: Any) -> list[list[list[int]]]:
    """Every sample's ids, labels and positions."""
    batch = samples.batch(range(len(samples)))
    return torch.stack([batch[name] for name in ("input_ids", "labels", "position_ids")], dim=1).tolist()


def tokens_of(samples: Any) -> int:
    return int((samples.batch(range(len(samples)))["labels"] != -100).sum())


def test_all_file_kinds_give_the_same_samples(tmp_path: Path, byte_pairs: Any) -> None:
    rows = [{"text": text} for text in TEXTS]
    jsonl(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "lines.json").write_text((tmp_path / "a.jsonl").read_text())
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.DictWriter(file, ["text"]).writeheader()
        csv.DictWriter(file, ["text"]).writerows(rows)
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "a.parquet")
    table.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": table}).save_to_disk(tmp_path / "splits")
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as packed:
        packed.write((tmp_path / "a.jsonl").read_text())
    shutil.copy(next((tmp_path / "saved").glob("*.arrow")), tmp_path / "a.arrow")
    names = ("a.jsonl", "a.json", "lines.json", "a.csv", "a.parquet", "a.jsonl.gz", "saved", "splits", "a.arrow")
    found = [rows_of(build.build(section(tmp_path, tmp_path / name), byte_pairs, seed=0).train) for name in names]
    assert all(other == found[0] for other in found)
    assert len(found[0]) > 10


def test_tokenised_in_several_processes_the_rows_are_the_same(
    tmp_path: Path, byte_pairs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "SHARD_BYTES", 700)
    lines = [json.dumps({"text": text}) for text in TEXTS]
    lines[7] = lines[30] = "no row"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    found = []
    for number, num_proc in enumerate((1, 3)):
        data = section(tmp_path, tmp_path / "a.jsonl", num_proc=num_proc)
        data = data.model_copy(update={"cache_dir": str(tmp_path / f"cache-{number}")})
        built = build.build(data, byte_pairs, seed=0)
        assert built.report["train"]["dropped"] == {"not JSON": {"count": 2, "rows": ["a.jsonl:8", "a.jsonl:31"]}}
        found.append(rows_of(built.train))
    assert found[0] == found[1]
    assert len(open_shards(tmp_path / "a.jsonl")) > 3


def open_shards(path: Path) -> list[Any]:
    return sources.open_source(SourceSection(path=str(path)), "data.train").shards


def test_a_text_file_is_one_document(tmp_path: Path, byte_pairs: Any) -> None:
    (tmp_path / "a.txt").write_text("\n".join(TEXTS))
    built = build.build(section(tmp_path, tmp_path / "a.txt"), byte_pairs, seed=0)
    assert built.report["train"]["read"] == 1
    expected = byte_pairs("\n".join(TEXTS))["input_ids"]
    assert tokens_of(built.train) == len(expected)  # the end-of-text token makes up for the first
    assert built.report["long_rows"] == "split"


def test_the_report_counts_rows_and_names_the_dropped(tmp_path: Path, byte_pairs: Any) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"text": "one two three"}, {"text": None}, {"text": " "}, {"text": "four"}])
    report = build.build(section(tmp_path, path), byte_pairs, seed=0).report["train"]
    assert (report["read"], report["kept"], report["num_dropped"]) == (4, 2, 2)
    assert report["dropped"] == {
        "text is missing or null": {"count": 1, "rows": ["a.jsonl:2"]},
        "text is empty": {"count": 1, "rows": ["a.jsonl:3"]},
    }


def test_the_result_is_kept_by_content(tmp_path: Path, byte_pairs: Any) -> None:
    first = jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    built = build.build(section(tmp_path, first), byte_pairs, seed=0)
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    assert len(made) == 2, "tokens and samples"
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    (copy / "a.jsonl").write_bytes(first.read_bytes())
    same = build.build(section(tmp_path, copy / "a.jsonl"), byte_pairs, seed=0)
    assert same.fingerprint == built.fingerprint
    longer = section(tmp_path, first).model_copy(update={"max_length": 24})
    assert build.build(longer, byte_pairs, seed=0).fingerprint != built.fingerprint
    kept_tokens = {path for path in (tmp_path / "cache").iterdir() if path.name.startswith("documents")}
    assert len(kept_tokens) == 1, "another length needs no tokenising"
    assert {path: path.stat().st_mtime_ns for path in made} == made
    jsonl(first, [{"text": text} for text in TEXTS[1:]])
    assert build.build(section(tmp_path, first), byte_pairs, seed=0).fingerprint != built.fingerprint


def test_held_out_rows_are_chosen_by_the_seed_and_not_trained_on(tmp_path: Path, byte_pairs: Any) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    data = section(tmp_path, path, validation_fraction=0.25)
    built = build.build(data, byte_pairs, seed=0)
    assert (built.report["train"]["read"], built.report["validation"]["read"]) == (30, 10)
    assert built.validation is not None
    again = build.build(data, byte_pairs, seed=1)
    assert again.validation is not None
    assert rows_of(again.validation) != rows_of(built.validation)
    held = {tuple(document) for i in range(len(built.validation)) for document in built.validation.documents(i)}
    trained = {tuple(document) for i in range(len(built.train)) for document in built.train.documents(i)}
    assert len(held) == 10
    assert not held & trained


def test_a_trained_tokenizer_is_kept_and_restores_text(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    folder = tokenizer.train(section(tmp_path, path), 300)
    assert tokenizer.train(section(tmp_path, path), 300) == folder
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
        ("a.jsonl", b'{"other": "x"}\n', "is laid out in no known way; it has other; needed: messages; prompt"),
        ("a.jsonl", b"this is no JSON\n", "it has no columns"),
        ("a.parquet", b"not parquet", "cannot be read"),
        ("a.jsonl", b'{"text": ""}\n{"text": null}\n', r"none of its 2 rows .* text is empty: 1 \(a.jsonl:1\)"),
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
    assert not list((tmp_path / "cache").glob("samples-*"))
    assert not list((tmp_path / "cache").glob(".unfinished*"))


def test_a_folder_is_no_file(tmp_path: Path, byte_pairs: Any) -> None:
    with pytest.raises(DataError, match=r"is a folder; name files"):
        build.build(section(tmp_path, f"{tmp_path}/"), byte_pairs, seed=0)


def test_a_single_row_cannot_be_held_out(tmp_path: Path, byte_pairs: Any) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"text": "one"}])
    with pytest.raises(DataError, match="single usable row"):
        build.build(section(tmp_path, path, validation_fraction=0.5), byte_pairs, seed=0)


def test_nothing_half_written_is_ever_kept(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "part").write_text("x")
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError):
        kept(tmp_path / "key", fail)
    assert list(tmp_path.iterdir()) == []
