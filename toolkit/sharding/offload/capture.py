"""Gradients on their way to the host: taken as FSDP2 reduces them, and freed at once.

They are taken from the flat result of the reduce-scatter, in the type of the reduction: FSDP2 rounds
it to the parameter's type, bfloat16, before it becomes `.grad`.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from toolkit.errors import TrainingError
from toolkit.sharding.apply import reduce_again_after
from toolkit.sharding.offload.units import OffloadedUnit

MAX_IN_FLIGHT = 3
"""Reduced gradients that wait on the device for their copy to the host (units)."""


@dataclass
class _Partial:
    """A reduced gradient that lacks some of the unit's parameters.

    Attributes:
        event: it is reduced.
        is_last: its micro-batch ends the window.
        present: indices of the slots it holds, one after the other.
    """

    unit: OffloadedUnit
    reduced: torch.Tensor
    event: Any
    is_last: bool
    present: list[int] = field(default_factory=list)

    def spread(self) -> torch.Tensor:
        """The unit's flat tensor, zero where there is no gradient."""
        unit = self.unit
        whole = torch.zeros(unit.numel, dtype=self.reduced.dtype, device=self.reduced.device)
        ends = [slot.offset for slot in unit.slots[1:]] + [unit.numel]
        start = 0
        for i in self.present:
            offset, length = unit.slots[i].offset, ends[i] - unit.slots[i].offset
            whole[offset : offset + length] = self.reduced[start : start + length]
            start += length
        return whole


