"""Where the graph of a micro-batch is cut, so that its passes through the units can be run back one by one."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge


class Slot:
    """Where the gradient of a tensor arrives that stands on the other side of a cut."""

    def __init__(self) -> None:
        self.gradient: torch.Tensor | None = None

    def add(self, gradient: torch.Tensor) -> None:
        self.gradient = gradient if self.gradient is None else self.gradient + gradient


class _Cut(torch.autograd.Function):
    """The same values at the start of another graph. Not a leaf, which would keep the values alive until backward."""

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
    """One micro-batch in one unit.

    Attributes:
        entered: the graph outside, and where the gradient inside arrives, for each input that requires one.
        left: the graph inside, and where the gradient outside arrives, for each such output.
    """

    entered: Cuts = field(default_factory=list)
    left: Cuts = field(default_factory=list)

    def backward(self) -> None:
        """Runs this graph, and what lies between it and the units before it."""
        _run_back(self.left, retain_graph=False)
        # What leads to several units, such as an embedding of each layer's own, is run from each of them.
        _run_back(self.entered, retain_graph=True)


def _run_back(cuts: Cuts, retain_graph: bool) -> None:
    reached = [(edge, slot.gradient) for edge, slot in cuts if slot.gradient is not None]
    cuts.clear()
    if reached:
        edges, gradients = zip(*reached, strict=True)
        torch.autograd.backward(edges, gradients, retain_graph=retain_graph)


def reached(edges: Iterable[GradientEdge]) -> set[Slot]:
    """The slots of the cuts at which the graphs behind these edges end."""
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
    """The same, with each tensor that requires a gradient at the start of another graph.

    Mappings that are no `dict`, as transformers' for keys and values that layers share, are changed in place: blocks
    hand them on by writing into them.
    """
    return _cut(value, cuts, {}, torch.zeros((), requires_grad=True))


def _cut(value: Any, cuts: Cuts, seen: dict[int, torch.Tensor], anchor: torch.Tensor) -> Any:
    # No closure that calls itself: such a cycle holds the tensors until garbage is collected, once in many steps.
    if isinstance(value, torch.Tensor):
        if not value.requires_grad:
            return value
        if id(value) not in seen:
            cuts.append((get_gradient_edge(value), Slot()))
            seen[id(value)] = _Cut.apply(anchor, value.detach(), cuts[-1][1])  # type: ignore[no-untyped-call]
        return seen[id(value)]
    if isinstance(value, dict):
        items = {key: _cut(item, cuts, seen, anchor) for key, item in value.items()}
        return items if type(value) is dict else type(value)(**items)
    if isinstance(value, list | tuple):
        parts = [_cut(item, cuts, seen, anchor) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, MutableMapping):
        value.update({key: _cut(item, cuts, seen, anchor) for key, item in value.items()})
    return value


def cut_written(arguments: Any, cuts: Cuts) -> None:
    """The same for what a block has written into such mappings among its arguments."""
    for value in arguments:
        if isinstance(value, MutableMapping) and not isinstance(value, dict):
            cut(value, cuts)


def bypasses(passes: Iterable[Pass], loss: torch.Tensor) -> bool:
    """Whether the graph of a micro-batch leads into a unit by another way than the unit's outputs.

    Args:
        passes: all of the micro-batch, before any backward.
    """
    passes = list(passes)
    outputs = {slot for one in passes for _, slot in one.left}
    between = [get_gradient_edge(loss), *(edge for one in passes for edge, _ in one.entered)]
    return not reached(between) <= outputs or any(
        not reached(edge for edge, _ in one.left) <= {slot for _, slot in one.entered} for one in passes
    )
