"""Rows as files and tables hold them: nulls, empty cells, and values that are not what their column says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import GPT2Config, GPT2ForSequenceClassification, PreTrainedTokenizerFast

from toolkit.data import build
from toolkit.data.rows.readers import read
from toolkit.data.rows.sources import open_source
from toolkit.data.templates.templates import MARKERS, use_template
from toolkit.data.tokens import tokenizer
from toolkit.objectives.classification import SequenceClassification
from toolkit.recipe.objectives.objective_section import ObjectiveSection
from toolkit.recipe.schema import DataSection, SourceSection

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}


@pytest.fixture(scope="module")
def chatml() -> Any:
    made = tokenizer._train_byte_pairs(iter(["the fox asks the king"] * 5), 300, MARKERS["chatml"])
    use_template(made, "chatml")
    return made


def lines(folder: Path, rows: list[Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def built(path: Path, tokens: Any, kind: str = "causal_lm", **settings: Any) -> build.TokenisedData:
    given = {"max_length": 1024, "max_dropped_fraction": 1.0, "packing": False, **settings}
    data = DataSection(train=str(path), cache_dir=str(path.parent / "cache"), **given)
    return build.build(data, tokens, 0, ObjectiveSection(kind=kind))


def dropped(data: build.TokenisedData) -> dict[str, list[str]]:
    assert data.report.train is not None
    return {why: found.rows for why, found in data.report.train.dropped.items()}


def texts(data: build.TokenisedData, tokens: Any) -> list[str]:
    """Each sample's text."""
    return ["".join(tokens.decode(ids.tolist()) for ids, _ in data.train.tokens(n)) for n in range(len(data.train))]


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_calls_in_a_table_are_the_same_tokens_as_in_lines(tmp_path: Path, chatml: Any, kind: str) -> None:
    """A table gives each call the arguments of all others, and each tool their parameters."""
    rows = []
    for argument in ("city", "sum"):
        call = {"function": {"name": "f", "arguments": {argument: "1"}}}
        tool = {"name": "f", "parameters": {"properties": {argument: {"enum": [None, "1"]}}}}
        rows.append({"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}], "tools": [tool]})
    table = datasets.Dataset.from_list(rows)
    place = tmp_path / f"rows.{kind}"
    table.to_parquet(place) if kind == "parquet" else table.save_to_disk(place)
    found = texts(built(place, chatml), chatml)
    assert found == texts(built(lines(tmp_path, rows), chatml), chatml)
    assert '"enum": [null, "1"]' in found[0]


def test_a_null_in_a_line_is_meant(tmp_path: Path, chatml: Any) -> None:
    call = {"function": {"name": "f", "arguments": {"city": None}}}
    path = lines(tmp_path, [{"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}])
    assert '"arguments": {"city": null}' in texts(built(path, chatml), chatml)[0]


@pytest.mark.parametrize("last", [{"role": "user", "content": "and"}, {"role": "tool", "content": "5"}])
def test_what_is_compared_or_judged_ends_with_the_assistants_turn(
    tmp_path: Path, chatml: Any, last: dict[str, Any]
) -> None:
    other = {**ANSWER, "content": "go"}
    said = [USER, ANSWER, {**last, "content": "more"}]
    pairs = [{"chosen": [USER, ANSWER], "rejected": [USER, other]}, {"chosen": [USER, ANSWER, last], "rejected": said}]
    found = built(lines(tmp_path, pairs), chatml, "preference")
    assert dropped(found) == {"the last turn is not the assistant's": ["rows.jsonl:2"]}
    judged = [{"messages": [USER, ANSWER], "label": good} for good in (True, False)]
    found = built(lines(tmp_path, [*judged, {"messages": said, "label": True}]), chatml, "kto")
    assert dropped(found) == {"the last turn is not the assistant's": ["rows.jsonl:3"]}


def test_thoughts_that_are_no_text_are_named(tmp_path: Path, chatml: Any) -> None:
    thoughts = (None, "", "hm", 5, 0, ["hm"], {"hm": "hm"}, True)
    rows = [{"messages": [USER, {**ANSWER, "reasoning_content": thought}]} for thought in thoughts]
    assert dropped(built(lines(tmp_path, [{"messages": [USER, ANSWER]}, *rows]), chatml)) == {
        "a message's reasoning_content is a number, not text": ["rows.jsonl:5", "rows.jsonl:6"],
        "a message's reasoning_content is a list, not text": ["rows.jsonl:7"],
        "a message's reasoning_content is an object, not text": ["rows.jsonl:8"],
        "a message's reasoning_content is true or false, not text": ["rows.jsonl:9"],
    }


@pytest.mark.parametrize("cell", ["", " "])
def test_empty_cells_say_nothing(tmp_path: Path, chatml: Any, cell: str) -> None:
    asked = tmp_path / "asked.csv"
    asked.write_text(f"instruction,output,history,system\nhi,hello,{cell},{cell}\n")
    data = built(asked, chatml)
    assert dropped(data) == {}
    plain = [{"messages": [USER, ANSWER]}]
    assert texts(data, chatml) == texts(built(lines(tmp_path, plain), chatml), chatml)
    pairs = tmp_path / "pairs.csv"
    pairs.write_text(f"prompt,chosen,rejected,margin\nq,a,b,{cell}\nq,c,d,2\n")
    compared = built(pairs, chatml, "reward")
    assert dropped(compared) == {}
    assert compared.train.batch([0, 1])["margin"].tolist() == [0.0, 2.0]


@pytest.mark.parametrize("nothing", ["", " ", "null", "[]", None])
def test_tools_and_calls_that_are_none(tmp_path: Path, chatml: Any, nothing: str | None) -> None:
    rows = [{"messages": [USER, ANSWER]}, {"messages": [USER, {**ANSWER, "tool_calls": nothing}], "tools": nothing}]
    data = built(lines(tmp_path, rows), chatml)
    assert dropped(data) == {}
    first, second = texts(data, chatml)
    assert first == second


@pytest.mark.parametrize("named", [True, False])
def test_token_types_are_those_with_which_the_model_is_used(tmp_path: Path, named: bool) -> None:
    """Funnel's [CLS] is of type 2; BigBird's tokenizer knows types, and gives none where nobody asks."""
    words = Tokenizer(models.WordLevel({"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "fox": 3, "king": 4}, "[PAD]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS]:2 $A:0 [SEP]:0",
        pair="[CLS]:2 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if named else [])]
    made = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", model_input_names=names)
    path = lines(tmp_path, [{"text": "fox", "text_pair": "king", "label": label} for label in ("good", "bad")])
    batch = built(path, made, "sequence_classification", packing=None).train.batch([0])
    assert batch["input_ids"][0, :5].tolist() == [1, 3, 2, 4, 2]
    assert ("token_type_ids" in batch) is named
    if named:
        assert made("fox", "king")["token_type_ids"] == batch["token_type_ids"][0, :5].tolist() == [2, 0, 0, 1, 1]


def test_a_model_that_takes_types_for_words_is_called_without_any(tmp_path: Path, chatml: Any) -> None:
    """GPT-2 adds the embedding of the word with the type's number, to all tokens where types are 0."""
    sizes = {"n_embd": 32, "n_head": 2, "n_layer": 1, "vocab_size": 400, "num_labels": 2}
    model = GPT2ForSequenceClassification(GPT2Config(**sizes, pad_token_id=tokenizer.pad_id(chatml))).eval()
    path = lines(tmp_path, [{"text": text, "label": label} for text, label in (("the fox", "good"), ("a king", "bad"))])
    batch = built(path, chatml, "sequence_classification", packing=None).train.batch([0, 1])
    with torch.no_grad():
        plain = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        assert torch.equal(SequenceClassification(model, 2).logits(model, batch), plain)


@pytest.mark.skipif(not hasattr(datasets, "Json"), reason="this datasets has no such type")
@pytest.mark.parametrize("kind", ["saved", "parquet"])
def test_nulls_that_an_object_was_given_are_kept_where_its_type_holds_its_own_keys(tmp_path: Path, kind: str) -> None:
    """Objects of one struct are filled up with nulls for each other's keys; those of the type Json are as written."""
    called = [{"role": "assistant", "name": None, "arguments": {"city": "Rome", "unit": None}}]
    features = datasets.Features(
        {"tools": datasets.Json(), "messages": datasets.List({key: datasets.Value("string") for key in called[0]})}
    )
    features["messages"].feature["arguments"] = datasets.Json()
    table = datasets.Dataset.from_dict({"tools": [{"a": None}], "messages": [called]}, features=features)
    if kind == "saved":
        table.save_to_disk(tmp_path / "rows")
    else:
        table.to_parquet(tmp_path / "rows.parquet")
    path = tmp_path / ("rows" if kind == "saved" else "rows.parquet")
    (shard,) = open_source(SourceSection(path=str(path)), "data.train").shards
    (row,) = read(shard)
    assert row == {
        "tools": {"a": None},
        "messages": [{"role": "assistant", "arguments": {"city": "Rome", "unit": None}}],
    }
