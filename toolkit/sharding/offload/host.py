"""Plans host memory, checks that the machine has it, and allocates one slab for each kind of tensor."""

from __future__ import annotations

import gc
import platform
import resource
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
from toolkit.terminal import format_bytes

# The files of cgroup version 2. Without them the figure of the host counts.
CGROUP = Path("/sys/fs/cgroup")

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class HostPlan:
    """Bytes of host memory that one rank takes. All of it is allocated before the first step.

    Attributes:
        masters: float32 weights.
        moments: the optimizer's tensors.
        gradients: the buffers that receive gradients. Pinned on a GPU machine.
        staging: the buffers from which weights go to the device. Pinned on a GPU machine.
    """

    masters: int
    moments: int
    gradients: int
    staging: int

    @property
    def total(self) -> int:
        """Returns the bytes of all four."""
        return self.masters + self.moments + self.gradients + self.staging

    def __str__(self) -> str:
        parts = ("masters", "moments", "gradients", "staging")
        each = ", ".join(f"{part} {format_bytes(getattr(self, part))}" for part in parts)
        return f"{format_bytes(self.total)} ({each})"


def plan_host(hosted: Sequence[int], num_moments: int, gradient_bytes: int, longest_bytes: int) -> HostPlan:
    """Plans the host memory of the units whose state is on the host.

    Args:
        hosted: the number of elements of each unit's flat tensors.
        num_moments: the number of moments that the optimizer keeps for each parameter.
        gradient_bytes: the bytes of an element of a gradient.
        longest_bytes: the bytes of staging for each element of the longest unit.
    """
    elements = sum(hosted)
    return HostPlan(
        masters=4 * elements,
        moments=4 * elements * num_moments,
        gradients=gradient_bytes * elements,
        staging=longest_bytes * max(hosted, default=0),
    )


@dataclass(frozen=True)
class Room:
    """A limit of host memory, and the ranks that share it.

    Attributes:
        key: equal on all ranks that share the limit.
        who: describes these ranks.
        found: describes the limit.
        num_bytes: the bytes that are free.
    """

    key: tuple[object, ...]
    who: str
    found: str
    num_bytes: int


def require_host_memory(plan: HostPlan) -> None:
    """Checks that every host has the memory that its ranks need. Collective.

    Raises:
        BadInputError: on every rank, if the ranks of a host, a container or a process need more than is free.
    """
    if _alive:
        gc.collect()  # a dropped model still holds its memory, because its hooks form reference cycles with it
    of_ranks = ranks.gather_objects((plan.total, _memory_limits(), held_bytes()))
    needed: dict[tuple[object, ...], int] = defaultdict(int)
    for total, rooms, _ in of_ranks:
        for room in rooms:
            # Ranks share a host's memory: each one may fit, but not all together.
            needed[room.key] += total
    # Every rank looks at the figures of all, so that all raise the same error and none is left in a collective.
    for _, rooms, held in of_ranks:
        for room in rooms:
            if needed[room.key] > room.num_bytes:
                raise BadInputError(
                    f"offload: {room.who} would take {format_bytes(needed[room.key])} of host memory, but "
                    f"{room.found}. A rank takes {plan}; {_memory_advice(held)}"
                )


def _memory_advice(held: int) -> str:
    if held:
        return (
            f"{format_bytes(held)} are still held by a model that this process has trained before; let go of it first: "
            "plugin.close(), or del its trainer, accelerator, model and optimizer"
        )
    return (
        "use more hosts or a smaller model, keep some of it on the device (device_state_gib), or train without offload"
    )


def _memory_limits() -> list[Room]:
    """Returns the memory limits of this rank: those of its process, its container and its host."""
    host, rank = platform.node(), ranks.rank()
    machine = _machine_id()
    rooms = []
    process = _process_room()
    if process is not None:
        found = f"its limit (ulimit) leaves {format_bytes(process)}"
        rooms.append(Room(("rank", rank), f"rank {rank}", found, process))
    container = _container_room()
    if container is not None:
        number, free = container
        rooms.append(Room((machine, "container", number), f"the ranks of container {host}", _free_message(free), free))
    free = int(psutil.virtual_memory().available)
    rooms.append(Room((machine,), f"the ranks of host {host}", _free_message(free), free))
    return rooms


def _free_message(num_bytes: int) -> str:
    return f"{format_bytes(num_bytes)} are free"


def _machine_id() -> str:
    """Returns an identifier of the machine.

    Not its name: containers and clones often share one, and containers of one machine share its memory.
    """
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return platform.node()