class Capture:
    """Takes the gradients of all units.

    Args:
        is_last_micro_batch: whether the backward that runs now ends the accumulation window.
        wait: returns when the unit's last step has been taken.
        on_landed: called for a unit whose gradient has been sent to the host, on FSDP2's stream.
        once: a unit that is reduced twice before a step is an error, as it is being stepped already.
    """

    def __init__(
        self,
        device: torch.device,
        is_last_micro_batch: Callable[[], bool],
        wait: Callable[[OffloadedUnit], None],
        on_landed: Callable[[OffloadedUnit], None],
        once: bool,
    ) -> None:
        self._handle = getattr(torch, device.type)
        self._is_last = is_last_micro_batch
        self._wait = wait
        self._on_landed = on_landed
        self._once = once
        self._stream = self._handle.Stream()
        self._in_flight: deque[OffloadedUnit] = deque()
        self._partial: _Partial | None = None
        self._reduced: OffloadedUnit | None = None
        self._units: list[OffloadedUnit] = []

    def attach(self, unit: OffloadedUnit) -> None:
        """Registers the hooks of one unit."""
        self._units.append(unit)
        unit.modules[0].set_all_reduce_hook(lambda reduced: self._on_reduced(unit, reduced))
        for i, slot in enumerate(unit.slots):
            drop = functools.partial(self._drop, i)
            slot.parameter.register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _on_reduced(self, unit: OffloadedUnit, reduced: torch.Tensor) -> None:
        """`reduced`: this rank's padded shards of the gradients, one after the other, of those that have one."""
        self.settle()
        self._reduced = unit
        self._wait(unit)  # of a unit that took no part in the forward, the worker may still read the last one
        if reduced.numel() == unit.numel:
            self._take(unit, reduced, unit.everything, self._is_last())
        else:
            # Which parameters these are, FSDP2 tells next, by the hooks of those that have a gradient.
            self._partial = _Partial(unit, reduced, self._handle.current_stream().record_event(), self._is_last())

    def _drop(self, i: int, parameter: torch.Tensor) -> None:
        """Called for every parameter with a gradient, right after `_on_reduced` and FSDP2's rounding."""
        parameter.grad = None
        if self._reduced is not None:
            reduce_again_after(self._reduced.modules[0], self._handle.current_stream().record_event())
            self._reduced = None
        if self._partial is not None:
            self._partial.present.append(i)

    @torch.no_grad()
    def settle(self) -> None:
        """Takes the gradient of a unit some of whose parameters have none, now that it is known which."""
        if self._partial is None:
            return
        partial, self._partial = self._partial, None
        self._handle.current_stream().wait_event(partial.event)
        self._take(partial.unit, partial.spread(), frozenset(partial.present), partial.is_last)

    @torch.no_grad()
    def finish(self) -> None:
        """Sends what is left to the host: the sums of units that had no gradient in the window's last micro-batch."""
        self.settle()
        for unit in self._units:
            if unit.accumulated is not None:
                flat, present = unit.accumulated, unit.accumulated_present
                unit.accumulated, unit.accumulated_present = None, frozenset()
                self._pass_on(unit, flat, present)

    def _take(self, unit: OffloadedUnit, flat: torch.Tensor, present: frozenset[int], is_last: bool) -> None:
        if unit.accumulated is not None:
            flat = unit.accumulated.add_(flat)
            present |= unit.accumulated_present
        if not is_last:
            first = unit.accumulated is None
            unit.accumulated = flat.to(torch.float32, copy=True) if first else flat
            unit.accumulated_present = present
            return
        unit.accumulated, unit.accumulated_present = None, frozenset()
        self._pass_on(unit, flat, present)

    def _pass_on(self, unit: OffloadedUnit, flat: torch.Tensor, present: frozenset[int]) -> None:
        if unit.present:
            self._add(unit, flat, present)
        else:
            self._land(unit, flat, present)
        self._on_landed(unit)

    def _land(self, unit: OffloadedUnit, flat: torch.Tensor, present: frozenset[int]) -> None:
        """Sends a gradient to the host, on a stream of its own: FSDP2 makes backward's end wait for its own."""
        unit.norms = _norms(unit, flat)
        self._stream.wait_event(self._handle.current_stream().record_event())
        with self._handle.stream(self._stream):
            unit.gradient = _room(unit, flat.dtype).copy_(flat, non_blocking=True)
            unit.landed = self._stream.record_event()
        unit.present = present
        unit.leaving = flat
        self._in_flight.append(unit)
        while len(self._in_flight) > MAX_IN_FLIGHT:
            wait_for_landing(self._in_flight.popleft())

    def _add(self, unit: OffloadedUnit, flat: torch.Tensor, present: frozenset[int]) -> None:
        """A second gradient before the step: of another backward that Accelerate was not told to sum up."""
        if self._once:
            raise TrainingError(
                f"offload: {unit.name or 'the root'} got two gradients before one step, and the first is being stepped "
                "during backward; set during_backward=False"
            )
        assert unit.gradient is not None
        wait_for_landing(unit)
        total = unit.gradient.float().add_(flat.to(unit.gradient.device, torch.float32))
        unit.norms = _norms(unit, total).to(flat.device)
        unit.gradient = _room(unit, torch.float32).copy_(total)
        unit.present |= present


def _norms(unit: OffloadedUnit, flat: torch.Tensor) -> torch.Tensor:
    """2-norm of each parameter's rows, as torch's `get_total_norm` takes them, (number of slots,)."""
    return torch.stack([torch.linalg.vector_norm(slot.view(flat), dtype=torch.float32) for slot in unit.slots])


def _room(unit: OffloadedUnit, dtype: torch.dtype) -> torch.Tensor:
    """The unit's landing place for a gradient of this type; widened where a sum no longer fits it."""
    if unit.landing.element_size() < dtype.itemsize:
        pin = unit.landing.is_pinned()
        unit.landing = torch.empty(unit.numel, dtype=dtype, device=unit.landing.device, pin_memory=pin)
    return unit.landing.view(dtype)[: unit.numel]


def wait_for_landing(unit: OffloadedUnit) -> None:
    """Returns when the unit's gradient is on the host, and lets go of it on the device."""
    if unit.landed is not None:
        unit.landed.synchronize()
    unit.leaving = None
