"""Replaces a module's forward temporarily and for one thread."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary


@dataclass
class _Replaced:
    """A module's own forward, and the ones that threads have replaced it by."""

    own: Callable[..., Any]
    was_set: bool
    by_thread: dict[int, Callable[..., Any]] = field(default_factory=dict)


_replaced_now: WeakKeyDictionary[Any, _Replaced] = WeakKeyDictionary()


def own_forward(module: Any) -> Callable[..., Any]:
    """Returns the module's own forward, even if threads have replaced it."""
    found = _replaced_now.get(module)
    return module.forward if found is None else found.own


@contextmanager
def replaced(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Replaces the module's forward in this thread; its hooks stay.

    Micro-batches that run by block are all inside their forwards at the same time, one running and the others waiting,
    and each has a forward of its own.
    """
    found = _replaced_now.get(module)
    if found is None:
        found = _replaced_now[module] = _Replaced(module.forward, "forward" in module.__dict__)
        module.forward = _dispatch_by_thread(found)
    thread = threading.get_ident()
    found.by_thread[thread] = forward
    try:
        yield
    finally:
        del found.by_thread[thread]
        if not found.by_thread:
            del _replaced_now[module]
            del module.forward
            if found.was_set:
                module.forward = found.own


def _dispatch_by_thread(found: _Replaced) -> Callable[..., Any]:
    @functools.wraps(found.own)
    def run(*args: Any, **kwargs: Any) -> Any:
        return found.by_thread.get(threading.get_ident(), found.own)(*args, **kwargs)

    return run
