"""What the micro-batches of a step hold that wait while one of them is in a unit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from toolkit.planning.memory.probe import Probe
from toolkit.planning.memory.units import UnitShape


def window(units: Sequence[UnitShape], probe: Probe, num_batches: int) -> Probe:
    """The probe of one micro-batch with what the others of its step hold at the same time.

    While one is in block u, each of the others holds the inputs of the blocks up to u, and in backward a gradient of
    the size of one such input. The root's gradients are summed from the first loss to the end.

    Args:
        probe: with every block checkpointed, so that a block leaves nothing but its input.
    """
    exits = [event for event in probe.events if event.kind == "exit" and units[event.unit].kind == "block"]
    if not exits:
        return probe
    after = {event.unit: event.level for event in exits}
    levels = list(after.values())
    of_one_input = max((high - low for low, high in itertools.pairwise(levels)), default=levels[0])
    others, is_after_loss, reached = num_batches - 1, False, 0
    events = []
    for event in probe.events:
        is_after_loss = is_after_loss or event.kind == "loss"
        # Between blocks: as much as in the block before, in backward as much as in the one behind.
        reached = after.get(event.unit, reached)
        waiting = others * (reached + (of_one_input if is_after_loss else 0))
        events.append(replace(event, level=event.level + waiting, peak=event.peak + waiting))
    return replace(probe, events=tuple(events))
