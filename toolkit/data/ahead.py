"""Prefetches items in a thread while the current one is used."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from toolkit import ranks

T = TypeVar("T")


def ahead(items: Iterator[T], name: str = "data") -> Generator[T, None, None]:
    """Yields the same items, none of them None, each made while the one before is used; an error comes in its place.

    If it is closed early, it waits for the item that is being made, and closes `items`.
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
    """Yields each item with the one after it, and the last with None."""
    item = next(items, None)
    while item is not None:
        following = next(items, None)
        yield item, following
        item = following
