"""toolkit.data.samples.loader: one global order, whatever the ranks, micro-batches and accumulation."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from toolkit.data.samples.loader import EpochOrder, TrainLoader, evaluation_batches
from toolkit.data.samples.samples import IGNORED


class Numbered:
    """Samples of two tokens, of which the second is the sample's number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def batch(self, numbers: Sequence[int]) -> dict[str, torch.Tensor]:
        ids = torch.tensor([[number, number] for number in numbers])
        labels = torch.tensor([[IGNORED, number] for number in numbers])
        return {"input_ids": ids, "labels": labels, "position_ids": torch.tensor([[0, 1]] * len(numbers))}


def trained(batch: dict[str, torch.Tensor]) -> list[int]:
    return [int(label) for label in batch["labels"][:, 1] if label != IGNORED]


def steps(num_positions: int, ranks: int, micro: int, accumulation: int, shuffle: bool = True) -> list[list[int]]:
    """Sample numbers of each optimizer step, over all ranks."""
    loaders = [
        TrainLoader(
            Numbered(11),
            num_positions=num_positions,
            micro_batch_size=micro,
            gradient_accumulation_steps=accumulation,
            rank=rank,
            world_size=ranks,
            seed=3,
            shuffle=shuffle,
        )
        for rank in range(ranks)
    ]
    found = []
    for windows in zip(*loaders, strict=True):
        assert all(len(window) == accumulation for window in windows)
        found.append(sorted(number for window in windows for batch in window for number in trained(batch)))
    return found


def test_the_random_numbers_of_a_model_are_left_alone() -> None:
    """A run that goes on reads its rows anew, and draws the dropout that it would have drawn."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    steps(11, 1, 2, 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_samples_of_a_step_do_not_depend_on_the_split() -> None:
    expected = steps(24, ranks=1, micro=8, accumulation=1)
    assert [len(step) for step in expected] == [8, 8, 8]
    for ranks, micro, accumulation in [(1, 2, 4), (2, 4, 1), (2, 1, 4), (4, 2, 1), (4, 1, 2)]:
        assert steps(24, ranks, micro, accumulation) == expected


def test_each_epoch_holds_every_sample_once_in_another_order() -> None:
    order = EpochOrder(11, seed=3, shuffle=True)
    epochs = [[order[epoch * 11 + i] for i in range(11)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(11)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [EpochOrder(11, seed=3, shuffle=True)[22 + i] for i in range(11)] == epochs[2]
    assert [EpochOrder(11, seed=4, shuffle=True)[i] for i in range(11)] != epochs[0]


def test_unshuffled_is_the_data_sets_order() -> None:
    assert steps(11, 1, 4, 1, shuffle=False) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


@pytest.mark.parametrize(("ranks", "micro", "accumulation"), [(1, 4, 1), (2, 2, 2), (4, 2, 2), (3, 5, 1)])
def test_a_run_that_ends_inside_a_step_trains_each_sample_once(ranks: int, micro: int, accumulation: int) -> None:
    found = steps(11, ranks, micro, accumulation)
    assert sorted(number for step in found for number in step) == list(range(11))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("limit", [None, 7])
def test_evaluation_counts_each_sample_once_in_equally_many_batches(ranks: int, limit: int | None) -> None:
    parts = [list(evaluation_batches(Numbered(11), 2, rank, ranks, limit)) for rank in range(ranks)]
    assert len({len(part) for part in parts}) == 1
    seen = sorted(number for part in parts for batch in part for number in trained(batch))
    assert seen == list(range(limit or 11))
