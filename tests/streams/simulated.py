"""Lets a checker see a run on CPU ranks as if it ran on a device: its streams, threads, operators and memory.

What is taken as given:
- An operator is work of the current stream, or of the thread if all its tensors lie in host memory.
- Collectives are work of the stream on which they are called; NCCL orders its own stream with that one both ways.
- Host memory is what code asks of torch's factories without a device, with "cpu", or pinned, what `.to("cpu")` makes,
  and what is computed from host memory alone. Everything else is the device's.
- Pinned memory that torch's own allocator has given is not given anew before the copies from and to it are done, as
  copies record events there. So its reuse orders nothing, and is not looked at; the engine's own pinned memory is.
- Saved tensors go to pinned memory and back, as with a device; on CPU tensors torch's `save_on_cpu` does nothing.
- An operator over both makes the thread wait, unless it is a copy with `non_blocking`. A thread that reads a result
  (`item`, `nonzero`) would wait on a device, too; models do that now and then (transformers' masks of packed rows), and
  what it orders by chance would hide races, so here it waits for nothing.
"""

from __future__ import annotations

import functools
import gc
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from streams.happens_before import Checker, Clock
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.sharding.offload.host import Slabs
from toolkit.sharding.offload.kernel import AdamWKernel
from toolkit.sharding.offload.offloaded_units import OffloadedUnit

FACTORIES = ("empty", "full", "tensor", "zeros")
HOST = torch.device("cpu")


@contextmanager
def watched_by(checker: Checker) -> Iterator[None]:
    """Everything in here, threads that begin here included, is seen by `checker`."""
    with ExitStack() as stack:
        gc.disable()  # memory goes when its last reference does, and not by chance
        stack.callback(gc.enable)
        for owner, name, stand_in in _stand_ins(checker):
            stack.enter_context(mock.patch.object(owner, name, stand_in, create=True))
        stack.enter_context(_Operators(checker))
        yield


def _stand_ins(checker: Checker) -> Iterator[tuple[Any, str, Any]]:
    yield torch.cpu, "Stream", checker.new_stream
    yield torch.cpu, "Event", checker.new_event
    yield torch.cpu, "stream", checker.entered
    yield torch.cpu, "current_stream", lambda device=None: checker.stream()
    yield torch.cpu, "synchronize", lambda device=None: checker.synchronize()
    yield threading, "Event", functools.partial(_Flag, checker)
    yield threading, "Semaphore", functools.partial(_Permits, checker)
    yield threading.Thread, "start", _starting(checker, threading.Thread.start)
    yield threading.Thread, "run", _running(checker, threading.Thread.run)
    yield threading.Thread, "join", _joining(checker, threading.Thread.join)
    yield queue, "SimpleQueue", functools.partial(_Queue, checker, queue.SimpleQueue)
    yield torch.UntypedStorage, "resize_", _resizing(checker, torch.UntypedStorage.resize_)
    yield torch.Tensor, "tolist", _read_by_thread(checker, torch.Tensor.tolist)
    yield torch.Tensor, "to", _to_host(checker, torch.Tensor.to)
    yield torch.Tensor, "cpu", lambda tensor: tensor.to("cpu")
    yield AdamWKernel, "step", _kernel_step(checker, AdamWKernel.step)
    yield OffloadedUnit, "leaving", _Held(checker)
    yield torch.autograd.graph, "save_on_cpu", _saving(checker)
    yield Slabs, "release", _released(checker, Slabs.release)
    for name in FACTORIES:
        yield torch, name, _factory(checker, getattr(torch, name))


# Operators


class _Operators(TorchDispatchMode):
    def __init__(self, checker: Checker) -> None:
        super().__init__()
        self._checker = checker

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented  # the operators on the local part come next
        out = function(*args, **(kwargs or {}))
        if function.is_view:
            return out
        with self._checker.lock:
            _see(self._checker, function, args, kwargs or {}, out)
        return out


