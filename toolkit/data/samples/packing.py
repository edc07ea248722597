"""Decides which part of which row goes into which sample.

Long rows are cut first; then best-fit decreasing fills samples of `max_length` tokens. Both are
functions of the lengths alone, so every rank and every run gets the same result. Best-fit packing keeps
rows whole, unlike cutting a stream of tokens: Ding et al., arXiv 2404.10830.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Pieces:
    """Parts of rows, N of them; each array is (N,).

    Attributes:
        row: numbers of rows, over all sources.
        start: first token.
        stop: one after the last token.
    """

    row: Ints
    start: Ints
    stop: Ints

    def __len__(self) -> int:
        return len(self.row)

    def lengths(self) -> Ints:
        return self.stop - self.start

    def place(self, number: int) -> tuple[int, int, int]:
        """Returns row, start and stop of one piece."""
        return int(self.row[number]), int(self.start[number]), int(self.stop[number])

    def take(self, numbers: Any) -> Pieces:
        return Pieces(self.row[numbers], self.start[numbers], self.stop[numbers])


Turns = Mapping[int, list[int]]
"""Number of a row of several samples -> the positions after the last token of each."""

NO_TURNS: Turns = MappingProxyType({})


def samples_of(rows: Ints, lengths: Ints, turns: Turns = NO_TURNS) -> Pieces:
    """Returns a piece for each row, or for each answer of a row in `turns`; `lengths` has all rows, (rows,)."""
    if not turns:
        return Pieces(rows, np.zeros_like(rows), lengths[rows])
    ends = [turns.get(row, [int(lengths[row])]) for row in rows.tolist()]
    starts = [start for of_row in ends for start in (0, *of_row[:-1])]
    stops = [stop for of_row in ends for stop in of_row]
    row = np.repeat(rows, [len(of_row) for of_row in ends])
    return Pieces(row, np.array(starts, dtype=np.int64), np.array(stops, dtype=np.int64))


def whole(rows: Ints, lengths: Ints, max_length: int, turns: Turns = NO_TURNS) -> Pieces:
    """Returns a piece for each sample of the rows: its first `max_length` tokens."""
    pieces = samples_of(rows, lengths, turns)
    return Pieces(pieces.row, pieces.start, np.minimum(pieces.stop, pieces.start + max_length))


def split(rows: Ints, lengths: Ints, max_length: int, turns: Turns = NO_TURNS) -> Pieces:
    """Cuts the samples of rows into pieces of `max_length` tokens.

    A piece starts with the last token of the piece before, so that its own first token is predicted too:
    together the pieces hold every target of the sample once.
    """
    pieces = samples_of(rows, lengths, turns)
    # Pieces share one token, and a first token is not a target: L - 1 targets in steps of max_length - 1.
    stride = max_length - 1
    counts = np.maximum(1, -(-(pieces.lengths() - 1) // stride))
    first = np.cumsum(counts) - counts
    start = np.repeat(pieces.start, counts) + (np.arange(counts.sum()) - np.repeat(first, counts)) * stride
    return Pieces(np.repeat(pieces.row, counts), start, np.minimum(start + max_length, np.repeat(pieces.stop, counts)))


def best_fit(lengths: Ints, capacity: int) -> Ints:
    """Returns the sample of each piece, (N,), by best-fit decreasing; samples are numbered by their first piece.

    Each piece, longest first, goes to the sample where the least room is left over, and among equal ones to
    the sample that was added to last; equal lengths keep their order.
    It takes N log N for sorting, and then a step for each piece: rooms are kept by size, and sizes in use as
    the bits of one integer.

    Args:
        lengths: lengths of the pieces, (N,), each at most `capacity`.
    """
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0
    num_samples = 0
    sample_of = np.empty(len(lengths), dtype=np.int64)
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        # The lowest bit left is the smallest room that fits.
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            sample = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            room, sample = capacity, num_samples
            num_samples += 1
        sample_of[piece] = sample
        rest = room - length
        if rest > 0:
            by_room[rest].append(sample)
            rooms |= 1 << rest
    return _by_first_piece(sample_of, num_samples)


def by_sample(pieces: Pieces, sample_of: Ints) -> tuple[Pieces, list[int]]:
    """Returns the pieces in the order of their samples, and for each sample the number after its last piece."""
    # Stable: within a sample the pieces keep the order of the rows.
    in_order = pieces.take(np.argsort(sample_of, kind="stable"))
    return in_order, np.cumsum(np.bincount(sample_of)).tolist()


def _by_first_piece(sample_of: Ints, num_samples: int) -> Ints:
    """Renumbers samples in the order of the first piece in each."""
    first = np.full(num_samples, len(sample_of), dtype=np.int64)
    np.minimum.at(first, sample_of, np.arange(len(sample_of)))
    rank = np.empty(num_samples, dtype=np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(num_samples)
    return rank[sample_of]


def mixed(counts: list[int], weights: list[float]) -> list[tuple[Ints, Ints]]:
    """Mixes rows of weighted sources into one order; returns each source's places in the order and its rows there.

    The k-th row of a source of weight w comes at time (k + 1/2) / w, so that every stretch of the order
    holds the sources in proportion to their weights. The order ends when every source has been seen
    whole; a source that ends earlier starts again.
    """
    end = max(count / weight for count, weight in zip(counts, weights, strict=True))
    numbers = [np.arange(round(weight * end)) for weight in weights]
    times = np.concatenate([(number + 0.5) / weight for number, weight in zip(numbers, weights, strict=True)])
    places = np.empty(len(times), dtype=np.int64)
    # Stable: at equal times the earlier source's row comes first, as in stream.py.
    places[np.argsort(times, kind="stable")] = np.arange(len(times))
    ends = np.cumsum([len(number) for number in numbers])
    return [
        (places[stop - len(number) : stop], number % count)
        for stop, number, count in zip(ends, numbers, counts, strict=True)
    ]
