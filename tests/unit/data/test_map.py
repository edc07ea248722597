"""data.map: each row goes through a user's function, wherever rows are read, and its source is in the cache's key."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from support.cases import cases
from support.texts import write_rows
from test_build import TEXTS, rows_of, section

from toolkit.data import build
from toolkit.data.documents import processes
from toolkit.data.tokens import tokenizer
from toolkit.errors import BadInputError, RecipeError, ToolkitError
from toolkit.pages.card import recipe_for_readers
from toolkit.recipe.recipe import Recipe

TABLES = cases(__file__)

SOURCE = """
def told(row):
    return {"prompt": row["head"]["text"], "completion": row["tail"].upper()}
"""


@pytest.fixture
def byte_pairs() -> Any:
    return tokenizer._train_byte_pairs(iter([*TEXTS, *map(str.upper, TEXTS)]), 320)


def stored(folder: Path, count: int = 40) -> list[dict[str, Any]]:
    (folder / "mine.py").write_text(SOURCE)
    return [{"head": {"text": text[:20]}, "tail": text[20:]} for text in TEXTS[:count]]


def by_hand(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    return [{"prompt": row["head"]["text"], "completion": row["tail"].upper()} for row in rows]


def mapped(*arguments: Any, **fields: Any) -> Any:
    return section(*arguments, max_length=64, **fields)


def built(data: Any, tokens: Any) -> Any:
    return build.build(data, tokens, seed=0)


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json", "parquet", "saved"])
def test_samples_are_those_of_rows_mapped_by_hand(tmp_path: Path, byte_pairs: Any, kind: str) -> None:
    rows = stored(tmp_path)
    write_rows(tmp_path / "by_hand.jsonl", by_hand(rows))
    place, table = tmp_path / f"rows.{kind}", datasets.Dataset.from_list(rows)
    if kind == "saved":
        table.save_to_disk(place)
    elif kind == "parquet":
        table.to_parquet(place)
    elif kind == "json":
        place.write_text(json.dumps(rows))
    elif kind == "jsonl":
        write_rows(place, rows)
    else:
        with gzip.open(place, "wt") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
    found = built(mapped(tmp_path, place, map=f"{tmp_path}/mine.py:told"), byte_pairs)
    assert rows_of(found.train) == rows_of(built(mapped(tmp_path, tmp_path / "by_hand.jsonl"), byte_pairs).train)
    assert found.report.to_dict()["train"]["sources"][0]["layout"] == "prompt and completion"


def test_held_out_rows_and_streams_are_mapped_too(tmp_path: Path, byte_pairs: Any) -> None:
    rows = stored(tmp_path)
    for name, part in {"a": rows[:30], "b": rows[30:]}.items():
        write_rows(tmp_path / f"{name}.jsonl", part)
        write_rows(tmp_path / f"{name}_by_hand.jsonl", by_hand(part))
    for streaming in (False, True):
        one, other = (
            mapped(
                tmp_path,
                tmp_path / f"a{ending}.jsonl",
                validation=str(tmp_path / f"b{ending}.jsonl"),
                streaming=streaming,
                **fields,
            )
            for ending, fields in (("", {"map": f"{tmp_path}/mine.py:told"}), ("_by_hand", {}))
        )
        first, second = built(one, byte_pairs), built(other, byte_pairs)
        assert rows_of(first.train) == rows_of(second.train)
        assert rows_of(first.validation) == rows_of(second.validation)


@pytest.mark.slow
def test_processes_that_tokenise_import_the_function_themselves(
    tmp_path: Path, byte_pairs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "BATCH_ROWS", 8)
    rows = write_rows(tmp_path / "a.jsonl", stored(tmp_path))
    function = {"map": f"{tmp_path}/mine.py:told"}
    found = [
        rows_of(
            built(
                mapped(tmp_path, rows, num_proc=num, cache_dir=str(tmp_path / str(num)), **function), byte_pairs
            ).train
        )
        for num in (1, 2)
    ]
    assert found[0] == found[1]


def test_another_source_makes_the_rows_again_and_the_same_one_does_not(tmp_path: Path, byte_pairs: Any) -> None:
    rows = write_rows(tmp_path / "a.jsonl", stored(tmp_path))
    (tmp_path / "same.py").write_text(SOURCE)
    (tmp_path / "other.py").write_text(SOURCE.replace("upper", "lower"))
    found = {
        name: built(mapped(tmp_path, rows, map=f"{tmp_path}/{name}.py:told"), byte_pairs)
        for name in ("mine", "same", "other")
    }
    prints = {name: data.fingerprint for name, data in found.items()}
    assert prints["mine"] == prints["same"] != prints["other"], "a run that resumes tells them apart by it"
    assert rows_of(found["mine"].train) != rows_of(found["other"].train)
    assert len(list((tmp_path / "cache").glob("documents-*"))) == 2


def test_another_function_of_the_same_file_makes_rows_of_its_own(tmp_path: Path, byte_pairs: Any) -> None:
    rows = write_rows(tmp_path / "a.jsonl", stored(tmp_path))
    second = "\n\ndef second(row):\n    found = told(row)\n    return {**found, 'prompt': found['prompt'][::-1]}\n"
    (tmp_path / "mine.py").write_text(SOURCE + second)
    first, other = (
        built(mapped(tmp_path, rows, map=f"{tmp_path}/mine.py:{name}"), byte_pairs) for name in ("told", "second")
    )
    assert first.fingerprint != other.fingerprint
    assert rows_of(first.train) != rows_of(other.train)


def test_a_tokenizer_is_trained_on_mapped_rows(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "a.jsonl", stored(tmp_path))
    folders = {
        tokenizer.train(mapped(tmp_path, rows, map=f"{tmp_path}/mine.py:{name}"), 300)
        for name in ("told", "other")
        if (tmp_path / "mine.py").write_text(SOURCE + "\n\ndef other(row):\n    return told(row)\n")
    }
    assert len(folders) == 2, "each function has its own rows"
    assert "FOX AND A KING" in "".join(
        tokenizer._texts_of_rows(mapped(tmp_path, rows, map=f"{tmp_path}/mine.py:told"), "causal_lm")
    )


BAD = """
def fails(row):
    return {"text": row["missing"]}