def _see(checker: Checker, function: Any, args: Any, kwargs: Any, out: Any) -> None:
    name = function._schema.name
    reads, writes = _operands(function._schema, args, kwargs)
    inputs = [*reads, *writes]
    known = {tensor.untyped_storage()._cdata for tensor in inputs}
    made = [tensor for tensor in _tensors(out) if tensor.untyped_storage()._cdata not in known]
    if not writes and not made and _tensors(out):
        return  # a view after all, such as of `reshape`
    if name.endswith("_like") or name.startswith("aten::new_"):
        reads = []  # of these only the shape is taken
    on_host = [checker.is_host(tensor) for tensor in inputs]
    alone = bool(inputs) and all(on_host)
    to_host = name == "aten::_to_copy" and kwargs.get("device") == HOST
    for tensor in made:
        checker.allocated(tensor.untyped_storage(), None if alone or to_host else checker.stream())
    if "empty" not in name:
        writes = [*writes, *made]
    short = name.removeprefix("aten::")
    if alone:
        checker.on_thread(reads, writes, short)
        return
    checker.on_stream(checker.stream(), reads, writes, short)
    crosses = to_host or any(host and tensor.ndim for host, tensor in zip(on_host, inputs, strict=True))
    if crosses and not _is_non_blocking(function._schema, args, kwargs):
        checker.stream().synchronize()


