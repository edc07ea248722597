"""Data files that are broken or odd, in every layout: `toolkit data` refuses them with one clear error, or takes them
for a reason. What becomes of single rows stands in tests/unit/data/test_bad_rows.py."""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.refusals import Outcome, toolkit
from support.tiny import recipe_values, save_llama

TEXTS = ["a king and a queen walked by the river", "the moon was high"]


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def chat(*turns: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


GOOD = {"text": "a king and a queen"}
USER, ANSWER = ("user", "a king?"), ("assistant", "a queen")
CHATML = "data.chat_template=chatml"
TAG = "objective.kind=token_classification"
CLASSIFY, PREFER = "objective.kind=sequence_classification", "objective.kind=preference"

REFUSED: dict[str, tuple[str, str | bytes, tuple[str, ...], str]] = {
    "empty": ("a.jsonl", "", (), "a.jsonl"),
    "blank lines": ("a.jsonl", "\n\n\n", (), "blank line"),
    "no JSON": ("a.jsonl", "hello\nworld\n", (), "not JSON"),
    "cut": ("a.jsonl", '{"text": "a ki', (), "not JSON"),
    "numbers": ("a.jsonl", "1\n2\n", (), "a number"),
    "texts": ("a.jsonl", '"a"\n"b"\n', (), "text, not a JSON object"),
    "nulls": ("a.jsonl", "null\nnull\n", (), "null"),
    "lists": ("a.jsonl", "[1]\n[2]\n", (), "a list"),
    "empty objects": ("a.jsonl", "{}\n{}\n", (), "a.jsonl"),
    "another encoding": ("a.jsonl", lines(GOOD).encode("utf-16"), (), "not UTF-8"),
    "latin-1": ("a.jsonl", b'{"text": "caf\xe9"}\n' * 3, (), "not UTF-8"),
    "random bytes": ("a.jsonl", bytes(range(256)) * 20, (), "a.jsonl"),
    "nested too deep": ("a.jsonl", '{"text": ' + "[" * 100_000 + "\n", (), "a.jsonl"),
    "a number too long": ("a.jsonl", '{"text": ' + "9" * 5_000 + "}\n", (), "a number that is too long"),
    "empty texts": ("a.jsonl", lines({"text": ""}, {"text": " "}), (), "text is empty"),
    "null texts": ("a.jsonl", lines({"text": None}, {"text": None}), (), "missing or null"),
    "texts that are numbers": ("a.jsonl", lines({"text": 3}, {"text": 4.5}), (), "a number"),
    "texts that are NaN": ("a.jsonl", '{"text": NaN}\n{"text": NaN}\n', (), "a number"),
    "texts that are lists": ("a.jsonl", lines({"text": ["a"]}), (), "a list"),
    "half characters": ("a.jsonl", '{"text": "\\ud83d"}\n', (), "half a character"),
    "another column": ("a.jsonl", lines({"txt": "a"}), (), "txt"),
    "a column that is not there": ("a.jsonl", lines(GOOD), ("data.columns.text=body",), "data.columns.text"),
    "columns of two layouts": (
        "a.jsonl",
        lines(GOOD),
        ("data.columns.text=text", "data.columns.prompt=text"),
        "data.columns",
    ),
    "half of the rows broken": ("a.jsonl", lines(GOOD, {"text": None}) * 10, (), "data.max_dropped_fraction"),
    "rows too long": ("a.jsonl", lines({"text": "a king " * 99}), ("data.long_rows=error",), "data.max_length"),
    "targets of plain text": ("a.jsonl", lines(GOOD), ("data.targets=assistant",), "data.targets"),
    "a chat without a template": ("a.jsonl", lines(chat(USER, ANSWER)), (), "data.chat_template"),
    "a chat of one turn": ("a.jsonl", lines(chat(USER)), (CHATML,), "a.jsonl"),
    "a chat of no turns": ("a.jsonl", lines({"messages": []}), (CHATML,), "a.jsonl"),
    "a chat that is text": ("a.jsonl", lines({"messages": "hi"}), (CHATML,), "a.jsonl"),
    "a chat that is null": ("a.jsonl", lines({"messages": None}), (CHATML,), "a.jsonl"),
    "a chat of texts": ("a.jsonl", lines({"messages": ["hi", "ho"]}), (CHATML,), "a.jsonl"),
    "turns without a role": ("a.jsonl", lines({"messages": [{"content": "hi"}]}), (CHATML,), "a.jsonl"),
    "turns without content": ("a.jsonl", lines({"messages": [{"role": "user"}]}), (CHATML,), "a.jsonl"),
    "turns of an unknown role": ("a.jsonl", lines(chat(("robot", "a"), ANSWER)), (CHATML,), "a.jsonl"),
    "pictures in a turn": (
        "a.jsonl",
        lines(chat(("user", [{"type": "image_url", "image_url": {"url": "x"}}]), ANSWER)),
        (CHATML,),
        "a.jsonl",
    ),
    "a prompt without an answer": ("a.jsonl", lines({"prompt": "a"}), (), "prompt"),
    "an instruction without an output": ("a.jsonl", lines({"instruction": "a"}), (CHATML,), "instruction"),
    "answers that are null": ("a.jsonl", lines({"prompt": "a", "completion": None}), (), "completion"),
    "ratings without an objective": (
        "a.jsonl",
        lines({"prompt": "a", "completion": "b", "label": False}),
        (),
        "label",
    ),
    "judgements as numbers without an objective": (
        "a.jsonl",
        lines({"prompt": "a", "completion": "b", "label": 0}, {"prompt": "a", "completion": "c", "label": 1}),
        (),
        "rows are judged good or bad one by one (label: 0), as for KTO; set objective.kind=kto",
    ),
    "judgements of CSV without an objective": (
        "a.csv",
        "prompt,completion,label\na,b,1\n",
        (),
        "(label: 1), as for KTO",
    ),
    "judgements under LLaMA-Factory's name": (
        "a.jsonl",
        lines({**chat(USER, ANSWER), "kto_tag": 1}),
        ("data.chat_template=alpaca",),
        "(kto_tag: 1), as for KTO",
    ),
    "tags that are numbers and names": (
        "a.jsonl",
        lines({"tokens": ["a", "king"], "ner_tags": [0, "B-PER"]}, {"tokens": ["a"], "ner_tags": ["O"]}),
        (TAG,),
        "tags are numbers (0) in some places and names (O) in others",
    ),
    "tags that are numbers in one row and names in another": (
        "a.jsonl",
        lines({"tokens": ["a", "king"], "ner_tags": [0, 1]}, {"tokens": ["a"], "ner_tags": ["B-PER"]}),
        (TAG,),
        "tags are numbers (0) in some places and names (B-PER) in others",
    ),
    "columns between semicolons": ("a.csv", "prompt;completion\na;b\n", (), "separated by ';': save the file with"),
    "columns between tabs": ("a.csv", "prompt\tcompletion\na\tb\n", (), "separated by '\\t': save the file with"),
    "columns between bars": ("a.csv", "prompt|completion\na|b\n", (), "separated by '|': save the file with commas"),
    "pairs of one column": ("a.jsonl", lines({"chosen": "a"}), (PREFER,), "Add the columns that are missing"),
    "rows of no protocol": ("a.jsonl", lines(GOOD), ("data.train=ftps3://bucket/rows.jsonl",), "Protocol not known"),
    "one class": ("a.jsonl", lines({"text": "a", "label": "x"}, {"text": "b", "label": "x"}), (CLASSIFY,), "one class"),
    "no label": ("a.jsonl", lines(GOOD), (CLASSIFY,), "label"),
    "labels that are null": ("a.jsonl", lines({"text": "a", "label": None}), (CLASSIFY,), "a.jsonl"),
    "labels that are lists": ("a.jsonl", lines({"text": "a", "label": [1]}), (CLASSIFY,), "a.jsonl"),
    "labels that the recipe has not": (
        "a.jsonl",
        lines({"text": "a", "label": "x"}),
        (CLASSIFY, "objective.labels=[y, z]"),
        "a.jsonl",
    ),
    "weights for other classes": (
        "a.jsonl",
        lines({"text": "a", "label": "x"}, {"text": "b", "label": "y"}),
        (CLASSIFY, "objective.labels=[x, x]"),
        "objective.labels",
    ),
    "no pair": ("a.jsonl", lines(GOOD), (PREFER,), "chosen + rejected"),
    "a pair of equals": (
        "a.jsonl",
        lines({"prompt": "a", "chosen": "b", "rejected": "b"}),
        (PREFER,),
        "a.jsonl",
    ),
    "a pair without one side": (
        "a.jsonl",
        lines({"prompt": "a", "chosen": "b", "rejected": None}),
        (PREFER,),
        "reject",
    ),
    "CSV with a header alone": ("a.csv", "text\n", (), "a.csv"),
    "CSV of another column": ("a.csv", "body\na king\n", (), "body"),
    "CSV with a column twice": ("a.csv", "text,text\na,b\n", (), "appears twice"),
    "CSV with rows of other lengths": ("a.csv", "text,note\na\nb\n", (), "number of fields"),
    "CSV of no text": ("a.csv", b"\xff\xfe\x00", (), "a.csv"),
    "CSV with a zero byte": ("a.csv", b"te\x00xt\na\n", (), "a.csv"),
    "JSON with one object": ("a.json", '{\n"name": "a",\n"version": 3}\n', (), "name, version"),
    "JSON that is cut": ("a.json", '[{"text": "a"}, {"te', (), "not JSON"),
    "JSON of an empty list": ("a.json", "[]", (), "no rows"),
    "a text of no text": ("a.txt", b"\xff\xfe\xfa", (), "not UTF-8"),
    "a text of spaces": ("a.txt", "   \n", (), "a.txt"),
    "parquet that is none": ("a.parquet", b"PAR1 nothing", (), "a.parquet"),
    "arrow that is none": ("a.arrow", b"nothing", (), "a.arrow"),
    "gzip that is none": ("a.jsonl.gz", b"nothing", (), "a.jsonl.gz"),
    "gzip that is cut": ("a.jsonl.gz", gzip.compress(lines(GOOD).encode() * 99)[:30], (), "a.jsonl.gz"),
    "gzip of no text": ("a.jsonl.gz", gzip.compress(b"\xff\xfe"), (), "not UTF-8"),
    "parquet in gzip": ("a.parquet.gz", gzip.compress(b"PAR1"), (), "a.parquet.gz"),
    "an unknown ending": ("a.xlsx", b"PK", (), ".jsonl"),
    "no ending": ("rows", lines(GOOD), (), ".jsonl"),
    "held-out rows that are gone": ("a.jsonl", lines(GOOD), ("data.validation=/nowhere/b.jsonl",), "data.validation"),
    "all held out": ("a.jsonl", lines(GOOD), ("data.validation_fraction=0.99",), "data.validation_fraction"),
    "a cache that is a file": ("a.jsonl", lines(GOOD), ("data.cache_dir=/dev/null",), "data.cache_dir"),
    "a cache that cannot be made": ("a.jsonl", lines(GOOD), ("data.cache_dir=/proc/nowhere",), "data.cache_dir"),
}
"""Name -> file's name, what it holds, overrides, and what the error names."""

PATHS: dict[str, tuple[str, str]] = {
    "a file that is gone": ("/nowhere/a.jsonl", "/nowhere/a.jsonl"),
    "a pattern that matches nothing": ("/nowhere/*.jsonl", "/nowhere/*.jsonl"),
    "a folder": ("{place}", "*.jsonl"),
    "a folder with a slash": ("{place}/", "*.jsonl"),
    "a device": ("/dev/null", "/dev/null"),
    "a broken link": ("{place}/link.jsonl", "link.jsonl"),
    "an address": ("https://localhost:1/a.jsonl", "https://localhost:1/a.jsonl"),
    "a home that is not there": ("~nobody-like-this/a.jsonl", "~nobody-like-this/a.jsonl"),
    "a zero byte": ("a\\0.jsonl", "data.train"),
    "a name too long": ("/" + "a" * 300 + ".jsonl", "data.train"),
    "a database": ("{place}/a.db", ".jsonl"),
}
"""Name -> path, and what the error names."""

TAKEN: dict[str, tuple[str, str | bytes, tuple[str, ...], str]] = {
    "a byte-order mark": ("a.jsonl", b"\xef\xbb\xbf" + lines(GOOD).encode(), (), "editors write it"),
    "line ends of Windows": ("a.jsonl", lines(GOOD).replace("\n", "\r\n"), (), "they are white space"),
    "no end of the last line": ("a.jsonl", lines(GOOD).rstrip("\n"), (), "the row is whole"),
    "a key twice": ("a.jsonl", '{"text": "a", "text": "b king"}\n', (), "JSON's readers take the last"),
    "more columns": ("a.jsonl", lines({**GOOD, "id": 3, "note": None}), (), "only those of the layout are read"),
    "one bad row in a hundred": ("a.jsonl", lines(*[GOOD] * 99, {"text": ""}), (), "dropped, counted and named"),
    "one character": ("a.jsonl", lines({"text": "a"}), (), "it has a target: the end of the text"),
    "other scripts": ("a.jsonl", lines({"text": "\u4f60\u597d \U0001f600 \u05d0"}), (), "bytes have tokens"),
    "control characters": ("a.jsonl", lines({"text": "a\x00b\x1b[31m"}), (), "bytes have tokens; shown escaped"),
    "a text longer than a sample": ("a.jsonl", lines({"text": "a king " * 999}), (), "plain text is split"),
    "tabs": ("a.tsv", "text\tnote\na king\tb\n", (), "as their ending says"),
    "a JSON list": ("a.json", json.dumps([GOOD, GOOD]), (), "one of the layouts of .json"),
    "a JSON list under a key": ("a.json", json.dumps({"data": [GOOD]}), (), "one of them, too"),
    "rows in a .json": ("a.json", lines(GOOD, GOOD), (), "one of them, too"),
    "a text": ("a.txt", "a king", (), "one document"),
    "brackets in the name": ("a[1].jsonl", lines(GOOD), (), "a file of that name is no pattern"),
    "spaces in the name": ("a b.jsonl", lines(GOOD), (), "names may hold them"),
    "numbers as labels": (
        "a.jsonl",
        lines({"text": "a", "label": 0}, {"text": "b", "label": 1}),
        (CLASSIFY,),
        "classes are often numbered",
    ),
}
"""Name -> the same, and why the rows are trained on all the same."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a recipe, and what some paths name."""
    place = tmp_path_factory.mktemp("data")
    save_llama(place / "model", TEXTS, tied=True)
    values = recipe_values(place / "model", place / "a.jsonl", place / "out", place / "cache")
    (place / "recipe.yaml").write_text(yaml.safe_dump(values))
    (place / "link.jsonl").symlink_to(place / "gone.jsonl")
    sqlite3.connect(place / "a.db").close()
    (place / "a.db").write_bytes(b"SQLite format 3\0")
    return place


@pytest.fixture
def read(place: Path, tmp_path: Path) -> Callable[..., Outcome]:
    """Writes a file and reads it by `toolkit data`."""

    def read(name: str, content: str | bytes, overrides: tuple[str, ...]) -> Outcome:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return toolkit("data", str(place / "recipe.yaml"), f"data.train=[{json.dumps(str(path))}]", *overrides)

    return read


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, read: Callable[..., Outcome]) -> None:
    *given, named = REFUSED[name]
    outcome = read(*given)
    assert outcome.problems(named) == [], outcome.told


@pytest.mark.parametrize("name", PATHS)
def test_no_path(name: str, place: Path) -> None:
    path, named = PATHS[name]
    found = json.dumps(path.format(place=place)).replace("\\\\0", "\\0")
    outcome = toolkit("data", str(place / "recipe.yaml"), f"data.train=[{found}]")
    assert outcome.problems(named) == [], outcome.told


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name: str, read: Callable[..., Outcome]) -> None:
    outcome = read(*TAKEN[name][:3])
    assert outcome.code == 0, outcome.told
