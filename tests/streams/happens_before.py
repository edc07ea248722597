"""A happens-before checker: finds what streams and threads do in no order, whatever the timing was.

On CPU ranks, FSDP2 and the offload engine call torch.cpu's streams and events, which do nothing. Here each stream and
each thread carries a vector clock (Lamport 1978, Mattern 1989). Two accesses of the same bytes, one of them a write,
race where no event, no wait and no hand-over between threads puts one before the other. So does the reuse of memory:
torch's caching allocator gives what is freed back to the stream that allocated it, and its next allocation may get it
at once, even if another stream still reads it.

`simulated.py` has a checker see a run.
"""

from __future__ import annotations

import functools
import linecache
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

import toolkit

Clock = dict["Timeline", int]

SHOWN = (f"{Path(toolkit.__file__).parent}/", "/_fully_shard/")
"""Folders of the code that a race is put down to."""


class Timeline:
    """A stream or a thread: what it does happens in order.

    Attributes:
        clock: of each timeline, how much has happened before what this one does next.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: Clock = {self: 0}

    def join(self, clock: Clock) -> None:
        """What comes next here comes after what `clock` knows of."""
        _raise_clock(self.clock, clock)

    def begin(self) -> int:
        """Counts one more piece of work; its number."""
        self.clock[self] += 1
        return self.clock[self]

    def follows(self, access: Access) -> bool:
        return self.clock.get(access.timeline, 0) >= access.number


def _raise_clock(clock: Clock, other: Clock) -> None:
    for timeline, number in other.items():
        if clock.get(timeline, 0) < number:
            clock[timeline] = number


class Access(NamedTuple):
    """A piece of work on some bytes: when, and what people are told of it."""

    timeline: Timeline
    number: int
    told: str


class Race(NamedTuple):
    """Two accesses in no order: `kind` says of what sort, each of the others `operator file:line on timeline`."""

    kind: str
    first: str
    then: str


Span = tuple[Timeline, int, int]
"""Whose access, of which bytes: [low, high)."""


@dataclass
class Memory:
    """One storage, and the last access of each timeline to each of its parts.

    Attributes:
        owner: the stream that allocated it; None: host memory.
        done: what threads have waited for that held it, and don't any more.
    """

    owner: Stream | None
    done: Clock = field(default_factory=dict)
    reads: dict[Span, Access] = field(default_factory=dict)
    writes: dict[Span, Access] = field(default_factory=dict)

    def unordered(self, low: int, high: int, writes: bool, timeline: Timeline) -> Iterator[tuple[str, Access]]:
        """Earlier accesses of these bytes that a new one of `timeline` does not follow."""
        kinds = {"written": self.writes, "read": self.reads} if writes else {"written": self.writes}
        for kind, accesses in kinds.items():
            for (_, begin, end), access in accesses.items():
                if begin < high and low < end and not timeline.follows(access):
                    yield kind, access

    def add(self, low: int, high: int, writes: bool, access: Access) -> None:
        """Whatever races with an access before a write of the same bytes races with the write, too."""
        if writes:
            for accesses in (self.reads, self.writes):
                for span in [span for span in accesses if low <= span[1] and span[2] <= high]:
                    del accesses[span]
        (self.writes if writes else self.reads)[access.timeline, low, high] = access

    def accesses(self) -> list[Access]:
        return [*self.reads.values(), *self.writes.values()]


class Stream(Timeline):
    """Stands for `torch.cuda.Stream`.

    Attributes:
        freed: accesses of memory that is free again and belongs to this stream.
    """

    def __init__(self, checker: Checker, name: str) -> None:
        super().__init__(name)
        self.freed: list[Access] = []
        self._checker = checker

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._checker)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        with self._checker.lock:
            self.join(event.clock)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()


class Event:
    """Stands for `torch.cuda.Event`."""

    def __init__(self, checker: Checker) -> None:
        self.clock: Clock = {}
        self._checker = checker

    def record(self, stream: Stream | None = None) -> None:
        with self._checker.lock:
            stream = stream or self._checker.stream()
            stream.join(self._checker.thread().clock)
            self.clock = dict(stream.clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._checker.stream()).wait_event(self)

    def synchronize(self) -> None:
        with self._checker.lock:
            self._checker.thread().join(self.clock)


class Checker:
    """Knows the accesses of all memory, and whether each follows those before it.

    Attributes:
        races: how often each was found.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.races: Counter[Race] = Counter()
        self.default = Stream(self, "the default stream")
        self._streams = [self.default]
        self._memories: dict[int, Memory] = {}
        self._of_thread = threading.local()
        self.thread().name = "the main thread"

    # Who works

    def thread(self) -> Timeline:
        """The thread that runs now."""
        if not hasattr(self._of_thread, "timeline"):
            self._of_thread.timeline = Timeline("a thread")
        timeline: Timeline = self._of_thread.timeline
        return timeline

    def stream(self) -> Stream:
        """The stream that is current in this thread."""
        return getattr(self._of_thread, "stream", self.default)

    def new_stream(self, *_: Any, **__: Any) -> Stream:
        frame = sys._getframe(1)
        target = linecache.getline(frame.f_code.co_filename, frame.f_lineno).partition("=")[0]
        stream = Stream(self, target.strip().removeprefix("self.").removeprefix("_"))
        self._streams.append(stream)
        return stream

    def new_event(self, *_: Any, **__: Any) -> Event:
        return Event(self)

    @contextmanager
    def entered(self, stream: Stream | None) -> Iterator[None]:
        before = self.stream()
        self._of_thread.stream = stream or before
        try:
            yield
        finally:
            self._of_thread.stream = before

    def synchronize(self) -> None:
        """The thread waits for all streams."""
        for stream in self._streams:
            stream.synchronize()

    # What is done

    def on_stream(self, stream: Stream, reads: Iterable[Any], writes: Iterable[Any], what: str) -> None:
        """Work that this thread hands to a stream: it begins after all that the thread has done or waited for."""
        with self.lock:
            stream.join(self.thread().clock)
            self._work(stream, reads, writes, what)

    def on_thread(self, reads: Iterable[Any], writes: Iterable[Any], what: str) -> None:
        """Work of the thread itself."""
        with self.lock:
            self._work(self.thread(), reads, writes, what)

    def _work(self, timeline: Timeline, reads: Iterable[Any], writes: Iterable[Any], what: str) -> None:
        access = Access(timeline, timeline.begin(), f"{what} {_place(sys._getframe(2))} on {timeline.name}")
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                self._touch(tensor, is_write, access)

    def _touch(self, tensor: torch.Tensor, writes: bool, access: Access) -> None:
        if tensor.numel() == 0:
            return
        memory, (low, high) = self.memory_of(tensor), _span(tensor)
        kind = "write" if writes else "read"
        for earlier_kind, earlier in memory.unordered(low, high, writes, access.timeline):
            self.races[Race(f"{earlier_kind}, then {kind}", earlier.told, access.told)] += 1
        memory.add(low, high, writes, access)

    # Memory

    def memory_of(self, tensor: torch.Tensor) -> Memory:
        """Of the tensor's storage. What is met here first was there before: the default stream has allocated it."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._memories:
            self._keep(storage, Memory(self.default))
        return self._memories[storage._cdata]

    def is_host(self, tensor: torch.Tensor) -> bool:
        return self.memory_of(tensor).owner is None

    def allocated(self, storage: torch.UntypedStorage, owner: Stream | None) -> None:
        """The storage is new: on the device, from what its stream has free, or in host memory."""
        with self.lock:
            self._keep(storage, Memory(owner))
            if owner is not None:
                owner.join(self.thread().clock)
                freed, owner.freed = owner.freed, []
                for earlier in freed:
                    if not owner.follows(earlier):
                        then = f"allocation {_place(sys._getframe(1))} on {owner.name}"
                        self.races[Race("freed, then allocated", earlier.told, then)] += 1

    def dropped(self, tensor: torch.Tensor) -> None:
        """This thread held the tensor until now, for what it has waited for."""
        with self.lock:
            _raise_clock(self.memory_of(tensor).done, self.thread().clock)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """The storage has been given up for another size, as FSDP2 does with whole parameters."""
        with self.lock:
            if storage._cdata in self._memories:
                self._freed(storage._cdata)
                self.allocated(storage, self.stream() if storage.nbytes() else self.default)

    def _keep(self, storage: torch.UntypedStorage, memory: Memory) -> None:
        if storage._cdata not in self._memories:
            weakref.finalize(storage, self._freed, storage._cdata).atexit = False
        self._memories[storage._cdata] = memory

    def _freed(self, key: int) -> None:
        """What this thread has waited for is done whoever allocates next: the allocator's lock hands that on."""
        with self.lock:
            memory = self._memories.pop(key, None)
            if memory is not None and memory.owner is not None:
                _raise_clock(memory.done, self.thread().clock)
                pending = (a for a in memory.accesses() if memory.done.get(a.timeline, 0) < a.number)
                memory.owner.freed += pending


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of the storage between the tensor's first element and its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    size = tensor.element_size()
    low = tensor.storage_offset() * size
    return low, low + (1 + last) * size


@functools.cache
def _is_shown(name: str) -> bool:
    return any(folder in name for folder in SHOWN)


def _place(frame: Any) -> str:
    """`file:line` of the innermost frame in `SHOWN`."""
    while frame is not None:
        name = frame.f_code.co_filename
        if _is_shown(name):
            return f"{name.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "the loop"
