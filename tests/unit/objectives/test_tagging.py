"""Tags of words: given to tokens as transformers' examples do, and entities counted as seqeval does."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import datasets
import pytest
from support.texts import write_rows
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertTokenizerFast, PreTrainedTokenizerFast

from toolkit.data import build
from toolkit.data.samples.samples import IGNORED
from toolkit.data.tokens.tokenizer import _train_byte_pairs
from toolkit.errors import DataError
from toolkit.objectives.tagging import entities
from toolkit.recipe.objectives.objective_section import ObjectiveSection
from toolkit.recipe.recipe import Recipe
from toolkit.recipe.schema import DataSection

TAGS = ObjectiveSection(kind="token_classification")
WORDS = ["Anna", "and", "Bob-Smith", "flew", "from", "New", "Orleans", "to", "Rome", ",", "unbelievably", "!", "José"]
OF_WORDS = ["B-PER", "O", "B-PER", "O", "O", "B-LOC", "I-LOC", "O", "B-LOC", "O", "O", "O", "B-PER"]


def made(folder: Path, tokenizer: Any, rows: list[Any], objective: ObjectiveSection = TAGS, **fields: Any) -> Any:
    path = write_rows(folder / "rows.jsonl", rows)
    fields = {"max_length": 64, "cache_dir": str(folder / "cache"), "max_dropped_fraction": 1.0, **fields}
    return build.build(DataSection(train=[{"path": str(path)}], **fields), tokenizer, 0, objective)  # type: ignore[list-item]


def bert() -> Any:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "an", "##na", "and", "bob", "-", "smith", "flew", "from"]
    pieces += ["new", "or", "##lean", "##s", "to", "rome", ",", "un", "##believ", "##ably", "!", "jose"]
    return BertTokenizerFast(vocab={piece: number for number, piece in enumerate(pieces)})


def byte_pairs(size: int) -> Any:
    tokenizer = _train_byte_pairs(iter([" ".join(WORDS)] * 3), size)
    # What `add_prefix_space=True` does, without which words alone are not tokenised as they are in a text.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer", [bert(), byte_pairs(400), byte_pairs(262)], ids=["wordpiece", "byte pairs", "bytes"]
)
def test_tags_stand_where_transformers_examples_put_them(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"tokens": WORDS, "tags": OF_WORDS}, {"tokens": WORDS[:3], "tags": OF_WORDS[:3]}]
    data = made(tmp_path, tokenizer, rows)
    assert data.label_names == ["B-LOC", "B-PER", "I-LOC", "O"]
    batch = data.train.batch([0, 1])
    for i, row in enumerate(rows):
        encoded = tokenizer(row["tokens"], is_split_into_words=True)
        labels, before = [], None
        for word in encoded.word_ids():  # as transformers' run_ner.py aligns them
            first = word is not None and word != before
            labels.append(data.label_names.index(row["tags"][word]) if first else IGNORED)
            before = word
        length = len(labels)
        assert batch["input_ids"][i, :length].tolist() == encoded["input_ids"]
        assert batch["labels"][i].tolist() == labels + [IGNORED] * (batch["labels"].shape[1] - length)
        assert batch["attention_mask"][i].sum() == length
    assert data.report.train.labels == {"B-LOC": 2, "B-PER": 5, "I-LOC": 1, "O": 8}


def test_a_token_that_spans_two_words_is_no_words(tmp_path: Path) -> None:
    """Within a word it may hold a space."""
    made_of = Tokenizer(models.Unigram([("<unk>", 0.0), *((sign, -9.0) for sign in "abcd "), ("a b", -1.0)], 0))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made_of, unk_token="<unk>", pad_token="<unk>")
    rows = [{"tokens": words, "tags": ["X", "O"]} for words in (["a", "b"], ["a b", "c"], ["d", "c"])]
    data = made(tmp_path, tokenizer, rows)
    told = "a token of the tokenizer spans two words, and can carry one tag alone"
    assert {why: found.rows for why, found in data.report.train.dropped.items()} == {told: ["rows.jsonl:1"]}
    assert data.report.train.kept == 2


def test_rows_that_cannot_be_used_are_told(tmp_path: Path) -> None:
    good = {"tokens": ["Anna", "flew"], "tags": ["B-PER", "O"]}
    bad: list[dict[str, Any]] = [
        {"tokens": ["Anna", "flew"], "tags": ["B-PER"]},
        {"tokens": "Anna flew", "tags": ["B-PER", "O"]},
        {"tokens": [], "tags": []},
        {"tokens": ["Anna", None], "tags": ["B-PER", "O"]},
        {"tokens": ["Anna", " "], "tags": ["B-PER", "O"]},
        {"tokens": ["Anna"], "tags": None},
        {"tokens": ["Anna"], "tags": [None]},
        {"tokens": ["Anna"], "tags": ["B-ORG"]},
    ]
    objective = ObjectiveSection(kind="token_classification", labels=["O", "B-PER"])
    data = made(tmp_path, bert(), [good, *bad], objective)
    dropped = {reason: found.rows for reason, found in data.report.train.dropped.items()}
    assert dropped == {
        "tokens and tags are of different lengths": ["rows.jsonl:2"],
        "tokens is not a list": ["rows.jsonl:3"],
        "tokens is empty": ["rows.jsonl:4"],
        "a word of tokens is missing or null": ["rows.jsonl:5"],
        "a word of tokens is empty": ["rows.jsonl:6"],
        "tags is missing or null": ["rows.jsonl:7"],
        "a tag of tags is missing or null": ["rows.jsonl:8"],
        "the label is not one of the classes": ["rows.jsonl:9"],
    }
    assert data.train.batch([0])["labels"][0].tolist()[:5] == [IGNORED, 1, IGNORED, 0, IGNORED]


def test_numbers_of_tags_have_the_names_of_the_data_set(tmp_path: Path) -> None:
    tags = datasets.List(datasets.ClassLabel(names=["O", "B-PER"]))
    features = datasets.Features({"tokens": datasets.List(datasets.Value("string")), "ner_tags": tags})
    rows = [{"tokens": ["Anna", "flew"], "ner_tags": [1, 0]}]
    datasets.Dataset.from_list(rows, features=features).save_to_disk(tmp_path / "named")
    section = DataSection(train=[{"path": str(tmp_path / "named")}], max_length=32, cache_dir=str(tmp_path / "c"))  # type: ignore[list-item]
    data = build.build(section, bert(), 0, TAGS)
    assert data.label_names == ["O", "B-PER"]
    assert data.train.batch([0])["labels"][0].tolist()[:5] == [IGNORED, 1, IGNORED, 0, IGNORED]


def test_long_rows_are_cut_with_their_tags(tmp_path: Path) -> None:
    rows = [{"tokens": WORDS, "tags": OF_WORDS}] * 2
    batch = made(tmp_path, bert(), rows, max_length=8, long_rows="truncate").train.batch([0])
    assert batch["input_ids"].shape == (1, 8)
    assert batch["input_ids"][0, -1] == 3, "the separator is kept"
    assert (batch["labels"] != IGNORED).sum() == 3
    with pytest.raises(DataError, match=r"longer than data.max_length"):
        made(tmp_path, bert(), rows, max_length=8)


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("O B-PER I-PER O B-LOC", {(1, 3, "PER"), (4, 5, "LOC")}),
        ("B-PER B-PER I-LOC I-LOC", {(0, 1, "PER"), (1, 2, "PER"), (2, 4, "LOC")}),
        ("I-PER I-PER O I-LOC", {(0, 2, "PER"), (3, 4, "LOC")}),
        ("B-PER E-PER S-PER I-PER", {(0, 2, "PER"), (2, 3, "PER"), (3, 4, "PER")}),
        ("O O", set()),
    ],
)
def test_entities_of_a_sentence(tags: str, expected: set[Any]) -> None:
    assert entities(tags.split()) == expected


def test_entities_are_seqevals() -> None:
    sequence_labeling = pytest.importorskip("seqeval.metrics.sequence_labeling")
    draw = random.Random(0)
    known = ["O", *(f"{prefix}-{kind}" for prefix in "BIES" for kind in ("PER", "LOC"))]
    for _ in range(2000):
        tags = [draw.choice(known) for _ in range(draw.randrange(1, 12))]
        theirs = {(start, end + 1, kind) for kind, start, end in sequence_labeling.get_entities(tags)}
        assert entities(tags) == theirs, tags


def test_settings_without_effect_are_refused() -> None:
    for override in ("data.packing=true", "data.long_rows=split", "logging.held_out_samples=1"):
        with pytest.raises(Exception, match=r"with objective.kind token_classification"):
            Recipe.load("ner", [override])
