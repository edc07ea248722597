"""The samples of a run: `num_epochs` counts each as often as it says, `max_steps` fills every step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from toolkit.data.samples.samples import IGNORED
from toolkit.recipe.recipe import Recipe
from toolkit.recipe.schema import steps_of_run
from toolkit.run.stages.rows import build_windows, num_positions

NINE = 9


class Numbered:
    """Nine samples of one token, the sample's number, which is its target."""

    def __len__(self) -> int:
        return NINE

    def batch(self, numbers: Sequence[int]) -> dict[str, torch.Tensor]:
        ids = torch.tensor([[number] for number in numbers])
        return {"input_ids": ids, "labels": ids.clone()}


def learned(ranks: int, accumulation: int, **length: Any) -> list[list[int]]:
    """The samples of each step over all ranks, each as often as it is learned."""
    recipe = Recipe.from_mapping(
        {
            "model": {"name_or_path": "a/b"},
            "data": {"train": "a.jsonl", "max_length": 8},
            "optimizer": {"learning_rate": 1e-3},
            "training": {"output_dir": "out", "gradient_accumulation_steps": accumulation, **length},
        }
    )
    data: Any = SimpleNamespace(train=Numbered(), stream=None)
    size = recipe.training.micro_batch_size * accumulation * ranks
    num_steps = steps_of_run(recipe.training, NINE, size)
    loaders = [build_windows(recipe, data, num_steps, accumulation, rank, ranks) for rank in range(ranks)]
    return [
        [
            int(label)
            for window in windows
            for batch in window
            for label in batch["labels"].flatten()
            if label != IGNORED
        ]
        for windows in zip(*loaders, strict=True)
    ]


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 2), (2, 1), (2, 2), (4, 3)])
@pytest.mark.parametrize("epochs", [1, 3])
def test_epochs_learn_each_sample_as_often_as_they_say(ranks: int, accumulation: int, epochs: int) -> None:
    """Places of the last step stay empty if nine samples do not fill it, on every rank in as many micro-batches."""
    steps = learned(ranks, accumulation, micro_batch_size=1, num_epochs=epochs)
    assert len(steps) == -(-NINE * epochs // (ranks * accumulation))
    assert sorted(itertools.chain(*steps)) == sorted(epochs * list(range(NINE)))


def test_max_steps_fills_every_step_with_samples_of_the_next_epoch() -> None:
    steps = learned(2, 1, micro_batch_size=1, max_steps=5)
    assert [len(step) for step in steps] == [2] * 5
    assert set(itertools.chain(*steps)) == set(range(NINE))


def test_steps_of_own_samples_are_whole() -> None:
    """Nine completions fill two steps of six: the second goes on with prompts of the next epoch, and counts them."""
    values: dict[str, Any] = {
        "model": {"name_or_path": "a/b"},
        "data": {"train": "a.jsonl", "max_length": 16},
        "objective": {"kind": "grpo", "group_size": 3, "max_new_tokens": 8, "rewards": [{"name": "x", "match": "a"}]},
        "optimizer": {"learning_rate": 1e-3},
        "training": {"output_dir": "out", "num_epochs": 1},
    }
    assert num_positions(Recipe.from_mapping(values), NINE, 12) == 12
    assert num_positions(Recipe.from_mapping(values | {"objective": {}}), NINE, 12) == NINE
