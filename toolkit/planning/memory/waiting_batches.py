"""Adds what the waiting micro-batches of a step hold while one of them is in a unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from toolkit.planning.memory.probe import Probe
from toolkit.planning.memory.unit_shapes import UnitShape


def window(units: Sequence[UnitShape], probe: Probe, num_batches: int) -> Probe:
    """Returns the probe of one micro-batch with what the others of its step hold at the same time.

    While one is in block u, each of the others holds the inputs of the blocks up to u and u's output or, in backward,
    a gradient of the output's size. All their batches are on the device from the start. Levels of backward are those of
    the last micro-batch, when the others have passed the block.

    Args:
        probe: with every block checkpointed, so that a block leaves nothing but its input.
    """
    exits = [event for event in probe.events if event.kind == "exit" and units[event.unit].kind == "block"]
    if not exits:
        return probe
    after = {event.unit: event.level for event in exits}
    before = dict(zip(after, (0, *after.values()), strict=False))
    others, reached, is_after_loss, block, events = num_batches - 1, 0, False, -1, []
    for event in probe.events:
        is_after_loss = is_after_loss or event.kind == "loss"
        if units[event.unit].kind != "experts":  # experts run inside of their block
            block = event.unit
        # Between blocks the level is that of the block that ran last.
        reached = (before if is_after_loss else after).get(block, reached)
        waiting = others * reached
        # Bytes that micro-batches before the block hold more than those after it.
        more = after[block] - before[block] if is_after_loss and block in after else 0
        events.append(replace(event, level=event.level + waiting, peak=event.peak + waiting, to_come=more))
    return replace(probe, events=tuple(events), buffers=probe.buffers + others * probe.batch)
