"""Host memory: how much, whether the machine has it, and one slab for each kind of tensor."""

from __future__ import annotations

import gc
import platform
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from toolkit import ranks
from toolkit.errors import BadInputError, ToolkitError
from toolkit.paths import GIB

try:
    import resource
except ImportError:  # Windows has none
    resource = None  # type: ignore[assignment]

# Of cgroup version 2. Without its files the host's own figure stands.
CGROUP = Path("/sys/fs/cgroup")

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class HostPlan:
    """Bytes of host memory that one rank takes, all of it before the first step.

    Attributes:
        masters: float32 weights.
        moments: the optimizer's tensors.
        gradients: where gradients land; pinned on a GPU machine.
        staging: between the step and the device; pinned on a GPU machine.
    """

    masters: int
    moments: int
    gradients: int
    staging: int

    @property
    def total(self) -> int:
        return self.masters + self.moments + self.gradients + self.staging

    def __str__(self) -> str:
        parts = ("masters", "moments", "gradients", "staging")
        return f"{_size(self.total)} ({', '.join(f'{part} {_size(getattr(self, part))}' for part in parts)})"


def plan_host(hosted: Sequence[int], num_moments: int, gradient_bytes: int, longest_bytes: int) -> HostPlan:
    """What the units whose state is on the host take.

    Args:
        hosted: elements of each unit's flat tensors.
        num_moments: tensors of an element's size that the optimizer keeps.
        gradient_bytes: of an element of a gradient that lands.
        longest_bytes: of each element of the longest unit, for staging.
    """
    elements = sum(hosted)
    return HostPlan(
        masters=4 * elements,
        moments=4 * elements * num_moments,
        gradients=gradient_bytes * elements,
        staging=longest_bytes * max(hosted, default=0),
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"


@dataclass(frozen=True)
class Room:
    """Free memory, and who shares it.

    Attributes:
        key: the same on all ranks that take from it.
        who: these ranks in words.
        found: the bytes in words.
    """

    key: tuple[object, ...]
    who: str
    found: str
    num_bytes: int


def require_host_memory(plan: HostPlan) -> None:
    """Raises BadInputError on every rank where the ranks of a host need more than it has. Collective."""
    if _alive:
        gc.collect()  # a model that has been dropped still holds its memory, as models hold themselves by their hooks
    told = ranks.gather_objects((plan.total, _rooms(), held_bytes()))
    needed: dict[tuple[object, ...], int] = defaultdict(int)
    for total, rooms, _ in told:
        for room in rooms:
            # Ranks share a host's memory: each may fit alone, and all together not.
            needed[room.key] += total
    # Every rank looks at the figures of all, so that all raise the same error and none is left in a collective.
    for _, rooms, held in told:
        for room in rooms:
            if needed[room.key] > room.num_bytes:
                raise BadInputError(
                    f"offload: {room.who} would take {_size(needed[room.key])} of host memory, but {room.found}. "
                    f"A rank takes {plan}; {_advice(held)}"
                )


def _advice(held: int) -> str:
    if held:
        return (
            f"{_size(held)} are still held by a model that this process has trained before; let go of it first: "
            "plugin.close(), or del its trainer, accelerator, model and optimizer"
        )
    return (
        "use more hosts or a smaller model, keep some of it on the device (device_state_gib), or train without offload"
    )


def _rooms() -> list[Room]:
    """What this rank's memory is limited by: its process, its container and its host."""
    host, rank = platform.node(), ranks.rank()
    machine = _machine()
    rooms = []
    process = _process_room()
    if process is not None:
        found = f"its limit (ulimit) leaves {_size(process)}"
        rooms.append(Room(("rank", rank), f"rank {rank}", found, process))
    container = _container_room()
    if container is not None:
        number, free = container
        rooms.append(Room((machine, "container", number), f"the ranks of container {host}", _free(free), free))
    free = int(psutil.virtual_memory().available)
    rooms.append(Room((machine,), f"the ranks of host {host}", _free(free), free))
    return rooms


def _free(num_bytes: int) -> str:
    return f"{_size(num_bytes)} are free"


def _machine() -> str:
    """Identifies the machine whose memory this is.

    Not by name: containers and clones often all have one, and containers of one machine share its memory.
    """
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return platform.node()


def _container_limit() -> int | None:
    """Bytes that this process's control group may take; None without a limit."""
    try:
        return int((CGROUP / "memory.max").read_text())
    except (OSError, ValueError):  # no such file, or no limit ("max")
        return None


def _container_room() -> tuple[int, int] | None:
    """The number of this process's control group, the same in no other container, and its free bytes; None: no limit"""
    limit = _container_limit()
    if limit is None:
        return None
    try:
        return CGROUP.stat().st_ino, limit - int((CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return None


def host_bytes() -> int:
    """All bytes of this host, or of the container that it is."""
    total, limit = int(psutil.virtual_memory().total), _container_limit()
    return total if limit is None else min(total, limit)


def host_gib_of_a_rank(num_ranks: int) -> float:
    """What each of so many ranks on this host has of all its memory (GiB)."""
    return host_bytes() / num_ranks / GIB


def free_host_bytes() -> int:
    """Free bytes of this host, or of the container that it is."""
    free, container = int(psutil.virtual_memory().available), _container_room()
    return free if container is None else min(free, container[1])


def _process_room() -> int | None:
    """Bytes that this process may still take; None without a limit."""
    if resource is None:
        return None
    used = psutil.Process().memory_info()
    rooms = [
        limit - getattr(used, kind)
        for name, kind in ((resource.RLIMIT_AS, "vms"), (resource.RLIMIT_DATA, "data"))
        if (limit := resource.getrlimit(name)[0]) != resource.RLIM_INFINITY
    ]
    return min(rooms) if rooms else None


_alive: weakref.WeakSet[Slabs] = weakref.WeakSet()


def held_bytes() -> int:
    """Bytes that the engines of this process hold."""
    return sum(slabs.nbytes for slabs in _alive)


class Slabs:
    """Flat host tensors cut from one allocation for each kind, so that few are pinned and none is rounded up.

    Once nobody holds them any more they are unpinned before their memory is freed: CUDA would take the addresses for
    pinned ever after, and refuse to pin what comes to lie there.
    """

    def __init__(self) -> None:
        self._slabs: list[torch.Tensor] = []
        self._pinned: list[int] = []
        _alive.add(self)
        # Not at the end of the process, which frees all there is.
        weakref.finalize(self, _unpin, self._pinned).atexit = False

    def cut(self, numels: Sequence[int], dtype: torch.dtype, pin: bool) -> Iterator[torch.Tensor]:
        """Zeros, one tensor of each length."""
        slab = torch.empty(sum(numels), dtype=dtype)
        slab.zero_()  # touched now: a host that has promised too much fails here, not in the midst of training
        self._slabs.append(slab)
        if pin and slab.numel():
            self._pin(slab)
        return iter(torch.split(slab, list(numels)))

    @property
    def nbytes(self) -> int:
        return sum(slab.numel() * slab.element_size() for slab in self._slabs)

    def release(self) -> None:
        _unpin(self._pinned)
        self._slabs.clear()

    def _pin(self, slab: torch.Tensor) -> None:
        """Pins what is there: torch's own pinned allocator rounds up to a power of two (pytorch#95823)."""
        size = slab.numel() * slab.element_size()
        code = int(_cudart().cudaHostRegister(slab.data_ptr(), size, 0))
        if code != 0:
            held = held_bytes() - self.nbytes
            advice = _advice(held) if held else "raise the limit of locked memory (ulimit -l), or use more ranks"
            raise ToolkitError(f"offload: CUDA could not pin {_size(size)} of host memory (error {code}); {advice}")
        self._pinned.append(slab.data_ptr())


def _unpin(addresses: list[int]) -> None:
    for address in addresses:
        _cudart().cudaHostUnregister(address)
    addresses.clear()


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
