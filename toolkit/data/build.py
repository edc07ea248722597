"""Tokenised data sets: made once on rank 0, kept by content, memory-mapped by every rank."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets
from transformers import PreTrainedTokenizerBase

from toolkit import ranks
from toolkit.data.cache import cache_folder, digest, kept
from toolkit.data.sources import identify_rows, open_rows
from toolkit.data.text import IGNORED, RowCount, cut_blocks, problem_of
from toolkit.data.tokenizer import identity, pad_id
from toolkit.errors import DataError
from toolkit.recipe import DataSection

_TOKENS = datasets.List(datasets.Value("int32"))
_SAMPLE = datasets.Features({"input_ids": _TOKENS, "labels": _TOKENS, "position_ids": _TOKENS})
_DOCUMENT = datasets.Features({"input_ids": _TOKENS, "problem": datasets.Value("string")})


@dataclass(frozen=True)
class TokenisedData:
    """Samples of T tokens each, with `input_ids`, `labels` and `position_ids`.

    Attributes:
        validation: None where nothing is held out.
        report: counts of rows, tokens and samples per split, and what was dropped and why.
        fingerprint: of the rows, the tokenizer and how samples are made of them.
    """

    train: datasets.Dataset
    validation: datasets.Dataset | None
    report: dict[str, Any]
    fingerprint: str


def build(data: DataSection, tokenizer: PreTrainedTokenizerBase, seed: int) -> TokenisedData:
    """Tokenises the recipe's rows, or finds it done.

    Raises:
        DataError: on every rank; see `toolkit.data.sources.open_rows`.
    """
    folder = ranks.on_each_host(lambda: _tokenised(data, tokenizer, seed))
    held_out = folder / "validation"
    return TokenisedData(
        train=datasets.load_from_disk(str(folder / "train")),
        validation=datasets.load_from_disk(str(held_out)) if held_out.exists() else None,
        report=json.loads((folder / "report.json").read_text(encoding="utf-8")),
        fingerprint=folder.name,
    )


def _tokenised(data: DataSection, tokenizer: PreTrainedTokenizerBase, seed: int) -> Path:
    cache = cache_folder(data)
    key = digest("text", identify_rows(data, seed), identity(tokenizer), data.max_length)

    def write(folder: Path) -> None:
        datasets.disable_progress_bars()
        train, validation = open_rows(data, seed, cache / "datasets")
        report = {"train": _write_split("train", train, data, tokenizer, folder)}
        if validation is not None:
            report["validation"] = _write_split("validation", validation, data, tokenizer, folder)
        (folder / "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")

    return kept(cache / f"text-{key}", write)


def _write_split(
    split: str, rows: datasets.Dataset, data: DataSection, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> dict[str, Any]:
    """Writes one split's samples under `folder` and returns its part of the report."""
    work = folder / "work"
    work.mkdir(exist_ok=True)
    documents = rows.map(
        _encode,
        batched=True,
        batch_size=64,
        remove_columns=rows.column_names,
        features=_DOCUMENT,
        num_proc=data.num_proc if data.num_proc > 1 else None,
        fn_kwargs={"column": data.text_column, "tokenizer": tokenizer},
        cache_file_name=str(work / f"{split}.arrow"),
        new_fingerprint=digest(folder.name, split, "documents"),
    )
    counts = _write_blocks(documents, data.max_length, pad_id(tokenizer), folder / split, work)
    if counts["samples"] == 0:
        raise DataError(
            f"data.{split}: none of its {counts['read']} rows gives a token to train on from column "
            f"{data.text_column!r}; dropped rows by reason: {counts['dropped']}"
        )
    shutil.rmtree(work)
    return counts


def _write_blocks(documents: datasets.Dataset, max_length: int, pad: int, folder: Path, work: Path) -> dict[str, Any]:
    count = RowCount()
    totals = {"tokens": 0, "target_tokens": 0, "samples": 0, "max_length": max_length}

    def kept_documents() -> Iterator[list[int]]:
        for row, document in enumerate(documents):
            if count.keep(document["problem"], row):
                totals["tokens"] += len(document["input_ids"])
                yield document["input_ids"]

    def blocks() -> Iterator[dict[str, list[int]]]:
        for block in cut_blocks(kept_documents(), max_length, pad):
            totals["samples"] += 1
            totals["target_tokens"] += sum(label != IGNORED for label in block["labels"])
            yield block

    found = blocks()
    first = next(found, None)
    if first is not None:  # `datasets` cannot write a data set without rows
        samples = datasets.Dataset.from_generator(
            lambda: itertools.chain([first], found),
            features=_SAMPLE,
            cache_dir=str(work),
            fingerprint=digest(str(folder), "blocks"),
        )
        samples.save_to_disk(str(folder))
    return {**asdict(count), **totals}


def _encode(rows: dict[str, list[Any]], column: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[Any]]:
    """Token ids of each usable text, begin- and end-of-text tokens included where the tokenizer has them."""
    problems = [problem_of(text) for text in rows[column]]
    texts = [text if problem is None else "" for text, problem in zip(rows[column], problems, strict=True)]
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    before = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    after = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    return {"input_ids": [[*before, *ids, *after] for ids in encoded], "problem": problems}
