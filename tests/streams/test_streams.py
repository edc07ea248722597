"""Memory that a stream still reads is not handed to another, whatever the timing.

On CPU ranks, FSDP2 and the engine call torch.cpu's streams and events, which do nothing; here they keep count.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from offload_loops import Case, prepare, train
from ranks import run_on_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from toolkit.sharding import OffloadSettings


class Stream:
    """A stream that knows which work its next work comes after: {stream: number of operators}."""

    current: Stream

    def __init__(self, *_: Any, **__: Any) -> None:
        self.after: dict[Stream, int] = {self: 0}

    def record_event(self) -> Event:
        return Event(dict(self.after))

    def wait_event(self, event: Event) -> None:
        for stream, number in event.after.items():
            self.after[stream] = max(self.after.get(stream, 0), number)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


class Event:
    def __init__(self, after: dict[Stream, int] | None = None) -> None:
        self.after = after or {}

    def record(self) -> None:
        self.after = dict(Stream.current.after)

    def synchronize(self) -> None:
        """The host waits: what it lets go of afterwards is not the event's work any more."""


@contextlib.contextmanager
def entered(stream: Stream) -> Iterator[None]:
    before, Stream.current = Stream.current, stream
    try:
        yield
    finally:
        Stream.current = before


class Reuse(TorchDispatchMode):
    """Finds work on a freed reduced gradient that the next one, in the same memory, does not wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self._alive: dict[int, dict[Stream, tuple[int, str]]] = {}
        self._freed: list[dict[Stream, tuple[int, str]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if function.is_view:
            return out
        stream = Stream.current
        stream.after[stream] += 1
        for tensor in tree_leaves((args, kwargs, out)):
            if type(tensor) is torch.Tensor and tensor.untyped_storage()._cdata in self._alive:
                self._alive[tensor.untyped_storage()._cdata][stream] = stream.after[stream], str(function)
        return out

    def watch(self, flat: torch.Tensor) -> None:
        for work in self._freed:
            self.found |= {name for s, (number, name) in work.items() if Stream.current.after.get(s, 0) < number}
        self._freed.clear()
        storage = flat.untyped_storage()
        self._alive[storage._cdata] = {}
        weakref.finalize(storage, lambda key: self._freed.append(self._alive.pop(key)), storage._cdata)


def reduced_gradients(accumulation: int) -> set[str]:
    Stream.current = Stream()
    fakes = {"Stream": Stream, "Event": Event, "stream": entered, "current_stream": lambda *_: Stream.current}
    for name, fake in fakes.items():
        setattr(torch.cpu, name, fake)
    from toolkit.sharding.gloo import _ReduceScatter

    mode, allocate = Reuse(), _ReduceScatter.allocate

    def watched(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        flat = allocate(self, *args, **kwargs)
        if Stream.current is not default:  # the result, and not the input
            mode.watch(flat)
        return flat

    default = Stream.current
    _ReduceScatter.allocate = watched  # type: ignore[method-assign]
    accelerator, model, optimizer = prepare(Case(accumulation=accumulation), OffloadSettings(executor="cpu_torch"))
    with mode:
        train(Case(accumulation=accumulation), accelerator, model, optimizer, range(2))
    accelerator.state.fsdp_plugin.close()
    return mode.found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_reduced_gradients_have_been_read_before_their_memory_is_used_again(num_ranks: int) -> None:
    for found in run_on_ranks(reduced_gradients, num_ranks, 3):
        assert not found
