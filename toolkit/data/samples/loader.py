"""Puts samples in one global order and distributes them to ranks and micro-batches.

The order is a function of the seed alone. Position p of the run is sample `order[p mod N]` of epoch
`p // N`; optimizer step s trains on positions [s G, (s + 1) G), with G = micro-batch size x ranks x
accumulation steps. Which rank and micro-batch holds a position does not matter, because the loss is the
mean over the target tokens of the step.
"""

from __future__ import annotations

import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from toolkit import ranks
from toolkit.data.samples.samples import IGNORED, Batch, Samples
from toolkit.data.samples.sequence_parts import WHOLE, Part
from toolkit.user_function import made_while_training


class EpochOrder:
    """The global order of samples.

    Args:
        num_samples: N.
        seed: seed of the shuffling, which differs in each epoch.
        shuffle: whether to shuffle; otherwise every epoch is in the data set's order.
    """

    def __init__(self, num_samples: int, seed: int, shuffle: bool) -> None:
        self.num_samples = num_samples
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._order: Sequence[int] | np.ndarray = range(num_samples)

    def __getitem__(self, position: int) -> int:
        """Returns the sample at a position of the run."""
        epoch, offset = divmod(position, self.num_samples)
        if self._shuffle and epoch != self._epoch:
            # The pair is hashed: with seed + epoch, epoch 1 of seed 0 would be epoch 0 of seed 1, and
            # torch's generator uses only 32 bits of a seed.
            mixed = int.from_bytes(hashlib.sha256(f"{self._seed}/{epoch}".encode()).digest()[:4])
            generator = torch.Generator().manual_seed(mixed)
            # An array: as a list of numbers, 10 million samples would take 0.4 GB on every rank.
            self._order = torch.randperm(self.num_samples, generator=generator).numpy()
            self._epoch = epoch
        return int(self._order[offset])

    def first(self, num_positions: int) -> list[int]:
        """Returns the samples at the first positions of a run, each once, in the data set's order."""
        if num_positions >= self.num_samples:
            return list(range(self.num_samples))
        return sorted(self[position] for position in range(num_positions))


@dataclass(kw_only=True, eq=False)
class Loader(ABC):
    """Yields, per optimizer step, this rank's micro-batches.

    Rank r's m-th micro-batch of the step from position P on holds the B positions from P + (m W + r) B on.

    Attributes:
        num_positions: length of the run in samples; may end inside an epoch or span several.
        rank: this rank of `world_size`; if a group of ranks shares its rows, the number of the group among the groups.
        part: the part of the rows that this rank holds.
    """

    num_positions: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    rank: int
    world_size: int
    part: Part = WHOLE
    start: tuple[int, int] = field(default=(0, 0), init=False)
    """The optimizer step, and the position, that the run resumes after."""

    fresh = False

    @abstractmethod
    def __iter__(self) -> Iterator[list[Batch]]: ...

    @abstractmethod
    def state_at(self, samples: int) -> Any:
        """Returns the state that `resume` needs besides the position after `samples`, for a checkpoint."""

    @abstractmethod
    def epoch_at(self, step: int) -> float:
        """Returns the passes over the data after `step` optimizer steps."""

    def resume(self, step: int, samples: int, state: Any) -> None:
        """Resumes after `step` optimizer steps of any size at position `samples`."""
        self.start = (step, samples)

    @property
    def samples_per_step(self) -> int:
        """G, the samples of a step over all ranks."""
        return self.micro_batch_size * self.world_size * self.gradient_accumulation_steps

    def samples_at(self, step: int) -> int:
        """Returns the samples seen by all ranks after `step` optimizer steps."""
        start_step, start = self.start
        return min(start + (step - start_step) * self.samples_per_step, self.num_positions)

    def step_starts(self) -> range:
        """Returns the first position of each optimizer step that is left."""
        return range(self.start[1], self.num_positions, self.samples_per_step)

    def micro_batches(self, step_start: int) -> list[range]:
        """Returns the positions of each of this rank's micro-batches in the step at `step_start`."""
        size, of_all = self.micro_batch_size, self.micro_batch_size * self.world_size
        first = step_start + self.rank * size
        return [range(start, start + size) for start in range(first, step_start + self.samples_per_step, of_all)]


