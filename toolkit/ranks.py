"""What one process does for all: outcomes, errors included, are shared between ranks."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from toolkit.errors import RankError, ToolkitError, first_line

P = ParamSpec("P")
T = TypeVar("T")

PATIENCE = timedelta(days=7)
"""Longest wait for another rank's preparation (tokenising, downloading); a collective's own is minutes."""

MEETING_PORTS = range(20_000, 29_000)


def world_size() -> int:
    """Number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def local_rank() -> int:
    """This process's rank on its host, as the launcher told it."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def free_port() -> int:
    """A port of this host at which nothing listens now, for ranks that meet at it seconds later.

    It lies below those that Linux and others give to connections and to sockets without a port of their own (32,768
    and above): one of these may be given to another process before rank 0 listens.

    Raises:
        OSError: none of 100 such ports is free.
    """
    for port in random.SystemRandom().sample(MEETING_PORTS, 100):
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"100 of the ports {MEETING_PORTS.start} to {MEETING_PORTS.stop - 1} of 127.0.0.1 are taken")


def on_this_device(action: Callable[P, T]) -> Callable[P, T]:
    """`action` for another thread, begun on the GPU that the calling thread uses.

    A new thread starts on GPU 0, where the first thing that it does would make a context of some 500 MiB, once for
    every rank of the host.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def begun(*args: P.args, **kwargs: P.kwargs) -> T:
        if device is not None:
            torch.cuda.set_device(device)
        return action(*args, **kwargs)

    return begun


def fails_alone(error: BaseException) -> bool:
    """Whether other ranks go on without knowing of this rank's error, perhaps inside a collective."""
    shared = isinstance(error, ToolkitError) and not isinstance(error, RankError)
    return world_size() > 1 and not shared


def on_first_rank(action: Callable[[], T]) -> T:
    """Runs `action` on rank 0; its result, or what it raises, is every rank's.

    The other ranks wait, however long it takes, and none is left waiting by an error.
    """
    return _shared(action if rank() == 0 else None)


def alone_on_first_rank(action: Callable[[], T]) -> T | None:
    """Runs `action` on rank 0, whose result stays there; None elsewhere. What it raises is every rank's.

    The other ranks wait over the host, for up to `PATIENCE`: inside a collective of NCCL they would give up after ten
    minutes, which loading a large model or writing to a slow disk can take.
    """
    kept: list[T] = []
    on_first_rank(lambda: kept.append(action()))
    return kept[0] if kept else None


def usable_cores(process: int = 0) -> int:
    """Cores that a process may use, this one by default; fewer than there are in a container or a batch job."""
    if hasattr(os, "sched_getaffinity"):  # Linux alone has it
        return len(os.sched_getaffinity(process))
    return os.cpu_count() or 1


def cores_of_this_rank() -> int:
    """This rank's share of the host's cores.

    A launcher may have bound the rank to cores already, its own or those of a NUMA node. The launcher itself, which is
    the parent, is not bound: if it may use more cores than this rank, the rank shares its cores with fewer others.
    """
    own, parent = usable_cores(), max(usable_cores(), usable_cores(os.getppid()))
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) * own / parent
    return int(own / max(1.0, sharing))


def unused_accelerator() -> str | None:
    """The type of an accelerator that torch knows and the toolkit doesn't run on (`mps`, `xpu`, `npu`), if any."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None and found.type != "cuda" else None


@contextmanager
def all_cores() -> Iterator[None]:
    """torch computes on all cores that this process may use, for what one rank does on the host while others wait.

    Launchers give each rank one thread (OMP_NUM_THREADS=1), with which the forward of a large model takes hours.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(max(before, usable_cores()))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def renew_thread_pool() -> None:
    """Gives a process that was forked a thread pool of its own; called before it starts its first thread.

    A parent that has set its number of threads, and computed since, hands a pool without threads on to its children.
    The first use in a child replaces it, without a lock: where two threads come to it at once, as in the first
    backward, one finds none, and torch ends the process ("Invalid thread pool!").
    """
    torch.set_num_threads(torch.get_num_threads())


def on_each_host(build: Callable[[], Path]) -> Path:
    """Runs `build` on rank 0, then on the first rank of each host that does not see the path it made.

    Args:
        build: makes a file or folder and returns its path.

    Returns:
        The path on this rank's host. Hosts can differ, where each has an HF_HOME of its own.
    """
    path = on_first_rank(build)
    leads = local_rank() == 0
    made = _outcomes((lambda: path if path.exists() else build()) if leads else None)
    # Launchers number the ranks host by host, so the last leader up to this rank is its host's.
    return next(found for led, found in reversed(made[: rank() + 1]) if led)


def on_every_rank(action: Callable[[], T], what: str, group: dist.ProcessGroup | None = None) -> list[T]:
    """Runs `action` on every rank; the results in rank order. Where it fails on one rank, it raises on all.

    Args:
        what: the action in words, for the error of a rank that runs out of memory or otherwise fails.
        group: of all ranks, where the caller has one of its own.
    """
    result: T | None = None
    error: ToolkitError | None = None
    try:
        result = action()
    except ToolkitError as found:
        error = found
    except Exception as found:  # the others must not wait for a rank that is gone
        error = ToolkitError(f"rank {rank()} could not {what}: {type(found).__name__}: {first_line(found)}")
    outcomes = gather_objects((result, error), group)
    for _, found_error in outcomes:
        if found_error is not None:
            raise found_error
    return [found for found, _ in outcomes]  # type: ignore[misc]


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """`value` of every rank, in rank order, on every rank; waits up to `PATIENCE`, or as `group` does."""
    if world_size() == 1:
        return [value]
    gathered: list[Any] = [None] * world_size()
    dist.all_gather_object(gathered, value, group=group or patient_group())
    return gathered


def _shared(action: Callable[[], T] | None) -> T:
    """The first outcome of the ranks that have an `action`; the first error of any rank is raised on all."""
    return next(found for acted, found in _outcomes(action) if acted)


def _outcomes(action: Callable[[], T] | None) -> list[tuple[bool, T]]:
    """For each rank whether it had an `action`, and its result; the first error of any rank is raised on all."""
    result: T | None = None
    error: ToolkitError | None = None
    unexpected: Exception | None = None
    try:
        result = action() if action is not None else None
    except ToolkitError as found:
        error = found
    except Exception as found:  # the others must not wait for a rank that is gone
        unexpected = found
        error = ToolkitError(f"rank {rank()} failed while preparing: {type(found).__name__}: {first_line(found)}")
    outcomes = gather_objects((action is not None, result, error))
    if unexpected is not None:
        raise unexpected
    for _, _, found_error in outcomes:
        if found_error is not None:
            raise found_error
    return [(acted, found) for acted, found, _ in outcomes]  # type: ignore[misc]


def host_group() -> dist.ProcessGroup:
    """All ranks over gloo, for tensors in host memory, with the usual timeout. Collective at its first call."""
    world = dist.group.WORLD
    assert world is not None
    return world if dist.get_backend(world) == dist.Backend.GLOO else _gloo_group(None)


def patient_group() -> dist.ProcessGroup:
    """A host-side group with a long timeout."""
    return _gloo_group(PATIENCE)


_made: dict[timedelta | None, tuple[object, dist.ProcessGroup]] = {}


def _gloo_group(timeout: timedelta | None) -> dist.ProcessGroup:
    """A group of all ranks over gloo, made once in the life of the default group."""
    if timeout not in _made or _made[timeout][0] is not dist.group.WORLD:
        _made[timeout] = (dist.group.WORLD, dist.new_group(backend="gloo", timeout=timeout))
    return _made[timeout][1]
