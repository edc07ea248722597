"""What `import toolkit` offers in Python and in notebooks."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

import toolkit
from toolkit import Recipe
from toolkit.errors import BadInputError, RecipeError
from toolkit.run.shown.outcome import result_of

METRICS = [
    {"split": "eval", "step": 0, "loss": 7.0},
    *({"split": "train", "step": step, "loss": 7.0 - step} for step in (1, 2, 3)),
    {"split": "eval", "step": 3, "loss": None},
]


def test_the_package_shows_what_there_is() -> None:
    assert {"finetune", "export", "generate", "evaluate", "plan", "Recipe"} <= set(dir(toolkit))
    importlib.import_module("toolkit.generation.text.command")
    for name in toolkit.__all__:
        assert getattr(toolkit, name) is not None
        assert name == "__version__" or callable(getattr(toolkit, name)), "a room of the same name would hide it"
    for room in ("toolkit.sharding", "toolkit.planning"):
        package = importlib.import_module(room)
        assert all(callable(getattr(package, name)) for name in package.__all__), room


def test_overrides_as_a_mapping_are_values() -> None:
    texts = Recipe.load("quickstart", ["training.max_steps=5", "optimizer.learning_rate=1e-5", "logging.every_steps=3"])
    mapping = {
        "training.max_steps": 5,
        "optimizer.learning_rate": 1e-5,
        "logging": {"every_steps": 3, "held_out_samples": 3},
    }
    assert Recipe.load("quickstart", mapping).model_dump() == texts.model_dump()
    with pytest.raises(RecipeError, match="did you mean 'max_steps'"):
        Recipe.load("quickstart", {"training.max_stepz": 5})


def test_finetune_takes_a_name_and_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Recipe] = []

    def started(recipe: Recipe) -> Any:
        loaded.append(recipe)
        raise KeyboardInterrupt

    monkeypatch.setattr("toolkit.run.run.open_run", started)
    with pytest.raises(KeyboardInterrupt):
        toolkit.finetune("quickstart", {"training.max_steps": 5})
    assert loaded == [Recipe.load("quickstart", ["training.max_steps=5"])]
    with pytest.raises(BadInputError, match="is loaded already"):
        toolkit.finetune(loaded[0], ["training.max_steps=5"])


def test_a_result_is_one_line(tmp_path: Path) -> None:
    result = result_of(tmp_path, METRICS, None)
    assert repr(result) == f"FinetuneResult({str(tmp_path)!r}, 3 steps, held-out loss 7.0000 -> not finite)"
