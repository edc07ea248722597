"""toolkit.data.build and sources: files to samples, kept by content, with every bad file named."""

from __future__ import annotations

import copy
import csv
import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from support.texts import write_rows
from transformers import CTRLTokenizer, ProphetNetTokenizer

from toolkit.data import build
from toolkit.data.rows import sources
from toolkit.data.rows.cache import kept
from toolkit.data.rows.files import expand_files
from toolkit.data.templates.templates import MARKERS, use_template
from toolkit.data.tokens import tokenizer
from toolkit.errors import DataError
from toolkit.recipe.objectives.objective_section import ObjectiveSection
from toolkit.recipe.schema import DataSection

TEXTS = [f"line number {i} of the story about a fox and a king" for i in range(40)]


def section(tmp_path: Path, train: str | Path | list[str], **fields: Any) -> DataSection:
    source = [str(item) for item in train] if isinstance(train, list) else str(train)
    values = {
        "train": source,
        "max_length": 16,
        "max_dropped_fraction": 1.0,
        "cache_dir": str(tmp_path / "cache"),
        **fields,
    }
    return DataSection.model_validate(values)


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
    write_rows(tmp_path / "a.jsonl", rows)
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
    (tmp_path / "a.ndjson").write_text((tmp_path / "a.jsonl").read_text())
    (tmp_path / "wrapped.json").write_text(json.dumps({"data": rows}))
    (tmp_path / "indented.json").write_text(json.dumps({"version": 1, "data": rows}, indent=1))
    with (tmp_path / "a.tsv").open("w", newline="") as file:
        csv.DictWriter(file, ["text"], delimiter="\t").writeheader()
        csv.DictWriter(file, ["text"], delimiter="\t").writerows(rows)
    shutil.copy(next((tmp_path / "saved").glob("*.arrow")), tmp_path / "a.arrow")
    names = ("a.jsonl", "a.json", "lines.json", "a.csv", "a.parquet", "a.jsonl.gz", "saved", "splits", "a.arrow")
    names += ("a.ndjson", "wrapped.json", "indented.json", "a.tsv")
    found = [rows_of(build.build(section(tmp_path, tmp_path / name), byte_pairs, seed=0).train) for name in names]
    assert all(other == found[0] for other in found)
    assert len(found[0]) > 10


def test_a_text_file_is_one_document(tmp_path: Path, byte_pairs: Any) -> None:
    (tmp_path / "a.txt").write_text("\n".join(TEXTS))
    built = build.build(section(tmp_path, tmp_path / "a.txt"), byte_pairs, seed=0)
    assert built.report.train.read == 1
    expected = byte_pairs("\n".join(TEXTS))["input_ids"]
    assert tokens_of(built.train) == len(expected)  # the end-of-text token makes up for the first
    assert built.report.long_rows == "split"


