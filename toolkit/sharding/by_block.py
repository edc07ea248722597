"""Accumulation by block: the micro-batches of a window go through each unit one after another while it is gathered.

Each micro-batch runs in a thread of its own, one at a time. Before it enters a unit it waits until all have come
there; then they pass through, in their order. So each has the shapes, the kernels and the Python frames of an ordinary
forward, whatever the model hands from block to block. A pass through a unit is a graph of its own, cut at the unit's
inputs and outputs; backward runs these graphs from the last unit to the first. FSDP2 gathers a unit twice a window and
reduces it once. It sums the gradients in float32 in the order of the micro-batches, as when it reduces once per
accumulation step.

Known as the vertical schedule of offload to disks (GreedySnake, arXiv 2512.17570).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.distributed.fsdp import FSDPModule

from toolkit.errors import BadInputError, TrainingError
from toolkit.ranks import on_this_device
from toolkit.sharding.fsdp import class_name, sharded_modules
from toolkit.sharding.graph_cuts import Pass, bypasses, cut, cut_written
from toolkit.sharding.unit_plan import UnitPlan
from toolkit.sharding.unit_states import UnitStates

T = TypeVar("T")


class _AbandonedError(BaseException):
    """Ends the thread of a micro-batch whose window has failed."""


class _MicroBatch:
    """A forward that can be held before a unit.

    Args:
        handle: of the device: `torch.cuda`, or `torch.cpu`, which has the same functions.
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
        """Lets it run until it is about to enter a unit, or is through.

        Raises:
            Exception: what its forward raised.
        """
        self._go.release()
        self._held.acquire()
        if self._error is not None:
            raise self._error

    def take(self) -> Any:
        """What its forward gave, which nothing holds any more here."""
        result, self._result = self._result, None
        return result

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
            with self._handle.stream(self._stream):
                self._result = self._forward()
        except _AbandonedError:
            pass
        except BaseException as error:
            self._error = error
        self.next_unit = None
        self._held.release()


RECORDING = "transformers.utils.output_capturing"
"""Where transformers' hooks are from that record hidden states."""


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
            only if all of them are checkpointed.
        plan: whose units the micro-batches pass through together, but for those that stay gathered for the loss.

    Raises:
        BadInputError: blocks that share parameters, and so form one unit.
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
            unit.register_forward_pre_hook(_enter, prepend=True, with_kwargs=True)
            unit.register_forward_hook(_leave, with_kwargs=True)
            _record_last(unit)

    def run(
        self,
        forwards: Sequence[Callable[[], torch.Tensor]],
        backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
        on_backward: Callable[[], None] = lambda: None,
    ) -> list[torch.Tensor]:
        """Forward and backward of a window; the losses, without their graphs.

        Args:
            forwards: one for each micro-batch; gives its loss.
            backward: starts the backward of a loss, scaled as it has to be.
            on_backward: called when the forwards are through.

        Raises:
            TrainingError: the micro-batches take different paths through the model.
            BadInputError: the model hands on tensors from block to block by other ways than arguments and outputs.
        """
        self._states.begin_window()
        losses: list[torch.Tensor] = []

        def begin_backward(loss: torch.Tensor, passes: list[Pass]) -> None:
            if not self._is_checked and bypasses(passes, loss):
                raise BadInputError(
                    f"sharding.accumulate: by_block cannot run {class_name(self._root)}, whose losses or blocks use "
                    "what is computed inside of a block and is none of its outputs; set "
                    "sharding.accumulate=by_micro_batch"
                )
            backward(loss)
            losses.append(loss.detach())
            self._states.return_to_forward()

        rounds = self._forward(forwards, begin_backward)
        # Every window has the same graph: the first one tells.
        self._is_checked = True
        on_backward()
        self._backward(rounds)
        return losses

    def evaluate(self, forwards: Sequence[Callable[[], T]]) -> list[T]:
        """What the forwards of several micro-batches give, without gradients; each unit is gathered once.

        Raises:
            TrainingError: the micro-batches take different paths through the model.
        """
        results: list[T] = []
        try:
            self._forward([torch.no_grad()(forward) for forward in forwards], lambda found, _: results.append(found))
        finally:
            self._states.free_all()
            self._states.forget_forwards()
        return results

    def _forward(
        self, forwards: Sequence[Callable[[], Any]], through: Callable[[Any, list[Pass]], None]
    ) -> list[tuple[Any, list[Pass]]]:
        """Runs all forwards; `through` is given what each has found, and its passes.

        Returns:
            The units in their order, each with a pass for each micro-batch.
        """
        self._states.begin_forwards()
        rounds: list[tuple[Any, list[Pass]]] = []
        handle = getattr(torch, next(self._root.parameters()).device.type)
        batches = [_MicroBatch(forward, handle) for forward in forwards]
        try:
            for batch in batches:
                batch.go_on()
            while (unit := _next_unit(batches)) is not None:
                rounds.append((unit, [Pass() for _ in batches]))
                self._states.keep_after_forward(unit)
                for number, batch in enumerate(batches):
                    batch.inside = rounds[-1][1][number]
                    if batch is batches[-1]:
                        self._states.free_after_forward(unit)
                    batch.go_on()
                    if batch.next_unit is None:
                        # At once: these logits go before the next micro-batch makes its own.
                        through(batch.take(), [passes[number] for _, passes in rounds])
        finally:
            for batch in batches:
                batch.abandon()
            if rounds:
                self._states.free_after_forward(rounds[-1][0])  # if a micro-batch has failed inside
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
                        # Its reduction has had all passes but this one to hide behind. The buffer goes before the
                        # next unit is gathered beside this one.
                        self._states.end_passes(reduced)
                    self._states.begin_unit_backward(unit, is_last)
                    one.backward()
                    # What lies between units has no hook of FSDP2's: the root's share of it is added up here.
                    self._states.end_passes([*inside, *self._staying])
                reduced = inside
        self._states.end_window()


def _record_last(unit: Any) -> None:
    """Has transformers' hooks that record hidden states see what leaves a unit: LLaVA goes on from such a state."""
    for key, hook in list(unit._forward_hooks.items()):
        if getattr(hook, "__module__", None) == RECORDING:
            unit._forward_hooks.move_to_end(key)


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
    return cut((args, kwargs), batch.inside.entered) if torch.is_grad_enabled() else None


def _leave(_unit: Any, args: Any, kwargs: Any, output: Any) -> Any:
    batch = _here.micro_batch
    if batch is None or not torch.is_grad_enabled():
        return None
    cut_written((*args, *kwargs.values()), batch.inside.left)
    return cut(output, batch.inside.left)
