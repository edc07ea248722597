"""Accumulation by block: the micro-batches of a window go through each unit one after another while it is gathered.

Each micro-batch runs in a thread of its own, one at a time. Before it enters a unit it waits until all have come
there; then they pass through, in their order. So each has the shapes, the kernels and the Python frames of an ordinary
forward, whatever the model hands from block to block. A pass through a unit is a graph of its own, cut at the unit's
inputs and outputs; backward runs these graphs from the last unit to the first. FSDP2 gathers a unit twice a window and
reduces it once, and sums the gradients in float32 in the order of the micro-batches, as where it reduces once a window.

Known as the vertical schedule of offload to disks (GreedySnake, arXiv 2512.17570).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.fsdp import FSDPModule

from toolkit.errors import BadInputError, TrainingError
from toolkit.ranks import on_this_device
from toolkit.sharding.fsdp import end_backward, stay_in_forward
from toolkit.sharding.unit_plan import UnitPlan


class _Slot:
    """Where the gradient of a tensor arrives that stands on the other side of a cut."""

    def __init__(self) -> None:
        self.gradient: torch.Tensor | None = None

    def add(self, gradient: torch.Tensor) -> None:
        self.gradient = gradient if self.gradient is None else self.gradient + gradient


class _Cut(torch.autograd.Function):
    """The same values at the start of another graph. Not a leaf, which would keep the values alive until backward."""

    @staticmethod
    def forward(ctx: Any, _anchor: torch.Tensor, value: torch.Tensor, slot: _Slot) -> torch.Tensor:
        ctx.slot = slot
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.slot.add(gradients[0])
        return None, None, None


Cuts = list[tuple[GradientEdge, _Slot]]


@dataclass
class _Pass:
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


class _AbandonedError(BaseException):
    """Ends the thread of a micro-batch whose window has failed."""


class _MicroBatch:
    """A forward that can be held before a unit."""

    def __init__(self, forward: Callable[[], torch.Tensor]) -> None:
        self.next_unit: FSDPModule | None = None
        self.inside = _Pass()
        self.loss: torch.Tensor | None = None
        self._error: BaseException | None = None
        self._forward = forward
        self._abandoned = False
        self._num_threads = torch.get_num_threads()
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        self._go, self._held = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=on_this_device(self._run), name="micro-batch", daemon=True)
        self._thread.start()

    def go_on(self) -> None:
        """Lets it run until it is about to enter a unit, or is through.

        Raises:
            Exception: what its forward raised.
        """
        self._go.release()
        self._held.acquire()
        if self._error is not None:
            raise self._error

    def hold(self, unit: FSDPModule) -> None:
        """In its own thread: waits before a unit."""
        self.next_unit = unit
        self._held.release()
        self._wait()

    def abandon(self) -> None:
        """Ends its thread, wherever it is held."""
        self._abandoned = True
        self._go.release()
        self._thread.join()

    def _wait(self) -> None:
        self._go.acquire()
        if self._abandoned:
            raise _AbandonedError

    def _run(self) -> None:
        try:
            self._wait()
            _here.micro_batch = self
            # A new thread starts with all cores, and on its device's default stream.
            if torch.get_num_threads() != self._num_threads:
                torch.set_num_threads(self._num_threads)
            if self._stream is not None:
                torch.cuda.set_stream(self._stream)
            self.loss = self._forward()
        except _AbandonedError:
            pass
        except BaseException as error:
            self._error = error
        self.next_unit = None
        self._held.release()


class _Here(threading.local):
    micro_batch: _MicroBatch | None = None


_here = _Here()


def in_window() -> bool:
    """Whether this is the thread of a micro-batch that runs by block."""
    return _here.micro_batch is not None


class ByBlock:
    """Runs windows of micro-batches by block.

    Args:
        root: the model, sharded by `toolkit.sharding.apply`; its blocks keep nothing but their inputs for backward
            only where all of them are checkpointed.
        plan: whose units the micro-batches pass through together, but for those that stay gathered for the loss.

    Raises:
        BadInputError: blocks that share parameters, and so form one unit.
    """

    def __init__(self, root: Any, plan: UnitPlan) -> None:
        self._root = root
        units = [unit for unit in plan.units if unit.reshard_after_forward]
        for unit in units:
            if len(unit.modules) > 1:
                raise BadInputError(
                    f"sharding.accumulate: by_block cannot run {unit.name}, whose parameters {len(unit.modules)} "
                    "blocks share; set sharding.accumulate=by_micro_batch"
                )
        for unit in (root.get_submodule(unit.modules[0]) for unit in units):
            # Before FSDP2's own hook, which gathers; and after its own, which has hooked the outputs.
            unit.register_forward_pre_hook(_enter, prepend=True, with_kwargs=True)
            unit.register_forward_hook(_leave)

    def run(
        self,
        forwards: Sequence[Callable[[], torch.Tensor]],
        backward: Callable[[torch.Tensor], None],
        on_backward: Callable[[], None] = lambda: None,
    ) -> list[torch.Tensor]:
        """Forward and backward of a window; the losses, without their graphs.

        Args:
            forwards: one for each micro-batch; gives its loss.
            backward: starts the backward of a loss, scaled as it has to be.
            on_backward: called when the forwards are through.

        Raises:
            TrainingError: the micro-batches take different paths through the model.
        """
        self._root.set_requires_gradient_sync(False)
        self._root.set_reshard_after_backward(False)
        self._root.set_is_last_backward(False)
        batches = [_MicroBatch(forward) for forward in forwards]
        try:
            losses, rounds = self._forward(batches, backward)
        finally:
            for batch in batches:
                batch.abandon()
        on_backward()
        self._backward(rounds)
        return losses

    def _forward(
        self, batches: list[_MicroBatch], backward: Callable[[torch.Tensor], None]
    ) -> tuple[list[torch.Tensor], list[tuple[Any, list[_Pass]]]]:
        losses: list[torch.Tensor] = []
        rounds: list[tuple[Any, list[_Pass]]] = []
        for batch in batches:
            batch.go_on()
        while (unit := _next_unit(batches)) is not None:
            passes = [_Pass() for _ in batches]
            rounds.append((unit, passes))
            unit.set_reshard_after_forward(False, recurse=False)
            for batch, batch.inside in zip(batches, passes, strict=True):
                if batch is batches[-1]:
                    unit.set_reshard_after_forward(True, recurse=False)
                batch.go_on()
                if batch.loss is not None:
                    # At once: these logits go before the next micro-batch makes its own.
                    backward(batch.loss)
                    losses.append(batch.loss.detach())
                    batch.loss = None
                    stay_in_forward(self._root)
        return losses, rounds

    def _backward(self, rounds: list[tuple[Any, list[_Pass]]]) -> None:
        while rounds:
            unit, passes = rounds.pop()
            for one in passes:
                is_last = one is passes[-1]
                unit.set_requires_gradient_sync(is_last, recurse=False)
                unit.set_reshard_after_backward(is_last, recurse=False)
                one.backward()
                # What lies between units has no hook of FSDP2's: the root's share of it is added up here.
                end_backward(self._root)
        self._root.set_requires_gradient_sync(True)
        self._root.set_reshard_after_backward(True)
        self._root.set_is_last_backward(True)
        end_backward(self._root)


def _next_unit(batches: list[_MicroBatch]) -> Any:
    units = {id(batch.next_unit): batch.next_unit for batch in batches}
    if len(units) > 1:
        raise TrainingError(
            "sharding.accumulate: the micro-batches of a step pass through different units of the model, which "
            "by_block cannot run; set sharding.accumulate=by_micro_batch"
        )
    return batches[0].next_unit


def _enter(unit: Any, args: Any, kwargs: Any) -> Any:
    batch = _here.micro_batch
    if batch is None:
        return None
    batch.hold(unit)
    return _cut((args, kwargs), batch.inside.entered) if torch.is_grad_enabled() else None


def _leave(_unit: Any, _args: Any, output: Any) -> Any:
    batch = _here.micro_batch
    return None if batch is None or not torch.is_grad_enabled() else _cut(output, batch.inside.left)


def _cut(value: Any, cuts: Cuts) -> Any:
    """The same, with each tensor that requires a gradient at the start of another graph."""
    anchor = torch.zeros((), requires_grad=True)
    seen: dict[int, torch.Tensor] = {}

    def of(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if not value.requires_grad:
                return value
            if id(value) not in seen:
                cuts.append((get_gradient_edge(value), _Slot()))
                seen[id(value)] = _Cut.apply(anchor, value.detach(), cuts[-1][1])  # type: ignore[no-untyped-call]
            return seen[id(value)]
        if isinstance(value, dict):
            items = {key: of(item) for key, item in value.items()}
            return items if type(value) is dict else type(value)(**items)
        if isinstance(value, list | tuple):
            parts = [of(item) for item in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        return value

    return of(value)
