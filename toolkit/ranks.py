"""Runs actions on one rank or on all, and shares results and errors between ranks."""

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

from toolkit.errors import ToolkitError, in_words

P = ParamSpec("P")
T = TypeVar("T")

PATIENCE = timedelta(days=7)
"""The longest wait for another rank's preparation (tokenising, downloading). A collective's own limit is minutes."""

MEETING_PORTS = range(20_000, 29_000)


def world_size() -> int:
    """Returns the number of ranks. 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Returns this process's rank. 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def local_rank() -> int:
    """Returns this process's rank on its host, as the launcher set it."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def free_port() -> int:
    """Returns a port of this host at which nothing listens now, for a rendezvous of ranks seconds later.

    It is below the ephemeral ports, from which the system serves connections and sockets that name no port (32,768 and
    above on Linux): the system could give one of these to another process before rank 0 listens.

    Raises:
        OSError: if none of 100 such ports is free.
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
    """Wraps `action` for another thread, so that it runs on the GPU that the calling thread uses.

    A new thread starts on GPU 0. Its first use of the GPU would create a context of some 500 MiB there, once for every
    rank of the host.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def begun(*args: P.args, **kwargs: P.kwargs) -> T:
        if device is not None:
            torch.cuda.set_device(device)
        return action(*args, **kwargs)

    return begun


def fails_alone(error: BaseException) -> bool:
    """Returns whether other ranks do not know of this rank's error and go on, perhaps inside a collective."""
    return world_size() > 1 and not (isinstance(error, ToolkitError) and error.is_shared)


def on_first_rank(action: Callable[[], T]) -> T:
    """Runs `action` on rank 0 and returns its result on every rank. Collective.

    The other ranks wait as long as it takes, up to `PATIENCE`. If it raises, every rank raises.
    """
    return next(found for acted, found in _outcomes(action if rank() == 0 else None) if acted)


def alone_on_first_rank(action: Callable[[], T]) -> T | None:
    """Runs `action` on rank 0 and returns its result there, and None on other ranks. If it raises, every rank raises.

    The other ranks wait over gloo for up to `PATIENCE`. Inside an NCCL collective they would give up after ten minutes,
    which loading a large model or writing to a slow disk can take. Collective.
    """
    kept: list[T] = []
    on_first_rank(lambda: kept.append(action()))
    return kept[0] if kept else None


def usable_cores(process: int = 0) -> int:
    """Returns the number of cores that a process may use, this one by default. A batch job may not use all cores."""
    if hasattr(os, "sched_getaffinity"):  # only Linux has it
        return len(os.sched_getaffinity(process))
    return os.cpu_count() or 1


def cores_of_this_rank() -> int:
    """Returns this rank's share of the host's cores.

    A launcher may have bound the rank to some cores, such as those of a NUMA node. The launcher, which is the parent
    process, is not bound. If it may use more cores than this rank, the rank shares its cores with fewer other ranks.
    """
    own, parent = usable_cores(), max(usable_cores(), usable_cores(os.getppid()))
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) * own / parent
    return int(own / max(1.0, sharing))


def unused_accelerator() -> str | None:
    """Returns the type of an accelerator that torch knows and the toolkit does not run on (`mps`, `xpu`), or None."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None and found.type != "cuda" else None


@contextmanager
def all_cores() -> Iterator[None]:
    """Makes torch use all cores of this process inside the `with` block, for work of one rank while others wait.

    Launchers give each rank one thread (OMP_NUM_THREADS=1). With one thread the forward of a large model takes hours.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(max(before, usable_cores()))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def renew_thread_pool() -> None:
    """Gives a forked process a new thread pool. Call this before the process starts its first thread.

    If a parent has set its number of threads and then computed, its children inherit a pool without threads. The first
    use in a child replaces the pool, without a lock. If two threads use it at once, as in the first backward, one finds
    no pool, and torch ends the process ("Invalid thread pool!").
    """
    torch.set_num_threads(torch.get_num_threads())


def on_each_host(build: Callable[[], Path]) -> Path:
    """Runs `build` on rank 0, then on the first rank of each host that does not see the path. Collective.

    Args:
        build: creates a file or folder and returns its path.

    Returns:
        The path on this rank's host. Hosts can differ if each has its own HF_HOME.
    """
    path = on_first_rank(build)
    leads = local_rank() == 0
    made = _outcomes((lambda: path if path.exists() else build()) if leads else None)
    # Launchers number the ranks host by host, so the last leader up to this rank is its host's.
    return next(found for led, found in reversed(made[: rank() + 1]) if led)


def on_every_rank(action: Callable[[], T], what: str, group: dist.ProcessGroup | None = None) -> list[T]:
    """Runs `action` on every rank and returns the results in rank order. Collective.

    Args:
        action: the action.
        what: describes the action, for the error of a rank that runs out of memory or otherwise fails.
        group: a group of all ranks. None uses `patient_group`.

    Raises:
        ToolkitError: on every rank, if the action fails on any rank.
    """
    return [found for _, found in _outcomes(action, what, group)]


def on_any_rank(value: bool) -> bool:
    """Tells whether the value is true on any rank. Collective over gloo, so that no device is waited for."""
    if world_size() == 1:
        return value
    found = torch.tensor(int(value))
    dist.all_reduce(found, dist.ReduceOp.MAX, group=patient_group())
    return bool(found)


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Gathers `value` of every rank, in rank order, on every rank. Waits up to `PATIENCE`, or as `group` does."""
    if world_size() == 1:
        return [value]
    gathered: list[Any] = [None] * world_size()
    dist.all_gather_object(gathered, value, group=group or patient_group())
    return gathered


def _outcomes(
    action: Callable[[], T] | None, what: str = "", group: dist.ProcessGroup | None = None
) -> list[tuple[bool, T]]:
    """Returns for each rank whether it had an `action`, and its result. Raises the first error of any rank on all.

    Without `what`, a rank whose action fails by what is no ToolkitError raises that itself.
    """
    result: T | None = None
    error: ToolkitError | None = None
    unexpected: Exception | None = None
    try:
        result = action() if action is not None else None
    except ToolkitError as found:
        error = found
    except Exception as found:  # the others must not wait for a rank that is gone
        unexpected, did = found, f"could not {what}" if what else "failed while preparing"
        error = ToolkitError(f"rank {rank()} {did}: {in_words(found)}")
    outcomes = gather_objects((action is not None, result, error), group)
    if unexpected is not None and not what:
        raise unexpected
    for _, _, found_error in outcomes:
        if found_error is not None:
            raise found_error
    return [(acted, found) for acted, found, _ in outcomes]  # type: ignore[misc]


def host_group() -> dist.ProcessGroup:
    """Returns a gloo group of all ranks with the usual timeout, for host tensors. Collective at its first call."""
    world = dist.group.WORLD
    assert world is not None
    return world if dist.get_backend(world) == dist.Backend.GLOO else _gloo_group(None)


def patient_group() -> dist.ProcessGroup:
    """Returns a gloo group of all ranks with the timeout `PATIENCE`. Collective at its first call."""
    return _gloo_group(PATIENCE)


_made: dict[timedelta | None, tuple[object, dist.ProcessGroup]] = {}


def _gloo_group(timeout: timedelta | None) -> dist.ProcessGroup:
    """Returns a gloo group of all ranks. Created once in the life of the default group."""
    if timeout not in _made or _made[timeout][0] is not dist.group.WORLD:
        _made[timeout] = (dist.group.WORLD, dist.new_group(backend="gloo", timeout=timeout))
    return _made[timeout][1]
