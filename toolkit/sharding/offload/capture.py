"""Takes gradients as FSDP2 reduces them, copies them to the host and frees them at once.

They are taken from the flat result of the reduce-scatter, in the dtype of the reduction. FSDP2 rounds the result to the
parameter's dtype, bfloat16, before it becomes `.grad`.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable

import torch

from toolkit.errors import BadInputError
from toolkit.sharding.fsdp2.fsdp_replaced import free_reduced_gradient, reduce_again_after
from toolkit.sharding.offload.offloaded_units import OffloadedUnit

# If the bus is slower than backward, gradients would otherwise pile up on the device, 4 bytes per parameter.
MAX_IN_FLIGHT = 3
"""Units whose reduced gradients may wait on the device for their copy to the host."""


class Capture:
    """Takes the gradients of all units.

    Args:
        device: the device of the shards.
        is_last_micro_batch: returns whether the current backward is the last of the optimizer step.
        on_landed: called for a unit once the copy of its gradient to the host is queued, on FSDP2's stream.
        require_layout: called if a unit's gradient has another length than was laid out; raises an error that says why.
        once: whether a second gradient of a unit before a step is an error, because the unit is already being stepped.
    """

    def __init__(
        self,
        device: torch.device,
        is_last_micro_batch: Callable[[], bool],
        on_landed: Callable[[OffloadedUnit], None],
        require_layout: Callable[[], None],
        once: bool,
    ) -> None:
        self._handle = getattr(torch, device.type)
        self._is_last = is_last_micro_batch
        self._on_landed = on_landed
        self._require_layout = require_layout
        self._once = once
        self._stream = self._handle.Stream()
        self._in_flight: deque[OffloadedUnit] = deque()
        self._reduced: OffloadedUnit | None = None
        self._units: list[OffloadedUnit] = []

    def attach(self, unit: OffloadedUnit) -> None:
        """Registers the hooks of one unit."""
        self._units.append(unit)
        unit.modules[0].set_all_reduce_hook(lambda reduced: self._on_reduced(unit, reduced))
        free_reduced_gradient(unit.modules[0])
        # Weakly: Python's garbage collector does not see a tensor's hooks. Through this object each hook would keep the
        # model, its state and its process group alive until the process ends.
        own_drop = weakref.WeakMethod(self._drop_rounded)

        def drop(parameter: torch.Tensor) -> None:
            if (act := own_drop()) is not None:
                act(parameter)

        for slot in unit.slots:
            # FSDP2 makes a rounded `.grad` all the same, which nobody needs; of a float32 parameter, too.
            slot.parameter.grad_dtype = None
            slot.parameter.register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _on_reduced(self, unit: OffloadedUnit, reduced: torch.Tensor) -> None:
        """Accumulates the gradient, or passes it on if the micro-batch is the last.

        Args:
            unit: the unit that was reduced.
            reduced: this rank's padded shards of the unit's gradients, concatenated, (unit.numel,).
        """
        if reduced.numel() != unit.numel:
            self._require_layout()
        self._reduced = unit
        flat = reduced if unit.accumulated is None else unit.accumulated.add_(reduced)
        if self._is_last():
            unit.accumulated = None
            self._pass_on(unit, flat)
        elif unit.accumulated is None:
            # A copy: once the hook is over, FSDP2 hands the memory on. In float32 on the device, so that a window's sum
            # travels to the host once.
            unit.accumulated = flat.to(torch.float32, copy=True)

    def _drop_rounded(self, parameter: torch.Tensor) -> None:
        """Frees the rounded `.grad`. Called for every parameter of a unit, right after `_on_reduced`."""
        parameter.grad = None
        if self._reduced is not None:
            reduce_again_after(self._reduced.modules[0], self._handle.current_stream().record_event())
            self._reduced = None

    @torch.no_grad()
    def finish(self) -> None:
        """Sends the sums of units that were not reduced in the last micro-batch of the optimizer step to the host."""
        for unit in self._units:
            if unit.accumulated is not None:
                flat, unit.accumulated = unit.accumulated, None
                self._pass_on(unit, flat)

    def _pass_on(self, unit: OffloadedUnit, flat: torch.Tensor) -> None:
        if unit.norms is None:
            self._copy_to_host(unit, flat)
        else:
            self._add_on_host(unit, flat)
        self._on_landed(unit)

    def _copy_to_host(self, unit: OffloadedUnit, flat: torch.Tensor) -> None:
        """Copies a gradient to the host on a separate stream: backward's end waits for FSDP2's own streams."""
        # Now, while it is on the device: clipping needs the norm long before the host could have read it all.
        unit.norms = _slot_norms(unit, flat)
        if unit.leaving is not None:
            wait_for_landing(unit)  # no step has used the last gradient, and none has waited for it
        self._stream.wait_event(self._handle.current_stream().record_event())
        with self._handle.stream(self._stream):
            unit.gradient = _landing_buffer(unit, flat.dtype).copy_(flat, non_blocking=True)
            unit.landed = self._stream.record_event()
        unit.leaving = flat
        self._in_flight.append(unit)
        # The host waits for the oldest: backward slows down to the speed of the copies, and memory stays bounded.
        while len(self._in_flight) > MAX_IN_FLIGHT:
            wait_for_landing(self._in_flight.popleft())

    def _add_on_host(self, unit: OffloadedUnit, flat: torch.Tensor) -> None:
        """Adds a second gradient before the step: of a module used twice, or of a backward outside of `accumulate`.

        Raises:
            BadInputError: the first one is being stepped already.
        """
        if self._once:
            raise BadInputError(
                f"offload: {unit.name or 'the root'} got two gradients before one step, for example because the model "
                "uses it twice, and the first is being stepped during backward; set training.max_grad_norm (one that "
                "is never reached, as 1e9, clips nothing), or during_backward=False in OffloadSettings"
            )
        assert unit.gradient is not None
        # Where it landed, and at once. `accumulate` does not come here: it sums on the device.
        wait_for_landing(unit)
        total = unit.gradient.float().add_(flat if unit.resident else flat.to("cpu", torch.float32))
        unit.norms = _slot_norms(unit, total).to(flat.device)
        unit.gradient = _landing_buffer(unit, torch.float32).copy_(total)


def _slot_norms(unit: OffloadedUnit, flat: torch.Tensor) -> torch.Tensor:
    """Returns the 2-norm of each parameter's rows, (number of slots,), as torch's `get_total_norm` computes it."""
    return torch.stack([torch.linalg.vector_norm(slot.view(flat), dtype=torch.float32) for slot in unit.slots])


def _landing_buffer(unit: OffloadedUnit, dtype: torch.dtype) -> torch.Tensor:
    """Returns the unit's host buffer for a gradient of this dtype, (unit.numel,). Grows it if the dtype is wider."""
    if unit.landing.element_size() < dtype.itemsize:
        pin = unit.landing.is_pinned()
        unit.landing = torch.empty(unit.numel, dtype=dtype, device=unit.landing.device, pin_memory=pin)
    return unit.landing.view(dtype)[: unit.numel]


def wait_for_landing(unit: OffloadedUnit) -> None:
    """Waits until the unit's gradient is on the host, then frees it on the device."""
    if unit.landed is not None:
        unit.landed.synchronize()
    unit.leaving = None