def test_the_result_is_kept_by_content(tmp_path: Path, byte_pairs: Any) -> None:
    first = write_rows(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
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
    write_rows(first, [{"text": text} for text in TEXTS[1:]])
    assert build.build(section(tmp_path, first), byte_pairs, seed=0).fingerprint != built.fingerprint


@pytest.mark.parametrize(
    "change", [{"pad_token": "<|endoftext|>"}, {"truncation_side": "left"}, {"split_special_tokens": True}]
)
def test_settings_of_the_tokenizer_are_part_of_the_key(byte_pairs: Any, change: dict[str, Any]) -> None:
    before = tokenizer.identity(byte_pairs)
    for name, value in change.items():
        setattr(byte_pairs, name, value)
    assert tokenizer.identity(byte_pairs) != before


def test_how_a_tokenizer_in_python_splits_is_part_of_the_key(tmp_path: Path) -> None:
    vocabulary = {word: number for number, word in enumerate(["<unk>", "a@@", "b", "ab", "b</w>", "ab</w>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[SEP]", "[X_SEP]", "[CLS]", "[MASK]", "a", "A"]))

    def merging(pair: str) -> CTRLTokenizer:
        (tmp_path / "merges.txt").write_text(f"#version\n{pair}\n")
        return CTRLTokenizer(tmp_path / "vocab.json", tmp_path / "merges.txt")

    lower, cased = (ProphetNetTokenizer(tmp_path / "vocab.txt", do_lower_case=value) for value in (True, False))
    for one, other, text in ((merging("a b</w>"), merging("x y"), "ab"), (lower, cased, "A")):
        assert one(text).input_ids != other(text).input_ids
        assert tokenizer.identity(one) != tokenizer.identity(other)
    assert tokenizer.identity(merging("x y")) == tokenizer.identity(merging("x y"))


def test_what_a_call_leaves_in_the_tokenizer_is_not_part_of_the_key(byte_pairs: Any) -> None:
    before = tokenizer.identity(byte_pairs)
    byte_pairs.backend_tokenizer.enable_truncation(8)
    byte_pairs.backend_tokenizer.enable_padding(length=8)
    assert tokenizer.identity(byte_pairs) == before


def test_a_hub_data_set_counts_by_its_content(tmp_path: Path, byte_pairs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    for words in ("the old story", "the new story", "the old story"):
        table = datasets.Dataset.from_dict({"text": [words] * 3})
        monkeypatch.setattr(sources, "_load_table", lambda *_, table=table, **__: table)
        built.append(build.build(section(tmp_path, "some/stories", packing=False), byte_pairs, seed=0))
    assert [data.train.documents(0) == built[0].train.documents(0) for data in built] == [True, False, True]
    assert [data.fingerprint == built[0].fingerprint for data in built] == [True, False, True]


def test_held_out_rows_are_chosen_by_the_seed_and_not_trained_on(tmp_path: Path, byte_pairs: Any) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    data = section(tmp_path, path, validation_fraction=0.25)
    built = build.build(data, byte_pairs, seed=0)
    assert (built.report.train.read, built.report.validation.read) == (30, 10)
    assert built.validation is not None
    again = build.build(data, byte_pairs, seed=1)
    assert again.validation is not None
    assert rows_of(again.validation) != rows_of(built.validation)
    held = {tuple(document) for i in range(len(built.validation)) for document in built.validation.documents(i)}
    trained = {tuple(document) for i in range(len(built.train)) for document in built.train.documents(i)}
    assert len(held) == 10
    assert not held & trained


def test_held_out_rows_have_the_share_of_each_class(tmp_path: Path, byte_pairs: Any) -> None:
    sizes = {"a": 100, "b": 50, "c": 10, "d": 4, "e": 1}
    rows = [{"text": f"{name} {n}", "label": name} for name, size in sizes.items() for n in range(size)]
    data = section(tmp_path, write_rows(tmp_path / "a.jsonl", rows), validation_fraction=0.2)
    found = [build.build(data, byte_pairs, seed, ObjectiveSection(kind="sequence_classification")) for seed in (0, 1)]
    for split in found:
        assert split.validation is not None
        # A fifth of each, to the nearest row: 20, 10, 2, 0.8 and 0.2.
        assert torch.bincount(split.validation.batch(range(33))["labels"]).tolist() == [20, 10, 2, 1]
        assert split.report.label_counts == {"a": 80, "b": 40, "c": 8, "d": 3, "e": 1}
    ids = [split.validation.batch(range(33))["input_ids"].tolist() for split in found if split.validation]
    assert ids[0] != ids[1], "which ones is for the seed to say"


def test_a_trained_tokenizer_is_kept_and_restores_text(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    folder = tokenizer.train(section(tmp_path, path), 300)
    assert tokenizer.train(section(tmp_path, path), 300) == folder
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder)
    text = "A fox, a king: né à Paris, 東京 \U0001f98a"
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert loaded.eos_token_id is not None


def test_nothing_half_written_is_ever_kept(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "part").write_text("x")
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError):
        kept(tmp_path / "key", fail)
    assert list(tmp_path.iterdir()) == []


def chat(words: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": words}, {"role": "assistant", "content": answer}]}


@pytest.fixture(scope="module")
def chat_tokenizer() -> Any:
    made = tokenizer._train_byte_pairs(iter(TEXTS), 320, MARKERS["chatml"])
    use_template(made, "chatml")
    return made


LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "messages": [chat("hi", "hello fox")],
    "conversations": [{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello fox"}]}],
    "prompt and completion": [
        {"prompt": [{"role": "user", "content": "hi"}], "completion": [{"role": "assistant", "content": "hello fox"}]}
    ],
    "instruction and output": [{"instruction": "hi", "input": "", "output": "hello fox"}],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_usual_layouts_are_recognised(tmp_path: Path, chat_tokenizer: Any, layout: str) -> None:
    path = write_rows(tmp_path / "a.jsonl", LAYOUTS[layout] * 3)
    built = build.build(section(tmp_path, path, max_length=64), chat_tokenizer, seed=0)
    assert built.report.to_dict()["train"]["sources"][0]["layout"] == layout
    assert built.report.chat_template == "the tokenizer's own"
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello fox<|im_end|>\n"
    assert chat_tokenizer.decode(built.train.documents(0)[0]) == text
    [example] = built.report.examples[:1]
    assert [part for part in example["segments"] if part[1]] == [["hello fox<|im_end|>", True]]
    assert built.report.warnings == ["train: 2 duplicates of earlier rows"]


def test_weighted_sources(tmp_path: Path, byte_pairs: Any) -> None:
    small = write_rows(tmp_path / "small.jsonl", [{"text": f"small {i}"} for i in range(4)])
    large = write_rows(tmp_path / "large.jsonl", [{"text": f"large {i}"} for i in range(30)])
    train = [{"path": str(small), "weight": 1.0}, {"path": str(large), "weight": 3.0}]
    data = DataSection.model_validate(
        {"train": train, "max_length": 16, "cache_dir": str(tmp_path / "c"), "packing": False, "shuffle": False}
    )
    built = build.build(data, byte_pairs, seed=0)
    order = [byte_pairs.decode(built.train.documents(i)[0])[:5] for i in range(len(built.train))]
    assert (order.count("large"), order.count("small")) == (30, 10)
    assert all(order[start : start + 4].count("small") == 1 for start in range(0, 40, 4))
    assert [source["passes"] for source in built.report.to_dict()["train"]["sources"]] == [2.5, 1.0]
    assert [source["share"] for source in built.report.to_dict()["train"]["sources"]] == [0.25, 0.75]
    held = build.build(data.model_copy(update={"validation_fraction": 0.2}), byte_pairs, seed=0)
    assert held.validation is not None
    assert len(held.validation) == 7, "held-out rows count once, whatever their weight"


@pytest.mark.parametrize("streaming", [False, True])
def test_a_template_that_ends_no_turn_is_refused(tmp_path: Path, byte_pairs: Any, streaming: bool) -> None:
    rows = write_rows(tmp_path / "a.jsonl", [chat("hi", "fox")])
    data = section(tmp_path, rows, max_length=96, streaming=streaming)
    tokens = copy.deepcopy(byte_pairs)
    use_template(tokens, "chatml")  # its markers are no tokens here
    with pytest.raises(DataError, match=r"'a\.jsonl' holds conversations.*ends an answer with '<\|im_end\|>\\n'"):
        build.build(data, tokens, seed=0)
    # Both ways out that the message names.
    tokens.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    build.build(data, tokens, seed=0)
    tokens = copy.deepcopy(byte_pairs)
    use_template(tokens, "alpaca")
    build.build(data, tokens, seed=0)


def test_held_out_rows_of_a_saved_data_set_are_not_those_of_training(tmp_path: Path, byte_pairs: Any) -> None:
    splits = {"train": TEXTS[:20], "validation": TEXTS[20:26]}
    tables = {name: datasets.Dataset.from_dict({"text": texts}) for name, texts in splits.items()}
    saved = tmp_path / "saved"
    datasets.DatasetDict(tables).save_to_disk(saved)
    built = build.build(section(tmp_path, saved, validation=str(saved)), byte_pairs, seed=0)
    assert built.validation is not None
    assert (built.report.train.read, built.report.validation.read) == (20, 6)
    assert built.report.validation.also_in_train == 0


def test_a_glob_names_each_file_once(tmp_path: Path) -> None:
    (tmp_path / "deep/er").mkdir(parents=True)
    path = write_rows(tmp_path / "deep/er/a.jsonl", [{"text": "x"}])
    assert expand_files(str(tmp_path / "**/**/*.jsonl"), "data.train") == [path]


def test_a_tokenizer_that_ends_no_text_is_told(tmp_path: Path, byte_pairs: Any) -> None:
    data = section(tmp_path, write_rows(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS]))
    end, told = byte_pairs.eos_token, "a.jsonl: the tokenizer has no eos_token"
    assert not any(told in warning for warning in build.build(data, byte_pairs, seed=0).report.warnings)
    byte_pairs.eos_token = None
    try:
        assert any(told in warning for warning in build.build(data, byte_pairs, seed=0).report.warnings)
    finally:
        byte_pairs.eos_token = end


def test_classes_are_found_or_given(tmp_path: Path, byte_pairs: Any) -> None:
    rows = [{"text": f"fox {i}", "label": (10, 9, 2)[i % 3]} for i in range(9)]
    path = write_rows(tmp_path / "a.jsonl", rows)

    def built(**objective: Any) -> Any:
        kind = ObjectiveSection(kind="sequence_classification", **objective)
        return build.build(section(tmp_path, path), byte_pairs, 0, kind)

    found = built()
    assert found.label_names == ["2", "9", "10"]
    assert found.report.train.labels == {"2": 3, "9": 3, "10": 3}
    assert found.train.batch([0, 1, 2])["labels"].tolist() == [2, 1, 0]
    given = built(labels=["9", "10"])
    assert given.report.to_dict()["train"]["dropped"] == {
        "the label is not one of the classes": {"count": 3, "rows": ["a.jsonl:3", "a.jsonl:6", "a.jsonl:9"]}
    }
    names = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])})
    table = datasets.Dataset.from_list([{"text": "x", "label": 1}, {"text": "y", "label": 0}], features=names)
    table.save_to_disk(tmp_path / "named")
    table.to_parquet(tmp_path / "named.parquet")
    for place in ("named", "named.parquet"):
        data = section(tmp_path, tmp_path / place)
        named = build.build(data, byte_pairs, 0, ObjectiveSection(kind="sequence_classification"))
        assert named.label_names == ["bad", "good"]
        assert named.train.batch([0, 1])["labels"].tolist() == [1, 0]
    (tmp_path / "mine.py").write_text("def turned(row):\n    return {**row, 'label': 1 - row['label']}\n")
    own = section(tmp_path, tmp_path / "named.parquet", map=f"{tmp_path}/mine.py:turned")
    assert build.build(own, byte_pairs, 0, ObjectiveSection(kind="sequence_classification")).label_names == ["0", "1"]