def _operands(schema: Any, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that an operator reads and those that it writes."""
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    for position, argument in enumerate(schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        (writes if is_written or _is_result(schema.name, position) else reads).extend(_tensors(value))
    return reads, writes


def _is_result(name: str, position: int) -> bool:
    """Collectives, and FSDP2's copy into a gather's buffer, do not say in their schemas what they write."""
    if name == "fsdp::all_gather_copy_in":
        return position == 1
    return name.startswith("c10d::") and position == 0 and name != "c10d::send"


def _is_non_blocking(schema: Any, args: Any, kwargs: Any) -> bool:
    names = [argument.name for argument in schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return bool(given.get("non_blocking"))


def _tensors(values: Any) -> list[torch.Tensor]:
    """Those that have memory: DTensors find the shapes of results with fake ones."""
    if isinstance(values, torch.Tensor):
        return [] if isinstance(values, FakeTensor) else [values]
    return [tensor for value in values for tensor in _tensors(value)] if isinstance(values, list | tuple) else []


# Memory


def _factory(checker: Checker, original: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        on_host = "pin_memory" in kwargs or kwargs.get("device") is None or isinstance(kwargs["device"], str)
        if on_host and _tensors(made):
            checker.allocated(made.untyped_storage(), None)
        return made

    return make


def _to_host(checker: Checker, original: Callable[..., Any]) -> Callable[..., Any]:
    """On a device `.to("cpu")` makes a copy; of a CPU tensor it would make none, and nothing would be seen."""

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        is_asked = isinstance(args[0] if args else kwargs.get("device"), str)
        if is_asked and _tensors(tensor) and not isinstance(tensor, DTensor) and not checker.is_host(tensor):
            kwargs["copy"] = True
        return original(tensor, *args, **kwargs)

    return to


def _saving(checker: Checker) -> Callable[..., Any]:
    """What `save_on_cpu(pin_memory=True)` does on a device: nothing waits for the copies out and back."""

    def save_on_cpu(pin_memory: bool = False, device_type: str = "cuda") -> Any:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            packed = torch.empty(tensor.size(), dtype=tensor.dtype)
            checker.allocated(packed.untyped_storage(), None)
            packed.copy_(tensor, non_blocking=True)
            return packed

        def unpack(packed: torch.Tensor) -> torch.Tensor:
            made = torch.empty(packed.size(), dtype=packed.dtype, device=HOST)  # of the device: see `_factory`
            return made.copy_(packed, non_blocking=True)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    return save_on_cpu


class _Held:
    """A reference that is kept for the memory's sake. A thread that drops it hands on what it has waited for.

    Whoever drops the last reference frees the memory, and the allocator lets that follow all who dropped one before.
    """

    def __init__(self, checker: Checker) -> None:
        self._checker = checker

    def __get__(self, unit: OffloadedUnit, kind: type) -> torch.Tensor | None:
        return vars(unit).get("leaving")

    def __set__(self, unit: OffloadedUnit, tensor: torch.Tensor | None) -> None:
        before = vars(unit).get("leaving")
        if before is not None:
            self._checker.dropped(before)
        vars(unit)["leaving"] = tensor


def _released(checker: Checker, original: Callable[..., Any]) -> Callable[..., Any]:
    """Memory that the engine has pinned itself, CUDA doesn't keep pinned until the copies from and to it are done."""

    def release(slabs: Slabs) -> None:
        checker.on_thread([], slabs._slabs, "unpin")
        original(slabs)

    return release


def _resizing(checker: Checker, original: Callable[..., Any]) -> Callable[..., Any]:
    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        checker.resized(storage)
        return result

    return resize_


def _read_by_thread(checker: Checker, original: Callable[..., Any]) -> Callable[..., Any]:
    def read(tensor: torch.Tensor) -> Any:
        if checker.is_host(tensor):
            checker.on_thread([tensor], [], "tolist")
        else:
            checker.on_stream(checker.stream(), [tensor], [], "tolist")
        return original(tensor)

    return read


def _kernel_step(checker: Checker, original: Callable[..., Any]) -> Callable[..., Any]:
    """Our kernel is no operator of torch."""

    @functools.wraps(original)
    def step(
        self: AdamWKernel,
        master: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        gradient: torch.Tensor,
        weights: torch.Tensor,
        *rest: Any,
    ) -> None:
        checker.on_thread([gradient], [master, exp_avg, exp_avg_sq, weights], "adamw.cpp")
        original(self, master, exp_avg, exp_avg_sq, gradient, weights, *rest)

    return step


# Threads


class _Flag(threading.Event):
    """Who has waited for it follows the thread that set it."""

    def __init__(self, checker: Checker) -> None:
        super().__init__()
        self._checker = checker
        self._clock: Clock = {}

    def set(self) -> None:
        self._clock = dict(self._checker.thread().clock)
        super().set()

    def wait(self, timeout: float | None = None) -> bool:
        found = super().wait(timeout)
        if found:
            self._checker.thread().join(self._clock)
        return found


class _Permits(threading.Semaphore):
    """Who has got a permit follows the threads that have given one."""

    def __init__(self, checker: Checker, value: int = 1) -> None:
        super().__init__(value)
        self._checker = checker
        self._given: Clock = {}

    def release(self, n: int = 1) -> None:
        for timeline, number in self._checker.thread().clock.items():
            self._given[timeline] = max(number, self._given.get(timeline, 0))
        super().release(n)

    def acquire(self, *args: Any, **kwargs: Any) -> bool:
        found = super().acquire(*args, **kwargs)
        self._checker.thread().join(self._given)
        return found


class _Queue:
    """Who has taken something out follows the thread that put it in."""

    def __init__(self, checker: Checker, kind: Callable[[], Any]) -> None:
        self._checker = checker
        self._inner = kind()

    def put(self, item: Any) -> None:
        self._inner.put((dict(self._checker.thread().clock), item))

    def get(self, *args: Any, **kwargs: Any) -> Any:
        clock, item = self._inner.get(*args, **kwargs)
        self._checker.thread().join(clock)
        return item


def _starting(checker: Checker, original: Callable[..., None]) -> Callable[..., None]:
    def start(thread: Any) -> None:
        thread.clock_at_start = dict(checker.thread().clock)
        original(thread)

    return start


def _running(checker: Checker, original: Callable[..., None]) -> Callable[..., None]:
    def run(thread: Any) -> None:
        mine = checker.thread()
        mine.name = f"the thread {thread.name}"
        mine.join(thread.clock_at_start)
        with _Operators(checker):
            original(thread)
        thread.clock_at_end = dict(mine.clock)

    return run


def _joining(checker: Checker, original: Callable[..., None]) -> Callable[..., None]:
    def join(thread: Any, timeout: float | None = None) -> None:
        original(thread, timeout)
        checker.thread().join(getattr(thread, "clock_at_end", {}))

    return join
