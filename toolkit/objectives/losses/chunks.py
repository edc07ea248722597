"""Loops over chunks of tokens, of which a plan runs one for all that are alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


def each_alike(slices: Sequence[slice]) -> Iterator[slice]:
    """Yields the slices of a loop over chunks, but only the first, second and last inside `one_for_all_alike`."""
    if _count_as is None or len(slices) <= 3:
        yield from slices
        return
    # The first makes the sums that the others add to, and the last may be shorter.
    for chosen, times in ((slices[0], 1), (slices[1], len(slices) - 2), (slices[-1], 1)):
        _count_as(times)
        yield chosen
    _count_as(1)


_count_as: Callable[[int], None] | None = None


@contextmanager
def one_for_all_alike(count_as: Callable[[int], None]) -> Iterator[None]:
    """Runs one chunk in place of all equal ones inside the `with` block. For a plan, which reads no results.

    Args:
        count_as: called with the number of chunks that the next operators stand for.
    """
    global _count_as
    _count_as = count_as
    try:
        yield
    finally:
        _count_as = None
