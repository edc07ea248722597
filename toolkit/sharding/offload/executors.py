"""Steps a unit's state: on the host by torch or by our kernel, on the device, or streamed through the device.

Only the worker thread calls an executor. It takes a gradient on the host, updates masters and moments in place, and
returns the new weights for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from toolkit.sharding.offload.kernel import AdamWKernel, Segment
from toolkit.sharding.offload.offloaded_units import OffloadedUnit, UnitSlice
from toolkit.sharding.offload.settings import counts_steps, hyper_parameters

# ---- Cuts a unit into chunks of bounded size, so that device buffers do not grow with the longest unit ----

ALIGNMENT = 64
"""Each part of a parameter but the last has a multiple of this many elements. torch's vectorised kernels round the last
few elements of a tensor differently, so these must be the last elements of the whole parameter."""

Part = tuple[int, int, int]
"""The index of a slot, the first element of the part, and one past its last element."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """Consecutive elements of a unit's flat tensors.

    Attributes:
        begin: the index of the first element.
        end: one past the last element.
        unit: a unit of the parameters, or parts of them, inside the chunk. Its offsets count from `begin`.
        sources: the indices of the whole parameters' slots, in the same order.
    """

    begin: int
    end: int
    unit: OffloadedUnit
    sources: list[int]

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns this chunk, (end - begin,), as a view of a flat tensor of the unit."""
        return flat[self.begin : self.end]

    def present(self, present: frozenset[int]) -> frozenset[int]:
        """Returns the chunk's slots that have a gradient, given those of the whole unit."""
        return frozenset(i for i, source in enumerate(self.sources) if source in present)

    def take_counts(self, unit: OffloadedUnit) -> None:
        """Copies step counts from the unit's parameters to their parts. A last part shares its parameter's count."""
        for part, source in zip(self.unit.slots, self.sources, strict=True):
            if part.step is not unit.slots[source].step:
                part.step.copy_(unit.slots[source].step)


def chunks_of(unit: OffloadedUnit, limit: int) -> list[Chunk]:
    """Cuts the unit into chunks of at most `limit` elements, a multiple of `ALIGNMENT`."""
    return [_make_chunk(unit, parts) for parts in _parts_of_chunks(unit, limit)]


def _parts_of_chunks(unit: OffloadedUnit, limit: int) -> Iterator[list[Part]]:
    """Yields the parts of each chunk, in order."""
    parts: list[Part] = []
    end = limit
    for index, slot in enumerate(unit.slots):
        start = 0
        while start < slot.numel or slot.numel == 0:
            if not parts:
                end = slot.offset + start + limit
            rest, room = slot.numel - start, end - slot.offset - start
            taken = rest if rest <= room else room // ALIGNMENT * ALIGNMENT
            if taken > 0 or rest == 0:  # a shard can be empty, and its steps are counted all the same
                parts.append((index, start, start + taken))
                start += taken
            if start < slot.numel:
                yield parts
                parts = []
            elif slot.numel == 0:
                break
    yield parts


def _make_chunk(unit: OffloadedUnit, parts: list[Part]) -> Chunk:
    begin = unit.slots[parts[0][0]].offset + parts[0][1]
    # An empty shard may stand far beyond the last element.
    end = max([begin, *(unit.slots[index].offset + stop for index, start, stop in parts if stop > start)])
    slots = [_part_slot(unit.slots[index], start, stop, begin) for index, start, stop in parts]
    return Chunk(begin, end, OffloadedUnit(unit.name, [], slots, end - begin), [index for index, _, _ in parts])


def _part_slot(slot: UnitSlice, start: int, stop: int, begin: int) -> UnitSlice:
    offset = slot.offset + start - begin
    if stop - start == slot.numel:
        return replace(slot, offset=offset)
    # Each part is stepped by itself, and would count the parameter's steps once more.
    step = slot.step if stop == slot.numel else slot.step.clone()
    return replace(slot, offset=offset, shape=torch.Size((stop - start,)), step=step)


