"""Bad input ends in one clear error on every rank, with nothing left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.ranks import run_on_ranks
from support.runs import outcome
from support.texts import write_rows
from support.tiny import recipe_values, save_llama

TEXTS = ["a king and a queen walked by the river", "the moon was high"]


def cases(folder: Path) -> dict[str, tuple[dict[str, Any], str]]:
    """Name -> (changes of the recipe by dotted key, a part of the message)."""
    return {
        "missing model": ({"model.name_or_path": str(folder / "nowhere")}, "model.name_or_path: the folder"),
        "no tokenizer": ({"model.name_or_path": str(folder / "empty")}, "model.name_or_path: no tokenizer"),
        "no model": ({"model.name_or_path": str(folder / "only-tokenizer")}, "model.name_or_path: no model can be"),
        "missing data": ({"data.train": str(folder / "nowhere.jsonl")}, "data.train: there is no file"),
        "empty file": ({"data.train": str(folder / "empty.jsonl")}, "is empty"),
        "no rows": ({"data.train": str(folder / "blank.jsonl")}, "none of its rows (1)"),
        "wrong column": ({"data.columns": {"text": "body"}}, "no column 'body' (data.columns.text); it has text"),
        "too long": ({"data.max_length": 100}, "data.max_length: 100 is more than the model's 64 positions"),
        "model type": ({"config": {"model_type": "lama"}}, "model.config: no model can be built"),
        "config key": ({"config": {"model_type": "llama", "hiden_size": 8}}, "model.config: hiden_size: unknown"),
        "output is a run": ({"training.output_dir": str(folder / "old")}, "already holds a run (metrics.jsonl)"),
        "output is a file": ({"training.output_dir": str(folder / "blank.jsonl")}, "is a file"),
        "output not writable": ({"training.output_dir": "/proc/nowhere/out"}, "cannot be written"),
        "unit class": ({"sharding.unit_classes": ["LamaDecoderLayer"]}, "LlamaDecoderLayer"),
    }


def run_cases(folder: Path) -> dict[str, tuple[str, int]]:
    found = {}
    for name, (changes, _) in cases(folder).items():
        values = recipe_values(folder / "model", folder / "rows.jsonl", folder / "out", folder / "cache")
        if "config" in changes:
            values["model"] = {"config": changes.pop("config"), "tokenizer": str(folder / "model")}
        for key, value in changes.items():
            section, _, field = key.partition(".")
            values.setdefault(section, {})[field] = value
        found[name] = outcome(values)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    save_llama(folder / "model", TEXTS, tied=True)
    (folder / "empty").mkdir()
    (folder / "only-tokenizer").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "only-tokenizer" / name).write_text((folder / "model" / name).read_text())
    write_rows(folder / "rows.jsonl", ({"text": text} for text in TEXTS * 10))
    (folder / "empty.jsonl").write_text("")
    (folder / "blank.jsonl").write_text('{"text": " "}\n')
    (folder / "old").mkdir()
    (folder / "old/metrics.jsonl").write_text("{}\n")
    return folder


def test_bad_input(folder: Path) -> None:
    before = {path for path in folder.rglob("*") if "cache" not in path.parts}
    results = run_on_ranks(run_cases, 2, folder)
    for name, (_, message) in cases(folder).items():
        for found in results:
            text, exit_code = found[name]
            assert message in text, (name, text)
            assert exit_code == 2, name
        assert len({found[name] for found in results}) == 1, (name, [found[name] for found in results])
    after = {path for path in folder.rglob("*") if "cache" not in path.parts}
    assert after == before, "something was left behind"
