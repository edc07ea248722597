"""Few rows of settings in which every pair of values that may go together stands at least once."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Pair = frozenset[tuple[str, Any]]

TRIES = 12
"""Rows that are drawn at random for each pair of values, to choose from."""


def covering_array(factors: Mapping[str, Sequence[Any]], is_allowed: Callable[[Row], bool], seed: int = 0) -> list[Row]:
    """Rows of one value of each factor. Greedy; the same for the same seed.

    Args:
        is_allowed: whether a row's values go together.
    """
    draw = random.Random(seed)
    drawn = [(row, pairs_of(row)) for row in _drawn(factors, draw) if is_allowed(row)]
    missing = set().union(*(pairs for _, pairs in drawn))
    found: list[Row] = []
    while missing:
        best, pairs = max(drawn, key=lambda one: len(one[1] & missing))
        found.append(best)
        missing -= pairs
    return found


def pairs_of(row: Row) -> set[Pair]:
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def _drawn(factors: Mapping[str, Sequence[Any]], draw: random.Random) -> Iterator[Row]:
    """Rows at random; for each pair of values as many, with these two."""
    for (one, ones), (other, others) in itertools.combinations(factors.items(), 2):
        for value, another in itertools.product(ones, others):
            for _ in range(TRIES):
                row = {name: draw.choice(list(values)) for name, values in factors.items()}
                yield {**row, one: value, other: another}