@dataclass(frozen=True)
class UnitStep:
    """A step of one unit.

    Attributes:
        unit: the unit to step.
        gradient: flat, (unit.numel,), float32 or the compute type. The executor may write to it.
        present: the indices of the slots that have a gradient.
        settings: the settings of every parameter group at the time of `step()`.
        scale: the factor of the gradient, for clipping.
    """

    unit: OffloadedUnit
    gradient: torch.Tensor
    present: frozenset[int]
    settings: tuple[dict[str, Any], ...]
    scale: float

    @property
    def slots(self) -> Iterator[Any]:
        """Returns the slots to step."""
        numbered = enumerate(self.unit.slots)
        return (slot for i, slot in numbered if i in self.present and slot.group is not None)


Weights = Iterable[tuple[int, torch.Tensor]]
"""New weights of a unit in pieces: the index of the first element in the unit's flat tensors, and the piece, (n,).
Each piece is valid until the next one is requested."""


class Executor(Protocol):
    """Steps the optimizer state of units."""

    def stream(self, unit: OffloadedUnit) -> Any:
        """Returns the stream on which this unit is stepped and its weights are copied to the device."""

    def step(self, step: UnitStep) -> Weights:
        """Takes the step. Returns the new weights, valid on the current stream, which is `stream(unit)`."""

    def sent(self, event: Any) -> None:
        """Says that the weights returned last are in use until `event`."""


class Staging:
    """Host buffers, pinned for a GPU, from which new weights are copied to the device. They are used in turn.

    Args:
        buffers: flat, in the compute type, as long as the longest unit.
        device: the device of the shards.
    """

    def __init__(self, buffers: Sequence[torch.Tensor], device: torch.device) -> None:
        self.stream = getattr(torch, device.type).Stream()
        self._buffers = list(buffers)
        self._busy: list[Any] = [None] * len(self._buffers)
        self._next = 0

    def take(self, numel: int) -> torch.Tensor:
        """Waits for a free buffer and returns it, (numel,), in the compute type, on the host."""
        # The host itself writes to the buffer, so the host has to wait, and not a stream.
        event = self._busy[self._next]
        if event is not None:
            event.synchronize()
        return self._buffers[self._next][:numel]

    def sent(self, event: Any) -> None:
        """Marks the buffer taken last as free once `event` has happened."""
        self._busy[self._next] = event
        self._next = (self._next + 1) % len(self._buffers)


