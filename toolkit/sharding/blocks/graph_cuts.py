"""Cuts the autograd graph of a micro-batch at the units, so that backward can run unit by unit."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge


class Slot:
    """Collects the gradient of a tensor at a cut.

    Attributes:
        gradient: the sum of the gradients so far, of the tensor's shape. None before the first.
    """

    def __init__(self) -> None:
        self.gradient: torch.Tensor | None = None

    def add(self, gradient: torch.Tensor) -> None:
        """Adds a gradient of the tensor's shape."""
        self.gradient = gradient if self.gradient is None else self.gradient + gradient


class _Cut(torch.autograd.Function):
    """Starts another graph with the same values. Not a leaf, which would keep the values alive until backward."""

    @staticmethod
    def forward(ctx: Any, _anchor: torch.Tensor, value: torch.Tensor, slot: Slot) -> torch.Tensor:
        ctx.slot = slot
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.slot.add(gradients[0])
        return None, None, None


Cuts = list[tuple[GradientEdge, Slot]]


@dataclass
class Pass:
    """The pass of one micro-batch through one unit.

    Attributes:
        entered: for each input that requires a gradient, its edge in the graph before the unit and the slot that
            collects its gradient inside the unit.
        left: for each such output, its edge in the graph of the unit and the slot that collects its gradient outside.
    """

    entered: Cuts = field(default_factory=list)
    left: Cuts = field(default_factory=list)

    def backward(self) -> None:
        """Runs backward through this pass, and through the graph between it and the units before it."""
        _backward_from(self.left, retain_graph=False)
        # What leads to several units, such as an embedding of each layer's own, is run from each of them.
        _backward_from(self.entered, retain_graph=True)


def _backward_from(cuts: Cuts, retain_graph: bool) -> None:
    reached = [(edge, slot.gradient) for edge, slot in cuts if slot.gradient is not None]
    cuts.clear()
    if reached:
        edges, gradients = zip(*reached, strict=True)
        torch.autograd.backward(edges, gradients, retain_graph=retain_graph)


def reached(edges: Iterable[GradientEdge]) -> set[Slot]:
    """Returns the slots of the cuts at which the graphs behind these edges end."""
    found: set[Slot] = set()
    stack, seen = [edge.node for edge in edges], set()
    while stack:
        node: Any = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        slot = getattr(node, "slot", None)
        if isinstance(slot, Slot):
            found.add(slot)
        else:
            stack += [before for before, _ in node.next_functions]
    return found


def cut(value: Any, cuts: Cuts) -> Any:
    """Returns `value` with each tensor in it that requires a gradient at the start of another graph.

    Mappings that are not a `dict`, such as transformers' for keys and values that layers share, are changed in place:
    blocks pass them on by writing into them.

    Args:
        value: a tensor of any shape, or nested lists, tuples and mappings of tensors.
        cuts: receives the edge and the slot of each tensor that is cut.
    """
    return _cut_nested(value, cuts, {}, torch.zeros((), requires_grad=True))


def _cut_nested(value: Any, cuts: Cuts, seen: dict[int, torch.Tensor], anchor: torch.Tensor) -> Any:
    # No closure that calls itself: such a cycle holds the tensors until garbage is collected, once in many steps.
    if isinstance(value, torch.Tensor):
        if not value.requires_grad:
            return value
        if id(value) not in seen:
            cuts.append((get_gradient_edge(value), Slot()))
            seen[id(value)] = _Cut.apply(anchor, value.detach(), cuts[-1][1])  # type: ignore[no-untyped-call]
        return seen[id(value)]
    if isinstance(value, dict):
        items = {key: _cut_nested(item, cuts, seen, anchor) for key, item in value.items()}
        return items if type(value) is dict else type(value)(**items)
    if isinstance(value, list | tuple):
        parts = [_cut_nested(item, cuts, seen, anchor) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, MutableMapping):
        value.update({key: _cut_nested(item, cuts, seen, anchor) for key, item in value.items()})
    return value


def cut_written(arguments: Any, cuts: Cuts) -> None:
    """Cuts what a block has written into mappings (other than `dict`) among its arguments."""
    for value in arguments:
        if isinstance(value, MutableMapping) and not isinstance(value, dict):
            cut(value, cuts)


def bypasses(passes: Iterable[Pass], loss: torch.Tensor) -> bool:
    """Returns whether the graph of a micro-batch enters a unit other than through the unit's outputs.

    Args:
        passes: all passes of the micro-batch, before any backward.
        loss: the scalar loss of the micro-batch.
    """
    passes = list(passes)
    outputs = {slot for one in passes for _, slot in one.left}
    between = [get_gradient_edge(loss), *(edge for one in passes for edge, _ in one.entered)]
    return not reached(between) <= outputs or any(
        not reached(edge for edge, _ in one.left) <= {slot for _, slot in one.entered} for one in passes
    )
