"""What is needed next is made by a thread while what is here is used."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from toolkit import ranks

T = TypeVar("T")


def ahead(items: Iterator[T], name: str = "data") -> Generator[T, None, None]:
    """The same items, none of them None, each made while the one before is used; an error comes in its place.

    Closed early, it waits for the item that is being made, and closes `items`.
    """
    # One worker: `items` is a single iterator, which two threads may not advance at once.
    with ThreadPoolExecutor(1, name, initializer=ranks.on_this_device(lambda: None)) as thread:
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
    """Each item with the one after it; None after the last."""
    item = next(items, None)
    while item is not None:
        following = next(items, None)
        yield item, following
        item = following
