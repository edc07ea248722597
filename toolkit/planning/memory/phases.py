"""Names the moments of a step from a probe's events."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.planning.memory.probe import ProbeEvent
from toolkit.planning.memory.unit_shapes import UnitShape

HEAD = ("forward of the head", "loss", "backward of the loss", "backward of the head")
"""Moments in which live bytes beyond the blocks' activations belong to the logits."""


def moment_names(events: Sequence[ProbeEvent], units: Sequence[UnitShape]) -> list[str]:
    """Returns the name of what runs before each of a probe's events."""
    in_blocks = [i for i, event in enumerate(events) if units[event.unit].kind == "block"]
    exits = [i for i in in_blocks if events[i].kind == "exit"]
    backwards = [i for i in in_blocks if events[i].kind == "pre_backward"]
    loss = next(i for i, event in enumerate(events) if event.kind == "loss")
    last_exit, first_backward = (exits or [loss])[-1], (backwards or [loss])[0]
    names = []
    for i, event in enumerate(events):
        name = units[event.unit].name
        if i in exits:
            names.append(f"forward of {name}")
        elif units[event.unit].kind == "block" and event.kind == "post_backward":
            names.append(f"backward of {name}")
        elif last_exit < i < loss:
            names.append("forward of the head")
        elif i == loss:
            names.append("loss")
        elif loss < i <= first_backward:
            names.append("backward of the loss" if i == loss + 1 else "backward of the head")
        else:
            names.append("forward" if i < loss else "backward")
    return names


def level_before_head(events: Sequence[ProbeEvent], units: Sequence[UnitShape]) -> int:
    """Returns the live activations (bytes) when the last block's forward is done."""
    exits = [event for event in events if event.kind == "exit" and units[event.unit].kind == "block"]
    return exits[-1].level if exits else 0