@dataclass(eq=False)
class TrainLoader(Loader):
    """Yields the micro-batches of samples that are known beforehand, epoch by epoch.

    After the last sample of the run micro-batches get smaller, and then consist of one row without targets,
    so that every rank runs the same collectives.

    Attributes:
        samples: makes micro-batches.
        seed, shuffle: see `EpochOrder`.
    """

    samples: Samples
    seed: int = field(kw_only=True)
    shuffle: bool = field(kw_only=True)

    def __post_init__(self) -> None:
        self.order = EpochOrder(len(self.samples), self.seed, self.shuffle)

    def state_at(self, samples: int) -> None:
        """Returns None, because a position is the whole state."""

    def epoch_at(self, step: int) -> float:
        return self.samples_at(step) / self.order.num_samples

    def __iter__(self) -> Iterator[list[Batch]]:
        rows = _Rows(self.samples, self.part)
        loader: DataLoader[Batch] = DataLoader(
            rows,
            batch_sampler=(
                [self.order[position] for position in positions if position < self.num_positions]
                for start in self.step_starts()
                for positions in self.micro_batches(start)
            ),
            collate_fn=rows.collate,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # otherwise it draws from the model's, once more after each resume
        )
        batches = iter(loader)
        while window := list(itertools.islice(batches, self.gradient_accumulation_steps)):
            yield window


def evaluation_batches(
    samples: Samples, micro_batch_size: int, rank: int, world_size: int, limit: int | None, part: Part = WHOLE
) -> Iterator[Batch]:
    """Yields this rank's share of a data set: each sample once over all ranks, in as many batches on each rank."""
    rows = _Rows(samples, part)
    num_samples = len(samples) if limit is None else min(limit, len(samples))
    # All ranks run every round: a rank that has no sample left still takes part in the collectives.
    for round_start in range(0, num_samples, micro_batch_size * world_size):
        start = round_start + rank * micro_batch_size
        numbers = list(range(start, min(start + micro_batch_size, num_samples)))
        yield rows.collate(rows.__getitems__(numbers))


class _Rows(Dataset[Any]):
    """Reads a micro-batch's samples at once."""

    def __init__(self, samples: Samples, part: Part) -> None:
        self._samples, self._part = samples, part

    def __len__(self) -> int:
        return len(self._samples)

    # torch's fetcher calls this once for a batch, in place of `__getitem__` for each sample.
    def __getitems__(self, numbers: list[int]) -> Batch:
        return self._part.of(self._samples.batch(numbers) if numbers else without_targets(self._samples.batch([0])))

    def collate(self, batch: Any) -> Batch:
        """Returns `batch`, because `__getitems__` makes whole micro-batches."""
        return batch  # type: ignore[no-any-return]


def without_targets(batch: Batch) -> Batch:
    """Returns the batch with nothing to learn, for a rank that has no sample left but must run the collectives."""
    # It repeats samples, so neither its targets nor its tokens count again.
    none = torch.zeros(len(batch["input_ids"]), dtype=torch.long)
    lengths = {"lengths": none, **({"target_lengths": none} if "target_lengths" in batch else {})}
    return {**batch, "labels": torch.full_like(batch["labels"], IGNORED), **lengths}


# The next item is made in a thread while the current one is used


T = TypeVar("T")


def ahead(items: Iterator[T], name: str = "data") -> Generator[T, None, None]:
    """Yields the same items, none of them None, each made while the one before is used; an error comes in its place.

    If it is closed early, it waits for the item that is being made, and closes `items`.
    """
    # One worker: `items` is a single iterator, which two threads may not advance at once.
    with ThreadPoolExecutor(1, name, initializer=ranks.on_this_device(made_while_training)) as thread:
        try:
            coming = thread.submit(next, items, None)
            while (item := coming.result()) is not None:
                # Before the yield, so that the next item is made while the caller uses this one.
                coming = thread.submit(next, items, None)
                yield item
        finally:
            # The thread first: a generator that is being advanced cannot be closed.
            thread.shutdown(wait=True)
            if hasattr(items, "close"):
                items.close()


def with_next(items: Iterator[T]) -> Iterator[tuple[T, T | None]]:
    """Yields each item with the one after it, and the last with None."""
    item = next(items, None)
    while item is not None:
        following = next(items, None)
        yield item, following
        item = following