def _container_limit() -> int | None:
    """Returns the bytes that this process's control group may take, or None without a limit."""
    try:
        return int((CGROUP / "memory.max").read_text())
    except (OSError, ValueError):  # no such file, or no limit ("max")
        return None


def _container_room() -> tuple[int, int] | None:
    """Returns the number of this process's control group, unique to its container, and its free bytes, or None."""
    limit = _container_limit()
    if limit is None:
        return None
    try:
        return CGROUP.stat().st_ino, limit - int((CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return None


def host_bytes() -> int:
    """Returns the total memory of this host or container in bytes."""
    total, limit = int(psutil.virtual_memory().total), _container_limit()
    return total if limit is None else min(total, limit)


def host_gib_of_a_rank(num_ranks: int) -> float:
    """Returns the share of this host's total memory for each of `num_ranks` ranks on it (GiB)."""
    return host_bytes() / num_ranks / GIB


def free_host_bytes() -> int:
    """Returns the free memory of this host or container in bytes."""
    free, container = int(psutil.virtual_memory().available), _container_room()
    return free if container is None else min(free, container[1])


def _process_room() -> int | None:
    """Returns the bytes that this process may still take, or None without a limit."""
    used = psutil.Process().memory_info()
    rooms = [
        limit - getattr(used, kind)
        for name, kind in ((resource.RLIMIT_AS, "vms"), (resource.RLIMIT_DATA, "data"))
        if (limit := resource.getrlimit(name)[0]) != resource.RLIM_INFINITY
    ]
    return min(rooms) if rooms else None


_alive: weakref.WeakSet[Slabs] = weakref.WeakSet()


def held_bytes() -> int:
    """Returns the bytes of host memory that the engines of this process hold."""
    return sum(slabs.nbytes for slabs in _alive)


class Slabs:
    """Allocates flat host tensors, one slab for each kind. So few allocations are pinned and none is rounded up.

    Slabs are unpinned before their memory is freed. Otherwise CUDA would take the addresses for pinned from then on,
    and refuse to pin a later allocation there.
    """

    def __init__(self) -> None:
        self._slabs: list[torch.Tensor] = []
        self._pinned: list[int] = []
        _alive.add(self)
        # Not at the end of the process, which frees everything.
        weakref.finalize(self, _unpin, self._pinned).atexit = False

    def cut(self, numels: Sequence[int], dtype: torch.dtype, pin: bool) -> Iterator[torch.Tensor]:
        """Allocates one slab and returns zero tensors of shape (numel,), views of it on the host.

        Args:
            numels: the length of each tensor.
            dtype: the dtype of the tensors.
            pin: whether to pin the slab for CUDA.

        Raises:
            ToolkitError: if CUDA cannot pin the memory.
        """
        slab = torch.empty(sum(numels), dtype=dtype)
        slab.zero_()  # touched now: a host that has promised too much fails here, not in the midst of training
        self._slabs.append(slab)
        if pin and slab.numel():
            self._pin(slab)
        return iter(torch.split(slab, list(numels)))

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all slabs."""
        return sum(slab.numel() * slab.element_size() for slab in self._slabs)

    def release(self) -> None:
        """Unpins and drops all slabs."""
        _unpin(self._pinned)
        self._slabs.clear()

    def _pin(self, slab: torch.Tensor) -> None:
        """Pins existing memory, because torch's pinned allocator rounds up to a power of two (pytorch#95823)."""
        size = slab.numel() * slab.element_size()
        code = int(_cudart().cudaHostRegister(slab.data_ptr(), size, 0))
        if code != 0:
            held = held_bytes() - self.nbytes
            advice = _memory_advice(held) if held else "raise the limit of locked memory (ulimit -l), or use more ranks"
            raise ToolkitError(
                f"offload: CUDA could not pin {format_bytes(size)} of host memory (error {code}); {advice}"
            )
        self._pinned.append(slab.data_ptr())


def _unpin(addresses: list[int]) -> None:
    for address in addresses:
        _cudart().cudaHostUnregister(address)
    addresses.clear()


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def processor_features() -> str:
    """Returns the processor's name and features, as far as the system reports them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    # Reversed, so that of each field the first processor's line is kept.
    fields = {line.partition(":")[0].strip(): line for line in reversed(lines)}
    # `Features` is what ARM has in place of `flags`.
    return " ".join(fields.get(field, "") for field in ("model name", "flags", "Features"))


def multiplies_in_bf16() -> bool:
    """Returns whether this machine's processor has instructions for products of bf16 matrices."""
    return not {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}.isdisjoint(processor_features().split())