class FlatOptimizer:
    """Runs the user's optimizer class on views of a unit's flat tensors, with state in our memory.

    Each parameter is a separate view, not one flat tensor, because torch's vectorised kernels round the last few
    elements of a tensor differently. So the step equals the ordinary one bit for bit.

    Args:
        optimizer: the optimizer whose class and settings are used.
        unit: the unit to step.
        master: the weights to step, flat float32, (unit.numel,), on any device.
        moments: the optimizer's tensors by torch's names, like `master`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        unit: OffloadedUnit,
        master: torch.Tensor,
        moments: dict[str, torch.Tensor],
    ) -> None:
        self._masters = {
            i: torch.nn.Parameter(slot.view(master)) for i, slot in enumerate(unit.slots) if slot.group is not None
        }
        self._groups = sorted({slot.group for slot in unit.slots if slot.group is not None})
        members = [[p for i, p in self._masters.items() if unit.slots[i].group == group] for group in self._groups]
        settings = hyper_parameters(optimizer)
        # Fused, Adam is five times as fast. Not SGD: DTensors have no fused SGD to compare with.
        fused = {} if isinstance(optimizer, torch.optim.SGD) else {"fused": True}
        options = [
            {**settings[group], "params": params, **fused} for group, params in zip(self._groups, members, strict=True)
        ]
        # Without parameters if no optimizer steps any of the unit, such as a trainable body below the head that is.
        self._inner = type(optimizer)(options or [{"params": []}])  # type: ignore[call-arg]
        # torch would create missing state in its own memory, so set the state of all parameters.
        for i, master_view in self._masters.items():
            slot = unit.slots[i]
            state = {name: slot.view(flat) for name, flat in moments.items()}
            self._inner.state[master_view] = {"step": slot.step, **state} if counts_steps(optimizer) else state
        self._unit = unit

    def step(self, step: UnitStep, gradient: torch.Tensor) -> None:
        """Takes one step.

        Args:
            step: the step.
            gradient: the scaled gradient, flat float32, (unit.numel,), on the device of the masters.
        """
        for i, master in self._masters.items():
            # None and not zeros for what no rank used: with zeros AdamW would still decay it.
            master.grad = self._unit.slots[i].view(gradient) if i in step.present else None
        for index, group in zip(self._groups, self._inner.param_groups, strict=False):
            # As they were at `step()`: a scheduler has changed the user's optimizer since.
            group.update(step.settings[index])
        self._inner.step()
        # The gradient is a view of a landing place, and the next gradient lands there.
        for master in self._masters.values():
            master.grad = None


def _scaled_gradient(step: UnitStep, scratch: torch.Tensor | None) -> torch.Tensor:
    """Returns the scaled gradient in float32, (unit.numel,). Works in place if it already is float32."""
    gradient = step.gradient
    # torch's fused AdamW refuses float32 parameters with bfloat16 gradients.
    if gradient.dtype != torch.float32:
        gradient = gradient.float() if scratch is None else scratch[: gradient.numel()].copy_(gradient)
    # Clipping is an extra pass over memory here: 21.3 ms instead of 13.0 for 25M parameters, rounding included.
    return gradient.mul_(step.scale) if step.scale != 1.0 else gradient


class _Staged:
    """The base of executors on the host, whose weights go to the device through the staging buffers."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging

    def stream(self, unit: OffloadedUnit) -> Any:
        return self._staging.stream

    def sent(self, event: Any) -> None:
        self._staging.sent(event)


class CpuTorch(_Staged):
    """Steps units on the host with torch's fused optimizer.

    Args:
        optimizer: the optimizer whose class and settings are used.
        units: the units to step.
        staging: the buffers through which weights leave for the device.
        scratch: flat float32, as long as the longest unit. None if gradients arrive in float32.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        units: Sequence[OffloadedUnit],
        staging: Staging,
        scratch: torch.Tensor | None,
    ) -> None:
        self._inner = {unit: FlatOptimizer(optimizer, unit, unit.master, unit.moments) for unit in units}
        super().__init__(staging)
        self._scratch = scratch

    def step(self, step: UnitStep) -> Weights:
        self._inner[step.unit].step(step, _scaled_gradient(step, self._scratch))
        # Take the buffer after the step: its last copy to the device has had that long to finish.
        return [(0, self._staging.take(step.unit.numel).copy_(step.unit.master))]


class CpuFused(_Staged):
    """Steps units on the host with our kernel: clipping, AdamW and rounding in one pass over memory."""

    def __init__(self, kernel: AdamWKernel, staging: Staging, threads: int) -> None:
        super().__init__(staging)
        self._kernel = kernel
        self._threads = threads

    def step(self, step: UnitStep) -> Weights:
        unit = step.unit
        # Take the buffer before the step, because the kernel writes the rounded weights into it.
        weights = self._staging.take(unit.numel)
        stepped = list(step.slots)
        for slot in stepped:
            # torch counts inside its own step, which is not called here.
            slot.step += 1
        self._kernel.step(
            unit.master,
            unit.moments["exp_avg"],
            unit.moments["exp_avg_sq"],
            step.gradient,
            weights,
            [_kernel_segment(slot, step.settings[slot.group]) for slot in stepped],
            step.scale,
            self._threads,
        )
        return [(0, weights)]


def _kernel_segment(slot: Any, settings: dict[str, Any]) -> Segment:
    beta1, beta2 = settings["betas"]
    return Segment(
        slot.offset,
        slot.numel,
        settings["lr"],
        beta1,
        beta2,
        settings["eps"],
        settings["weight_decay"],
        int(slot.step.item()),
    )


class Resident:
    """Steps units whose state is on the device, with torch's fused optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, units: Sequence[OffloadedUnit], device: torch.device) -> None:
        self._inner = {unit: FlatOptimizer(optimizer, unit, unit.master, unit.moments) for unit in units}
        # Not the current stream: the step runs during the next forward, which waits for one unit after the other.
        self._stream = getattr(torch, device.type).Stream()

    def stream(self, unit: OffloadedUnit) -> Any:
        return self._stream

    def sent(self, event: Any) -> None:
        """Does nothing, because masters stay in place."""

    def step(self, step: UnitStep) -> Weights:
        self._inner[step.unit].step(step, _scaled_gradient(step, None))
        return [(0, step.unit.master)]


