"""Plans, allocates and fills the masters, moments and gradient buffers of all units."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from toolkit import ranks
from toolkit.errors import BadInputError
from toolkit.paths import GIB
from toolkit.recipe.combinations import refuse
from toolkit.recipe.features import settings_of_backend
from toolkit.sharding.offload.host import HostPlan, Slabs, plan_host, require_host_memory
from toolkit.sharding.offload.offloaded_units import OffloadedUnit, UnitSlice

# One is written while the other is being copied to the device.
STAGING_BUFFERS = 2


class OffloadedState:
    """Holds the tensors of an offloaded optimizer. Allocates all host memory at once. Collective.

    Args:
        units: the units in the order of the forward.
        names: the optimizer's tensors, by torch's names.
        device: the device of resident units.
        device_state_gib: GiB of state on the device, from the first unit on.
        gradient_dtype: the dtype in which gradients arrive on the host.
        executor: decides what is pinned, and the staging.

    Attributes:
        plan: the bytes on the host.
        slabs: owns the host memory.
        staging: flat buffers in the compute type, as long as the longest unit.
        scratch: flat float32, as long as the longest unit, or None if the executor does not need it.

    Raises:
        BadInputError: if a host does not have the memory.
    """

    def __init__(
        self,
        units: Sequence[OffloadedUnit],
        names: tuple[str, ...],
        device: torch.device,
        device_state_gib: float,
        gradient_dtype: torch.dtype,
        executor: str,
    ) -> None:
        self.units = units
        self.device = device
        self.staging: list[torch.Tensor] = []
        self.scratch: torch.Tensor | None = None
        self._names = names
        self._gradient_dtype = gradient_dtype
        self._executor = executor
        self.slabs = Slabs()
        self._slots = {slot.name: (unit, slot) for unit in units for slot in unit.slots}
        self._mark_residents(int(device_state_gib * GIB))
        self.plan = self._plan_host_memory()
        # Before anything is taken: otherwise the system ends a process, and says nothing of what was missing.
        require_host_memory(self.plan)
        # All of it now, pinned memory too. Pinning waits for the device: in the middle of training, a rank that pins
        # holds up the others' collectives (prime-rl met this as a deadlock).
        ranks.on_every_rank(self._allocate, f"take host memory for offload, {self.plan}")

    @property
    def residents(self) -> list[OffloadedUnit]:
        """Returns the units whose state is on the device."""
        return [unit for unit in self.units if unit.resident]

    @property
    def hosted(self) -> list[OffloadedUnit]:
        """Returns the units whose state is on the host."""
        return [unit for unit in self.units if not unit.resident]

    def by_parameter(self) -> dict[int, tuple[OffloadedUnit, UnitSlice]]:
        """Maps the id of each parameter to its unit and its slot."""
        return {id(slot.parameter): (unit, slot) for unit in self.units for slot in unit.slots}

    @torch.no_grad()
    def seed(self, name: str, rows: torch.Tensor) -> None:
        """Copies this rank's rows of a master into its slot.

        Args:
            name: the parameter's first name.
            rows: this rank's rows without padding, in the shape of the slot, of any dtype and on any device.
        """
        unit, slot = self._slots[name]
        slot.view(unit.master).copy_(rows)

    @property
    def host_bytes(self) -> int:
        """Returns the bytes of host memory that are allocated."""
        return self.slabs.nbytes

    def _mark_residents(self, room: int) -> None:
        # From the front and without gaps: the forward comes to the first units soonest, so they have the least time to
        # hide in.
        for unit in self.units:
            # Master, moments and gradient.
            room -= unit.numel * (4 * (1 + len(self._names)) + self._gradient_dtype.itemsize)
            if room < 0:
                return
            unit.resident = True

    def _plan_host_memory(self) -> HostPlan:
        hosted = [unit.numel for unit in self.hosted]
        staged = self._staged_bytes + 4 * self._needs_scratch
        return plan_host(hosted, len(self._names), self._gradient_dtype.itemsize, staged)

    @property
    def _longest_numel(self) -> int:
        return max((unit.numel for unit in self.hosted), default=0)

    @property
    def _compute_dtype(self) -> torch.dtype:
        # The dtype of most parameters. Those that stay in float32 are copied from their masters.
        types = {slot.parameter.dtype for unit in self.units for slot in unit.slots}
        return min(types, key=lambda dtype: dtype.itemsize)

    @property
    def _staged_bytes(self) -> int:
        # Streamed state computes its weights on the device, so none have to be copied there.
        return 0 if self._executor == "device_stream" else STAGING_BUFFERS * self._compute_dtype.itemsize

    @property
    def _needs_scratch(self) -> bool:
        # torch steps only with float32 gradients; our kernel reads bfloat16 directly.
        return self._executor == "cpu_torch" and self._gradient_dtype != torch.float32

    def _allocate(self) -> None:
        lengths = [unit.numel for unit in self.hosted]
        pin = self.device.type == "cuda"
        # Pin only what the device copies. Only the host reads masters and moments, most of the memory, unless they are
        # streamed through the device.
        pin_state = pin and self._executor == "device_stream"
        masters = self.slabs.cut(lengths, torch.float32, pin_state)
        moments = {name: self.slabs.cut(lengths, torch.float32, pin_state) for name in self._names}
        landings = self.slabs.cut(lengths, self._gradient_dtype, pin)
        for unit in self.hosted:
            unit.master, unit.landing = next(masters), next(landings)
            unit.moments = {name: next(slab) for name, slab in moments.items()}
        for unit in self.residents:
            unit.master = torch.zeros(unit.numel, device=self.device)
            unit.moments = {name: torch.zeros(unit.numel, device=self.device) for name in self._names}
            unit.landing = torch.zeros(unit.numel, dtype=self._gradient_dtype, device=self.device)
        if self._staged_bytes:
            self.staging = list(self.slabs.cut([self._longest_numel] * STAGING_BUFFERS, self._compute_dtype, pin))
        if self._needs_scratch:
            (self.scratch,) = self.slabs.cut([self._longest_numel], torch.float32, pin=False)


def require_types(units: Sequence[OffloadedUnit], mixed_precision: str) -> None:
    """Checks that the parameters can have float32 masters.

    Raises:
        BadInputError: if offload does not support the precision, or a parameter is not float32 without mixed precision.
    """
    refuse(settings_of_backend(mixed_precision, offload="optimizer"))
    for unit in units:
        for slot in unit.slots:
            if mixed_precision == "no" and slot.parameter.dtype != torch.float32:
                raise BadInputError(
                    f"offload: {slot.name} is held in {slot.parameter.dtype} without mixed precision, and the masters "
                    "of offloaded optimizer state are float32; set mixed_precision to bf16, or load it in float32"
                )
