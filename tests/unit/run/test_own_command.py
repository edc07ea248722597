"""The command in a run's report: the one that starts this run again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.cases import cases

from toolkit.pages.card import model_and_data
from toolkit.recipe.recipe import Recipe
from toolkit.run.folder.origin import own_command

TABLES = cases(__file__)

ROOT = Path(__file__).parents[3]


def opened(folder: Path, num_ranks: int, device: str, precision: str, asked: str | None) -> Any:
    return SimpleNamespace(
        accelerator=SimpleNamespace(num_processes=num_ranks, mixed_precision=precision),
        device=SimpleNamespace(type=device),
        output_dir=folder,
        plugin=SimpleNamespace(text="zero2+offload"),
        recipe=SimpleNamespace(training=SimpleNamespace(mixed_precision=asked)),
    )


@pytest.mark.parametrize(("device", "precision", "asked", "told"), TABLES["RUNS"])
def test_ranks_strategy_and_precision_are_those_of_the_run(
    device: str, precision: str, asked: str | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert own_command(opened(ROOT / "my run", 2, device, precision, asked)) == told
    assert own_command(opened(ROOT / "my run", 4, device, precision, asked)) == "", "each of two hosts has its own"


def test_the_title_names_the_model_and_the_data() -> None:
    values: dict[str, Any] = {
        "model": {"name_or_path": "meta/llama"},
        "data": {"train": ["/home/me/a.jsonl", "org/rows", "b.txt"], "max_length": 64},
        "optimizer": {"learning_rate": 1e-3},
        "training": {"max_steps": 1, "output_dir": "/home/me/out"},
    }
    assert (
        model_and_data(Recipe.from_mapping(values), "Llama") == "meta/llama fine-tuned on a.jsonl, org/rows and 1 more"
    )
    values["model"] = {"config": {"model_type": "llama"}, "train_tokenizer_vocab_size": 300}
    told = "LlamaForCausalLM trained on a.jsonl, org/rows and 1 more from random weights"
    assert model_and_data(Recipe.from_mapping(values), "LlamaForCausalLM") == told
