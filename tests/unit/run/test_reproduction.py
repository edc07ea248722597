"""How far two exports are from each other, and what of a stranger's export is refused before anything is trained."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import refusals

from toolkit.cli.commands import reproduce as command
from toolkit.cli.commands.reproduce import _recipe_of
from toolkit.errors import BadInputError
from toolkit.recipe.recipe import Recipe
from toolkit.run.folder.export_origin import Origin, named_sources
from toolkit.run.folder.reproduction import Difference, difference, require_weights

A = {"a": torch.tensor([1.0, -4.0]), "b": torch.tensor([math.nan, 0.0])}


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({}, Difference(2, 0, 0.0, "")),  # what is not a number has bits, too
        ({"a": torch.tensor([1.5, -4.0])}, Difference(2, 1, 0.125, "a")),
        ({"b": torch.tensor([math.nan, -0.0])}, Difference(2, 1, math.inf, "b")),
        ({"a": torch.tensor([1.0, -4.0]).bfloat16()}, Difference(2, 1, math.inf, "a")),
        ({"a": torch.tensor([1.0])}, Difference(2, 1, math.inf, "a")),
        ({"c": torch.zeros(1)}, Difference(2, 1, math.inf, "c")),
    ],
)
def test_a_difference_is_that_of_bits(tmp_path: Path, other: dict[str, torch.Tensor], expected: Difference) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    save_file(A, tmp_path / "one" / "model.safetensors")
    first, *rest = sorted({**A, **other})  # in two files, as an export of another size would be
    whole = {**A, **other}
    save_file({first: whole[first]}, tmp_path / "other" / "model-00001-of-00002.safetensors")
    save_file({name: whole[name] for name in rest}, tmp_path / "other" / "model-00002-of-00002.safetensors")
    assert difference(tmp_path / "one", tmp_path / "other") == expected


def test_signs_of_zero_are_told_apart(tmp_path: Path) -> None:
    for name, zero in (("one", 0.0), ("other", -0.0)):
        (tmp_path / name).mkdir()
        save_file({"a": torch.tensor([zero, 2.0])}, tmp_path / name / "model.safetensors")
    assert difference(tmp_path / "one", tmp_path / "other") == Difference(1, 1, 0.0, "a")


RIGHT: dict[str, Any] = {
    "recipe": "",
    "ranks": 1,
    "device": "cpu",
    "strategy": "ddp",
    "precision": "no",
    "data": "",
    "content": None,
    "base": None,
    "teacher": None,
    "versions": {"torch": "2.13.0"},
}


@pytest.fixture
def export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "export").mkdir()
    monkeypatch.setattr(command, "_train_again", lambda *_: pytest.fail("it trains"))
    return tmp_path / "export"


def write_origin(export: Path, **fields: Any) -> None:
    (export / "training.json").write_text(json.dumps({**RIGHT, **fields}))


def test_everything_in_a_strangers_file_is_typed_and_bounded(export: Path) -> None:
    """Each field by another type, too large, or with a line break; the file by a FIFO, depth and size."""
    text = Recipe.load("quickstart").to_yaml()
    write_origin(export, recipe=text)
    assert Origin.read(export).ranks == 1, "of a version without the later fields"
    wrong: dict[str, list[Any]] = {
        "recipe": [1, None, ["a"], "a: &x [1]\nb: *x", "x" * 2**21, "a: [", "\0"],
        "ranks": [100_000, 0, -1, "1", "--config_file=/tmp/x", 1.5, True, None, 10**400],
        "device": ["mps", "cpu\n", 1, None],
        "strategy": ["--config_file=/tmp/x", "zero4", "", 3, "ddp\nx", "d" * 300],
        "precision": ["fp8", "no\ntraining: {output_dir: evil}", False],
        "data": [1, None, "a" * 201, "a\nb", "\x1b[2J"],
        "content": [1, "a" * 201],
        "base": [{}, "\x7f"],
        "teacher": [["a"]],
        "adapter": [0],
        "scorer": [0.5],
        "folders": ["model", [1], ["a" * 201], {"a": "b"}],
        "versions": [
            None,
            ["torch"],
            {"torch": 2},
            {"a" * 201: "b"},
            {"a": "b\nreproduced"},
            {str(n): "" for n in range(101)},
        ],
    }
    found = []
    for field, values in wrong.items():
        for value in values:
            write_origin(export, **{"recipe": text, field: value})
            outcome = refusals.toolkit("reproduce", "export", "--to", "again")
            if problems := outcome.problems("training.json"):
                found.append((field, str(value)[:40], problems, outcome.told[-200:]))
    right = json.dumps({**RIGHT, "recipe": text}).encode()
    for content in (right + b" " * 2**20, b"", b"[", b"{}", b"[" * 200_000, b"\xff", b"null", b"[1]", b" " * 2**21):
        (export / "training.json").write_bytes(content)
        outcome = refusals.toolkit("reproduce", "export", "--to", "again")
        if problems := outcome.problems("training.json"):
            found.append(("content", str(content[:40]), problems, outcome.told[-200:]))
    (export / "training.json").unlink()
    os.mkfifo(export / "training.json")
    found += [
        ("fifo", "", each, "") for each in refusals.toolkit("reproduce", "export", "--to", "again").problems("export")
    ]
    assert found == []
    assert not (export.parent / "again").exists()


def test_a_strangers_recipe_does_not_say_where_and_on_how_many_processes(export: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    recipe = Recipe.load("quickstart", ["training.output_dir=/evil", "data.cache_dir=/evil", "export.push_to_hub=a/b"])
    write_origin(export, recipe=recipe.to_yaml(), ranks=4 * cores + 1)
    outcome = refusals.toolkit("reproduce", "export", "--to", "again")
    assert outcome.problems(f"and this machine has {cores} cores; choose a number, for example --cpu {cores}") == []
    for to in ("again", "123", "null", "a: b", 'it\'s "one"', "~"):
        found = _recipe_of(Origin.read(export), export, Path(to), ["training.max_steps=7"])
        assert found.training.output_dir == to
        assert found.training.max_steps == 7
        assert found.data.cache_dir is None
        assert found.export.push_to_hub is None
    outcome = refusals.toolkit("reproduce", "export", "--to", "again", "training.output_dir=else")
    assert outcome.problems("training.output_dir=else: --to names the folder of the new run; leave this out") == []


@pytest.mark.parametrize(
    ("resume", "told"),
    [
        ("outputs/mine", "the run went on from the last checkpoint of"),  # by now perhaps its own last one
        ("outputs/mine/checkpoints/step_00000100", None),
        ("never", None),
    ],
)
def test_a_run_that_went_on_from_a_runs_last_checkpoint_has_to_name_it(
    resume: str, told: str | None, export: Path
) -> None:
    write_origin(export, recipe=Recipe.load("quickstart").to_yaml())
    words = [f"checkpoint.resume={resume}"]
    if told is None:
        assert _recipe_of(Origin.read(export), export, Path("again"), words).checkpoint.resume.endswith(resume)
    else:
        with pytest.raises(BadInputError, match=told):
            _recipe_of(Origin.read(export), export, Path("again"), words)


def test_folders_of_another_machine_are_not_looked_for_on_the_hub(
    export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base, a tokenizer, a teacher or rows; of exports that recorded what was a folder, and of older ones."""
    for module in ("toolkit.cli.commands.reproduce.settle_hub", "toolkit.run.folder.reproduction.require_same_inputs"):
        monkeypatch.setattr(module, lambda *_: pytest.fail("the hub is asked"))
    base = ["model.config=null", "model.train_tokenizer_vocab_size=null"]
    fields = {
        "model.name_or_path": [*base, "model.name_or_path=NAME"],
        "model.tokenizer": [*base, "model.name_or_path=org/base", "model.tokenizer=NAME"],
        "data.train": [*base, "model.name_or_path=org/base", "data.train=NAME"],
        "data.validation": [
            *base,
            "model.name_or_path=org/base",
            "data.validation=NAME",
            "data.validation_fraction=null",
        ],
    }
    for field, words in fields.items():
        folder = export.parent / "there" / "mine"
        folder.mkdir(parents=True, exist_ok=True)
        here = Recipe.load("quickstart", [word.replace("NAME", str(folder)) for word in words])
        assert (field, str(folder), False) in named_sources(here)
        named = Recipe.load("quickstart", [word.replace("NAME", "mine") for word in words]).to_yaml()
        write_origin(export, recipe=named, folders=["mine"])
        outcome = refusals.toolkit("reproduce", "export", "--to", "again")
        assert outcome.problems(f"{field}: the export was trained from the folder 'mine' of its own machine") == [], (
            field
        )
        write_origin(export, recipe=named)
        outcome = refusals.toolkit("reproduce", "export", "--to", "again")
        assert (
            outcome.problems(f"{field}: 'mine' was a folder of the machine that trained the export, or is a name") == []
        )
        # Both ways that the errors name: a folder here, or the hub's.
        for value, folders in ((str(folder), ["mine"]), (str(folder), None), ("mine", None)):
            write_origin(export, recipe=named, folders=folders)
            found = _recipe_of(Origin.read(export), export, Path("again"), [f"{field}={value}"])
            assert (field, value) in [(each, name) for each, name, _ in named_sources(found)]
    write_origin(
        export, recipe=Recipe.load("quickstart", [*base, "model.name_or_path=org/base"]).to_yaml(), folders=["other"]
    )
    assert _recipe_of(Origin.read(export), export, Path("again"), []).model.name_or_path == "org/base"


def test_an_export_without_weights_is_not_equal_to_anything(export: Path) -> None:
    with pytest.raises(BadInputError, match="has no weights"):
        require_weights(export)
    (export / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(BadInputError, match="cannot be read"):
        require_weights(export)
    (export / "model.safetensors").unlink()
    os.mkfifo(export / "model.safetensors")
    with pytest.raises(BadInputError, match="is not a regular file"):
        require_weights(export)
    (export / "model.safetensors").unlink()
    save_file(A, export / "model.safetensors")
    require_weights(export)