STREAM_BYTES = 2 * 4 * 4
"""Bytes of device memory for each element that is streamed at once: two sets of master, gradient and two moments in
float32."""

STREAM_CHUNK = 2**24
"""Elements that are streamed through the device at once, in 512 MiB of buffers. Whole units would need 15.7 GiB for an
8B model on one GPU, because its head alone has 525 million parameters. A copy of 64 MiB is as fast as a longer one."""
assert STREAM_CHUNK % ALIGNMENT == 0


def stream_bytes(longest: int) -> int:
    """Returns the device memory in bytes that `device_stream` takes if the longest unit has `longest` elements."""
    return STREAM_BYTES * min(longest, STREAM_CHUNK)


class DeviceStream:
    """Streams state that is on the host through the device, one chunk of a unit at a time.

    Units alternate between two sets of device buffers, each with its own stream. So the state of one unit is copied in
    while that of another is copied out.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, units: Sequence[OffloadedUnit], device: torch.device) -> None:
        handle = getattr(torch, device.type)
        longest = min(STREAM_CHUNK, max(unit.numel for unit in units))
        names = ("master", "gradient", *units[0].moments)
        self._streams = [handle.Stream() for _ in range(2)]
        self._buffers = [{name: torch.empty(longest, device=device) for name in names} for _ in range(2)]
        self._lane = {unit: i % 2 for i, unit in enumerate(units)}
        self._chunks = {unit: chunks_of(unit, STREAM_CHUNK) for unit in units}
        self._inner = {}
        for unit in units:
            for chunk in self._chunks[unit]:
                flats = self._lane_buffers(unit, chunk.unit.numel)
                moments = {name: flats[name] for name in unit.moments}
                self._inner[chunk] = FlatOptimizer(optimizer, chunk.unit, flats["master"], moments)

    def stream(self, unit: OffloadedUnit) -> Any:
        return self._streams[self._lane[unit]]

    def sent(self, event: Any) -> None:
        """Does nothing, because only one stream uses a set of buffers, which keeps the order."""

    def step(self, step: UnitStep) -> Weights:
        unit = step.unit
        host = {"master": unit.master, **unit.moments}
        for chunk in self._chunks[unit]:
            flats = self._lane_buffers(unit, chunk.unit.numel)
            # All of it on the unit's one stream, so that in, step and out keep their order; only units of the other set
            # of buffers run next to it.
            flats["gradient"].copy_(chunk.of(step.gradient), non_blocking=True)
            for name, tensor in host.items():
                flats[name].copy_(chunk.of(tensor), non_blocking=True)
            # On the device, and not on the host: there it would be one more pass over host memory.
            if step.scale != 1.0:
                flats["gradient"].mul_(step.scale)
            chunk.take_counts(unit)
            part = replace(step, unit=chunk.unit, present=chunk.present(step.present))
            self._inner[chunk].step(part, flats["gradient"])
            for name, tensor in host.items():
                chunk.of(tensor).copy_(flats[name], non_blocking=True)
            yield chunk.begin, flats["master"]

    def _lane_buffers(self, unit: OffloadedUnit, numel: int) -> dict[str, torch.Tensor]:
        return {name: flat[:numel] for name, flat in self._buffers[self._lane[unit]].items()}
