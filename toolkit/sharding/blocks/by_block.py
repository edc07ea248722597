"""Accumulation by block: all micro-batches of an optimizer step pass through a unit while it is gathered.

Each micro-batch runs in its own thread, one at a time. Before it enters a unit it waits until all micro-batches have
reached that unit; then they pass through it in order. So each micro-batch has the shapes, kernels and Python frames of
an ordinary forward, whatever the model passes from block to block. Each pass through a unit has its own autograd graph,
cut at the unit's inputs and outputs. Backward runs these graphs from the last unit to the first. FSDP2 gathers a unit
twice per optimizer step and reduces it once. It sums the gradients in float32 in the order of the micro-batches, as it
does when it reduces once per optimizer step.

Known as the vertical schedule of offload to disks (GreedySnake, arXiv 2512.17570).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.fsdp import FSDPModule

from toolkit.errors import BadInputError, TrainingError
from toolkit.ranks import on_this_device
from toolkit.sharding.fsdp2.fsdp import class_name, sharded_modules
from toolkit.sharding.fsdp2.unit_states import UnitStates
from toolkit.sharding.plan.unit_plan import UnitPlan

T = TypeVar("T")


class _AbandonedError(BaseException):
    """Ends the thread of a micro-batch whose window has failed."""


class _MicroBatch:
    """Runs the forward of one micro-batch in a thread that can be paused before each unit.

    Args:
        forward: runs the forward and returns its result.
        handle: the device module: `torch.cuda`, or `torch.cpu`, which has the same functions.
    """

    def __init__(self, forward: Callable[[], Any], handle: Any) -> None:
        self.next_unit: FSDPModule | None = None
        self.inside = Pass()
        self._result: Any = None
        self._error: BaseException | None = None
        self._forward = forward
        self._abandoned = False
        self._num_threads = torch.get_num_threads()
        self._handle, self._stream = handle, handle.current_stream()
        self._go, self._held = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=on_this_device(self._run), name="micro-batch", daemon=True)
        self._thread.start()

    def go_on(self) -> None:
        """Runs the forward until it is about to enter a unit, or has finished.

        Raises:
            Exception: the exception that the forward raised.
        """
        self._go.release()
        self._held.acquire()
        if self._error is not None:
            raise self._error

    def take(self) -> Any:
        """Returns the result of the forward and drops the reference to it."""
        result, self._result = self._result, None
        return result

    def hold(self, unit: FSDPModule) -> None:
        """Pauses before a unit. Called in the micro-batch's own thread."""
        self.next_unit = unit
        self._held.release()
        self._wait()

    def abandon(self) -> None:
        """Ends the thread, wherever it is paused."""
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
            _current.micro_batch = self
            # A new thread starts with all cores, and on its device's default stream.
            if torch.get_num_threads() != self._num_threads:
                torch.set_num_threads(self._num_threads)
            with self._handle.stream(self._stream):
                self._result = self._forward()
        except _AbandonedError:
            pass
        except BaseException as error:
            self._error = error
        self.next_unit = None
        self._held.release()


RECORDING = "transformers.utils.output_capturing"
"""The module that defines transformers' hooks that record hidden states."""


class _CurrentMicroBatch(threading.local):
    micro_batch: _MicroBatch | None = None


_current = _CurrentMicroBatch()


def in_window() -> bool:
    """Returns whether this thread runs a micro-batch by block."""
    return _current.micro_batch is not None


