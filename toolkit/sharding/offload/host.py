"""Host memory: how much, whether the machine has it, and one slab for each kind of tensor."""

from __future__ import annotations

import platform
import resource
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from toolkit import ranks
from toolkit.errors import BadInputError, ToolkitError
from toolkit.places import GIB

# Of cgroup version 2. Without its files the host's own figure stands.
CGROUP = Path("/sys/fs/cgroup")


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


def require_host_memory(plan: HostPlan) -> None:
    """Raises BadInputError on every rank where the ranks of a host need more than it has. Collective."""
    mine = (platform.node(), plan.total, free_host_bytes(), _process_room())
    needed: dict[str, int] = defaultdict(int)
    rooms = ranks.gather_objects(mine)
    for host, total, _, _ in rooms:
        # The ranks of a host share its memory: each may fit alone, and all together not.
        needed[host] += total
    # Every rank looks at the figures of all, so that all raise the same error and none is left in a collective.
    for rank, (host, total, host_room, process_room) in enumerate(rooms):
        if process_room is not None and total > process_room:
            raise _no_room(f"rank {rank}", total, f"its limit (ulimit) leaves {_size(process_room)}", plan)
        if needed[host] > host_room:
            raise _no_room(f"the ranks of host {host}", needed[host], f"{_size(host_room)} are free", plan)


def _no_room(who: str, needed: int, found: str, plan: HostPlan) -> BadInputError:
    return BadInputError(
        f"offload: {who} would take {_size(needed)} of host memory, but {found}. A rank takes {plan}; use more "
        "hosts or a smaller model, keep some of it on the device (device_state_gib), or train without offload"
    )


def free_host_bytes() -> int:
    """Free bytes of this host, or of the container that it is."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = int((CGROUP / "memory.max").read_text())
        return min(free, limit - int((CGROUP / "memory.current").read_text()))
    except (OSError, ValueError):  # no such file, or no limit ("max")
        return free


def _process_room() -> int | None:
    """Bytes that this process may still take; None without a limit."""
    used = psutil.Process().memory_info()
    rooms = [
        limit - getattr(used, kind)
        for name, kind in ((resource.RLIMIT_AS, "vms"), (resource.RLIMIT_DATA, "data"))
        if (limit := resource.getrlimit(name)[0]) != resource.RLIM_INFINITY
    ]
    return min(rooms) if rooms else None


class Slabs:
    """Flat host tensors cut from one allocation for each kind, so that few are pinned and none is rounded up."""

    def __init__(self) -> None:
        self._slabs: list[torch.Tensor] = []
        self._pinned: list[int] = []

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
        for address in self._pinned:
            _cudart().cudaHostUnregister(address)
        self._pinned.clear()
        self._slabs.clear()

    def _pin(self, slab: torch.Tensor) -> None:
        """Pins what is there: torch's own pinned allocator rounds up to a power of two (pytorch#95823)."""
        size = slab.numel() * slab.element_size()
        code = int(_cudart().cudaHostRegister(slab.data_ptr(), size, 0))
        if code != 0:
            raise ToolkitError(
                f"offload: CUDA could not pin {_size(size)} of host memory (error {code}); "
                "raise the limit of locked memory (ulimit -l) or use fewer parameters a rank"
            )
        self._pinned.append(slab.data_ptr())


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
