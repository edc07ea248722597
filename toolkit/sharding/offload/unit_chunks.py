"""Cuts a unit into chunks of bounded size, so that device buffers do not grow with the longest unit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from toolkit.sharding.offload.offloaded_units import OffloadedUnit, Slot

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


def _part_slot(slot: Slot, start: int, stop: int, begin: int) -> Slot:
    offset = slot.offset + start - begin
    if stop - start == slot.numel:
        return replace(slot, offset=offset)
    # Each part is stepped by itself, and would count the parameter's steps once more.
    step = slot.step if stop == slot.numel else slot.step.clone()
    return replace(slot, offset=offset, shape=torch.Size((stop - start,)), step=step)