class ByBlock:
    """Runs the micro-batches of an optimizer step by block.

    Args:
        root: the model, sharded by `toolkit.sharding.apply`. Only if all blocks are checkpointed do they keep nothing
            but their inputs for backward.
        plan: the units of the model. The micro-batches pass through them together, except for the units that stay
            gathered for the loss.

    Raises:
        BadInputError: if blocks share parameters and so form one unit.
    """

    def __init__(self, root: Any, plan: UnitPlan) -> None:
        self._root = root
        self._states = UnitStates(root)
        self._is_checked = False
        # Experts that are units of their own pass with their block.
        units = [unit for unit in plan.units if unit.reshard_after_forward and unit.kind != "experts"]
        for unit in units:
            if len(unit.modules) > 1:
                raise BadInputError(
                    f"sharding.accumulate: by_block cannot run {unit.name}, whose parameters {len(unit.modules)} "
                    "blocks share; set sharding.accumulate=by_micro_batch"
                )
        staying = [path for unit in plan.units if not unit.reshard_after_forward for path in unit.modules]
        self._staying = [root.get_submodule(path) for path in staying]
        for unit in (root.get_submodule(unit.modules[0]) for unit in units):
            # Before FSDP2's own hook, which gathers; and after its own, which has hooked the outputs.
            unit.register_forward_pre_hook(_pause_and_cut_inputs, prepend=True, with_kwargs=True)
            unit.register_forward_hook(_cut_outputs, with_kwargs=True)
            _move_recording_hooks_last(unit)

    def run(
        self,
        forwards: Sequence[Callable[[], torch.Tensor]],
        backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
        on_backward: Callable[[], None] = lambda: None,
    ) -> list[torch.Tensor]:
        """Runs forward and backward of all micro-batches of an optimizer step.

        Args:
            forwards: one callable for each micro-batch, which returns its scalar loss.
            backward: starts the backward of a loss and applies any scale.
            on_backward: called when all forwards have finished.

        Returns:
            The scalar losses, detached, in the order of `forwards`.

        Raises:
            TrainingError: if the micro-batches take different paths through the model.
            BadInputError: if the model passes tensors between blocks other than as arguments and outputs, or changes
                them in place.
        """
        losses: list[torch.Tensor] = []

        def begin_backward(loss: torch.Tensor, passes: list[Pass]) -> None:
            if not self._is_checked and bypasses(passes, loss):
                raise BadInputError(
                    f"sharding.accumulate: by_block cannot run {class_name(self._root)}, whose losses or blocks use "
                    "what is computed inside a block and is not one of its outputs; set "
                    "sharding.accumulate=by_micro_batch"
                )
            backward(loss)
            losses.append(loss.detach())
            self._states.return_to_forward()

        with self._states.window():
            try:
                rounds = self._forward(forwards, begin_backward)
            except RuntimeError as error:
                if "of _Cut is a view and is being modified inplace" not in str(error):
                    raise
                raise BadInputError(
                    f"sharding.accumulate: by_block cannot run {class_name(self._root)}, which changes in place what "
                    "its embeddings or a block return; set sharding.accumulate=by_micro_batch"
                ) from error
            # Every optimizer step has the same graph, so checking the first one is enough.
            self._is_checked = True
            on_backward()
            self._backward(rounds)
        return losses

    def evaluate(self, forwards: Sequence[Callable[[], T]]) -> list[T]:
        """Runs the forwards of several micro-batches without gradients and returns their results.

        Each unit is gathered once.

        Raises:
            TrainingError: if the micro-batches take different paths through the model.
        """
        results: list[T] = []
        try:
            self._forward([torch.no_grad()(forward) for forward in forwards], lambda found, _: results.append(found))
        finally:
            self._states.free_all()
        return results

    def _forward(
        self, forwards: Sequence[Callable[[], Any]], through: Callable[[Any, list[Pass]], None]
    ) -> list[tuple[Any, list[Pass]]]:
        """Runs all forwards. Calls `through` with the result and the passes of each one that finishes.

        Returns:
            The units in the order of the forward, each with one pass for each micro-batch.
        """
        rounds: list[tuple[Any, list[Pass]]] = []
        handle = getattr(torch, next(self._root.parameters()).device.type)
        batches = [_MicroBatch(forward, handle) for forward in forwards]
        try:
            for batch in batches:
                batch.go_on()
            while (unit := _common_next_unit(batches)) is not None:
                rounds.append((unit, [Pass() for _ in batches]))
                unit.set_reshard_after_forward(False)  # another micro-batch enters it next
                for number, batch in enumerate(batches):
                    batch.inside = rounds[-1][1][number]
                    if batch is batches[-1]:
                        unit.set_reshard_after_forward(True)
                    batch.go_on()
                    if batch.next_unit is None:
                        # At once: these logits go before the next micro-batch makes its own.
                        through(batch.take(), [passes[number] for _, passes in rounds])
        finally:
            for batch in batches:
                batch.abandon()
            if rounds:
                rounds[-1][0].set_reshard_after_forward(True)  # if a micro-batch has failed inside
        return rounds

    def _backward(self, rounds: list[tuple[Any, list[Pass]]]) -> None:
        reduced: list[Any] = []
        with self._states.backward_by_unit():
            while rounds:
                unit, passes = rounds.pop()
                inside = list(sharded_modules(unit))  # the unit itself first
                for one in passes:
                    is_last = one is passes[-1]
                    if is_last:
                        # That reduction could overlap with all passes but this one. Its buffer is freed before the
                        # next unit is gathered.
                        self._states.end_passes(reduced)
                    self._states.begin_unit_backward(unit, is_last)
                    one.backward()
                    # FSDP2 has no hook for the graph between units: the root's share of it is added up here.
                    self._states.end_passes([*inside, *self._staying])
                reduced = inside


def _move_recording_hooks_last(unit: Any) -> None:
    """Moves transformers' recording hooks last, so that they see the cut outputs. LLaVA computes on recorded states."""
    for key, hook in list(unit._forward_hooks.items()):
        if getattr(hook, "__module__", None) == RECORDING:
            unit._forward_hooks.move_to_end(key)


def _common_next_unit(batches: list[_MicroBatch]) -> Any:
    units = {id(batch.next_unit): batch.next_unit for batch in batches}
    if len(units) > 1:
        raise TrainingError(
            "sharding.accumulate: the micro-batches of a step pass through different units of the model, which "
            "by_block cannot run; set sharding.accumulate=by_micro_batch"
        )
    return batches[0].next_unit


def _pause_and_cut_inputs(unit: Any, args: Any, kwargs: Any) -> Any:
    batch = _current.micro_batch
    if batch is None:
        return None
    batch.hold(unit)
    return cut((args, kwargs), batch.inside.entered) if torch.is_grad_enabled() else None


def _cut_outputs(_unit: Any, args: Any, kwargs: Any, output: Any) -> Any:
    batch = _current.micro_batch
    if batch is None or not torch.is_grad_enabled():
        return None
    cut_written((*args, *kwargs.values()), batch.inside.left)
    return cut(output, batch.inside.left)


# ---- Cuts the autograd graph of a micro-batch at the units, so that backward can run unit by unit ----


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