def test_one_number_does_not_mean_two_classes(tmp_path: Path, byte_pairs: Any) -> None:
    classes = ObjectiveSection(kind="sequence_classification")
    for names in (["bad", "good"], ["good", "bad"]):
        kinds = {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)}
        rows = [{"text": "x", "label": 1}, {"text": "y", "label": 0}]
        table = datasets.Dataset.from_list(rows, features=datasets.Features(kinds))
        table.to_parquet(tmp_path / f"{names[0]}.parquet")
    with pytest.raises(DataError, match=r"in column label mean bad, good in '.*bad.parquet' and good, bad in"):
        build.build(section(tmp_path, tmp_path / "*.parquet"), byte_pairs, 0, classes)
    numbers = write_rows(tmp_path / "numbers.jsonl", rows)
    with pytest.raises(DataError, match=r"labels are numbers \(0\) in some places and names \(good\) in others"):
        build.build(section(tmp_path, [str(tmp_path / "bad.parquet"), str(numbers)]), byte_pairs, 0, classes)


def test_pairs_are_told_apart_by_token_types(tmp_path: Path) -> None:
    from transformers import BertTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "fox", "king"])}
    bert = BertTokenizerFast(vocab=vocabulary)
    rows = [{"text": "a fox", "other": "a king king", "label": i % 2} for i in range(4)]
    path = write_rows(tmp_path / "a.jsonl", rows)
    data = section(tmp_path, path, columns={"text": "text", "text_pair": "other", "label": "label"})
    built = build.build(data, bert, 0, ObjectiveSection(kind="sequence_classification"))
    batch = built.train.batch([0])
    assert batch["input_ids"][0].tolist() == [2, 5, 6, 3, 5, 7, 7, 3]
    assert batch["token_type_ids"][0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    cut = data.model_copy(update={"max_length": 8, "long_rows": "truncate"})
    rows = [{"text": "a fox", "other": "king " * 30, "label": i % 2} for i in range(4)]
    write_rows(path, rows)
    shortened = build.build(cut, bert, 0, ObjectiveSection(kind="sequence_classification")).train.batch([0])
    assert shortened["input_ids"][0].tolist() == [2, 5, 6, 3, 7, 7, 7, 3], "special tokens are kept"


def test_labels_that_only_look_like_numbers(tmp_path: Path, byte_pairs: Any) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": "x", "label": label} for label in ("--5", "\u00b2", "10", "9")])
    built = build.build(section(tmp_path, path), byte_pairs, 0, ObjectiveSection(kind="sequence_classification"))
    assert built.label_names == ["9", "10", "--5", "\u00b2"]


PAIR = {
    "prompt": [{"role": "user", "content": "hi"}],
    "chosen": [{"role": "assistant", "content": "hello fox"}],
    "rejected": [{"role": "assistant", "content": "go"}],
}


def pairs(tmp_path: Path, made: Any, rows: list[Any], **fields: Any) -> Any:
    data = section(tmp_path, write_rows(tmp_path / "pairs.jsonl", rows), max_length=96, **fields)
    return build.build(data, made, 0, ObjectiveSection(kind="preference"))


def test_both_completions_of_a_pair_share_a_sample(tmp_path: Path, chat_tokenizer: Any) -> None:
    whole = {side: [*PAIR["prompt"], *PAIR[side]] for side in ("chosen", "rejected")}
    built = pairs(tmp_path, chat_tokenizer, [PAIR, whole, {**PAIR, "prompt": "hi"}])
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    texts = [chat_tokenizer.decode(ids) for ids in built.train.documents(0)]
    assert texts[:2] == [f"{prompt}hello fox<|im_end|>\n", f"{prompt}go<|im_end|>\n"]
    batch = built.train.batch(range(len(built.train)))
    segments, labels = batch["segments"], batch["labels"]
    assert int(segments.max()) == 5, "three pairs, whichever way they are written"
    for pair in range(3):
        for side, words in ((0, "hello fox<|im_end|>"), (1, "go<|im_end|>")):
            mine = segments == 2 * pair + side
            assert chat_tokenizer.decode(batch["input_ids"][mine & (labels != -100)]) == words
            assert batch["position_ids"][mine].tolist() == list(range(int(mine.sum())))
    assert (labels[segments == -1] == -100).all()


def test_pairs_that_are_none(tmp_path: Path, chat_tokenizer: Any) -> None:
    asked = [[{"role": "user", "content": words}] for words in ("x", "y")]
    bad = {
        "rejected is missing or null": {**PAIR, "rejected": None},
        "rejected is a number, not text": {"prompt": "a", "chosen": " b", "rejected": 3},
        "prompt is missing or null": {"chosen": " b", "rejected": " c"},
        "chosen and rejected are the same": {**PAIR, "rejected": PAIR["chosen"]},
        "chosen and rejected differ before the last message": {
            "chosen": [*asked[0], *PAIR["chosen"]],
            "rejected": [*asked[1], *PAIR["rejected"]],
        },
        "rejected is text, not a list of messages": {**PAIR, "rejected": "go"},
        "chosen and rejected make the same tokens": {
            **PAIR,
            "chosen": [{**PAIR["rejected"][0], "reasoning_content": "left out by the template"}],
        },
        "chosen is a whole conversation that does not begin with the prompt": {
            "prompt": "who",
            "chosen": [*asked[0], *PAIR["chosen"]],
            "rejected": [*asked[0], *PAIR["rejected"]],
        },
    }
    report = pairs(tmp_path, chat_tokenizer, [PAIR, *bad.values()]).report.to_dict()["train"]
    assert {reason: found["rows"] for reason, found in report["dropped"].items()} == {
        reason: [f"pairs.jsonl:{row}"] for row, reason in enumerate(bad, start=2)
    }


def test_conversations_without_a_template(tmp_path: Path, byte_pairs: Any) -> None:
    with pytest.raises(DataError, match=r"pairs.jsonl:1\)") as caught:
        pairs(tmp_path, byte_pairs, [PAIR])
    assert "a conversation, and the tokenizer has no chat template (data.chat_template): 1" in str(caught.value)
