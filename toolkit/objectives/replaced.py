"""Another forward for a module, for a while and for one thread."""

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
    """What a module's forwards are now, thread by thread, and what its own is."""

    own: Callable[..., Any]
    was_set: bool
    by_thread: dict[int, Callable[..., Any]] = field(default_factory=dict)


_replaced_now: WeakKeyDictionary[Any, _Replaced] = WeakKeyDictionary()


def own_forward(module: Any) -> Callable[..., Any]:
    """The module's forward, whatever threads have replaced it by."""
    found = _replaced_now.get(module)
    return module.forward if found is None else found.own


@contextmanager
def replaced(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """The module with another forward in this thread; its hooks stay.

    Micro-batches that run by block are in the midst of their forwards at the same time, one at work and the others
    waiting, and each has a forward of its own.
    """
    found = _replaced_now.get(module)
    if found is None:
        found = _replaced_now[module] = _Replaced(module.forward, "forward" in module.__dict__)
        module.forward = _by_thread(found)
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


def _by_thread(found: _Replaced) -> Callable[..., Any]:
    @functools.wraps(found.own)
    def run(*args: Any, **kwargs: Any) -> Any:
        return found.by_thread.get(threading.get_ident(), found.own)(*args, **kwargs)

    return run
