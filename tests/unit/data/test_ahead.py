"""Items are made ahead, in order; errors come in their place; an early end waits and closes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest

from toolkit.data.samples.loader import ahead, with_next


def test_the_next_item_is_made_while_one_is_used() -> None:
    made = [threading.Event() for _ in range(3)]

    def items() -> Iterator[int]:
        for number, event in enumerate(made):
            event.set()
            yield number

    coming = ahead(items())
    assert next(coming) == 0
    assert made[1].wait(timeout=100), "item 1 must be made before anybody asks for it"
    assert list(coming) == [1, 2]


def test_an_error_comes_in_its_place() -> None:
    def items() -> Iterator[int]:
        yield from (1, 2)
        raise ValueError("row 3")

    coming = ahead(items())
    assert (next(coming), next(coming)) == (1, 2)
    with pytest.raises(ValueError, match="row 3"):
        next(coming)


def test_an_early_end_closes_the_source_and_leaves_no_thread() -> None:
    closed = []

    def items() -> Iterator[int]:
        try:
            yield from range(1, 1000)
        finally:
            closed.append(True)

    threads = threading.active_count()
    with contextlib.closing(ahead(items())) as coming:
        assert next(coming) == 1
    assert closed == [True]
    assert threading.active_count() == threads


def test_each_item_with_the_one_after_it() -> None:
    assert list(with_next(iter("abc"))) == [("a", "b"), ("b", "c"), ("c", None)]
    assert list(with_next(iter(""))) == []