def at_third(row):
    return {"text": row["tail"]} if "number 2" not in row["head"]["text"] else 1 / 0


def text(row):
    return row["tail"]


def nothing(row):
    row["text"] = "changed in place, and not returned"


def numbered(row):
    return {1: "a"}


def two(row, field):
    return row


def ends(row):
    raise SystemExit(0)
"""


@pytest.mark.parametrize(("name", "told"), TABLES["NO_ROW"])
def test_what_makes_no_row_is_one_error(tmp_path: Path, byte_pairs: Any, name: str, told: str) -> None:
    rows = write_rows(tmp_path / "a.jsonl", stored(tmp_path))
    (tmp_path / "bad.py").write_text(BAD)
    for streaming in (False, True):
        with pytest.raises(ToolkitError) as caught:
            built(mapped(tmp_path, rows, map=f"{tmp_path}/bad.py:{name}", streaming=streaming), byte_pairs)
        assert str(caught.value).startswith("data.map: ")
        assert told in str(caught.value)
        assert isinstance(caught.value, BadInputError)


def test_the_recipe_names_it_relative_to_itself(tmp_path: Path) -> None:
    text = Recipe.load("quickstart", ["data.map=mine.py:told"]).to_yaml()
    (tmp_path / "recipe.yaml").write_text(text)
    found = Recipe.load(tmp_path / "recipe.yaml")
    assert found.own_code() == {"data.map": f"{tmp_path}/mine.py:told"}
    assert "map: mine.py:told" in recipe_for_readers(found)
    with pytest.raises(RecipeError, match=r"data\.map: 'told' names no function; write file\.py:function"):
        Recipe.load("quickstart", ["data.map=told"])
