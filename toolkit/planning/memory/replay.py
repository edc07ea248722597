"""Replays FSDP2's buffers event by event, to turn a probe's activations into the peak of a rank.

It replays the lifetimes in torch/distributed/fsdp/_fully_shard (`_fsdp_param_group.py`,
`_fsdp_collectives.py`, torch 2.13 to 2.15), and those of the offload engine:

- a gather allocates its input (a cast copy of the shards, if types differ) and its output, then one
  tensor for each parameter; in forward the output lives until the next unit's copy is made, in backward
  it is freed at once;
- backward gathers the unit that ran before, while this one computes;
- a reduction copies the gradients into one buffer in the type of the reduction, frees them (before torch 2.15
  except the last, its loop variable), and allocates this rank's part; the buffer lives until the next reduction.

The trace (trace.py) runs the real FSDP2; tests compare the two.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from toolkit.planning.memory.probe import Probe, ProbeEvent
from toolkit.planning.memory.state_bytes import HeldUnit, MemoryLayout, held_unit, optimizer_bytes, rounded
from toolkit.planning.workload.unit_shapes import UnitShape
from toolkit.sharding.fsdp2.fsdp import frees_gather_before_copying
from toolkit.sharding.offload.capture import MAX_IN_FLIGHT
from toolkit.sharding.plan.strategy import Strategy

OPTIMIZER_STEP = "optimizer step"
"""The last moment of a step."""

REPLAYED = 3
"""Kinds of micro-batches in an accumulation window: the first, those between, the last."""


@dataclass(frozen=True)
class Memory:
    """Bytes of the rank that holds most, at one moment.

    Attributes:
        moment: the name of the moment.
        parameters: the shards (or, unsharded, the whole) as they are held between steps, buffers and the batch.
        gradients: gradients of parameters, sharded or whole, and sums of them.
        optimizer: optimizer state on the device.
        gathered: whole parameters of the gathered units, and what a node keeps of others for backward.
        activations: tensors that backward needs, and temporaries.
        logits: what the head and the loss need beyond that.
        communication: inputs and outputs of collectives.
    """

    moment: str
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0
    activations: int = 0
    logits: int = 0
    communication: int = 0

    @property
    def total(self) -> int:
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Returns the bytes by kind."""
        return {part.name: getattr(self, part.name) for part in fields(self)[1:]}

    @property
    def largest(self) -> tuple[str, int]:
        """The kind with the most bytes, and these bytes."""
        return max(self.parts().items(), key=lambda part: part[1])


def replay(
    units: Sequence[UnitShape],
    probe: Probe,
    strategy: Strategy,
    layout: MemoryLayout,
    accumulation: int,
    by_block: bool = False,
) -> list[Memory]:
    """Returns the named moments of an optimizer step; the peak is the largest.

    Args:
        units: in the plan's order, the root last.
        probe: the probe of one micro-batch; for an unsharded strategy, with autocast.
        accumulation: micro-batches of a step.
        by_block: whether they go through each unit together.
    """
    if by_block:
        probe = window(units, probe, accumulation)
    rank = (_ShardedRank if strategy.sharded else _WholeRank)(units, probe, strategy, layout)
    rank.by_block = accumulation if by_block else 0
    accumulation = 1 if by_block else accumulation
    # Between the first, which finds no sums, and the last, which reduces, all are alike.
    micro_batches = min(accumulation, REPLAYED)
    for micro_batch in range(micro_batches):
        rank.run(is_first=micro_batch == 0, is_last=micro_batch == micro_batches - 1)
    # The fused optimizers make no temporaries of the size of a parameter.
    rank.snap(OPTIMIZER_STEP, 0)
    return rank.moments


class _Rank:
    """Tracks what a rank holds while events pass.

    Attributes:
        held: bytes by kind, without activations.
        by_block: number of micro-batches after which a unit is reduced once, or 0 if it is reduced after each.
    """

    by_block = 0

    def __init__(self, units: Sequence[UnitShape], probe: Probe, strategy: Strategy, layout: MemoryLayout) -> None:
        self.units, self.probe, self.strategy, self.layout = units, probe, strategy, layout
        self._best: dict[str, Memory] = {}
        self._totals: dict[str, int] = {}
        self._names = moment_names(probe.events, units)
        self._moment = ""
        self._before_head = level_before_head(probe.events, units)
        self.held = dict.fromkeys(("parameters", "gradients", "optimizer", "gathered", "communication"), 0)

    def run(self, is_first: bool, is_last: bool) -> None:
        """Replays one micro-batch."""
        for event, name in zip(self.probe.events, self._names, strict=True):
            self._moment = name
            self.snap(name, event.peak)
            self.on(event, is_first, is_last)

    @property
    def moments(self) -> list[Memory]:
        """Each named moment at the time when it held most."""
        return list(self._best.values())

    def on(self, event: ProbeEvent, is_first: bool, is_last: bool) -> None:
        raise NotImplementedError

    def snap(
        self, moment: str, activations: int, gathered: int = 0, gradients: int = 0, communication: int = 0
    ) -> None:
        """Adds a moment; the numbers are bytes beyond what is held."""
        held = self.held
        total = sum(held.values()) + activations + gathered + gradients + communication
        # Moments of the same name come once per micro-batch; the table shows the worst of them.
        if total <= self._totals.get(moment, -1):
            return
        self._totals[moment] = total
        # The blocks' activations are the same before and after the head: what is beyond them is the head's.
        logits = max(0, activations - self._before_head) if self._moment in HEAD else 0
        self._best[moment] = Memory(
            moment,
            held["parameters"],
            held["gradients"] + gradients,
            held["optimizer"],
            held["gathered"] + gathered,
            activations - logits,
            logits,
            held["communication"] + communication,
        )


# Sharded


def _held_units(units: Sequence[UnitShape], layout: MemoryLayout) -> list[HeldUnit]:
    """Returns each unit's bytes. Blocks are mostly alike, so what they hold is counted once."""
    alike: dict[tuple[Any, bool], HeldUnit] = {}
    found = []
    for number, shape in enumerate(units):
        key = (shape.parameters, number in layout.residents)
        if key not in alike:
            alike[key] = held_unit(shape, layout, key[1])
        found.append(copy.copy(alike[key]))  # the bytes that are held of it now are its own
    return found


class _ShardedRank(_Rank):
    """Replays FSDP2's lifetimes."""

    def __init__(self, units: Sequence[UnitShape], probe: Probe, strategy: Strategy, layout: MemoryLayout) -> None:
        super().__init__(units, probe, strategy, layout)
        self._now = _held_units(units, layout)
        reshards = strategy.reshard_each_micro_batch
        # The tail and the root are needed again at once by backward and stay gathered.
        self._reshards = [(reshards or shape.of_teacher) and shape.reshard_after_forward for shape in units]
        self.held["parameters"] = sum(unit.sharded for unit in self._now) + probe.buffers
        self.held["optimizer"] = sum(unit.optimizer for unit in self._now)
        self._forward_gather = 0  # the output of the last gather of the forward
        self._reduce_input = 0  # the input of the last reduction
        self._hidden = 0  # bytes of the unit before, while all micro-batches but the last are in a unit's backward
        self._inside: list[int] = []  # the block that was entered last, and its experts
        self._left = 0  # bytes of the unit that was left, gathered until the last micro-batch has passed it
        self._sums = 0  # bytes of sums: the window, the unit in backward, and its experts
        self._before_last: dict[str, int] | None = None  # held bytes before the last pass reduces the experts
        self._leaving: list[int] = []  # gradients on their way to the host
        self._last: int | None = None  # the unit of the last forward
        self._before: dict[int, list[int | None]] = {}  # unit -> the unit of the forward before each of its own

    def on(self, event: ProbeEvent, is_first: bool, is_last: bool) -> None:
        if self.by_block:
            self._snap_heads(event)
        if event.kind == "enter":
            self._gather(event, in_forward=True)
        elif event.kind == "exit":
            self._after_forward(event)
        elif event.kind == "unshard":  # of the teacher's head, for the loss
            self._gather(event, in_forward=False)
        elif event.kind == "reshard":
            self._hold_whole(self._now[event.unit], False)
        elif event.kind == "pre_backward":
            self._gather(event, in_forward=False)
            if self.by_block:
                self._begin_passes(event.unit)
            self._prefetch(event)
        elif event.kind == "loss" and self.by_block:
            for unit in self._gathered_to_end:  # of each micro-batch from here on
                self._sum_window(unit)
        elif event.kind == "post_backward":
            if not self.by_block:
                self._after_backward(event, is_last)
            elif event.unit not in self._gathered_to_end:
                self._snap_earlier(event)
                self._before_last = dict(self.held) if self.units[event.unit].kind == "experts" else None
                self._after_backward(event, is_last)
        elif event.kind == "end":
            for unit in self._gathered_to_end if self.by_block else ():
                self._after_backward(replace(event, unit=unit), is_last)
            # FSDP2's callback at the end of backward waits for the last reduction and lets its buffer go.
            self._hold_reduce_input(0)
            self._last = None

    @property
    def _gathered_to_end(self) -> list[int]:
        """Units that stay gathered from the loss on; by block, they are reduced at the end of the window."""
        return [i for i, reshards in enumerate(self._reshards) if not reshards]

    def _snap_heads(self, event: ProbeEvent) -> None:
        """Adds moments in which earlier micro-batches run the head while the last block's units are gathered."""
        kind = self.units[event.unit].kind
        if self._left and self._moment in HEAD:
            held = sum(self._now[unit].whole_gradients for unit in self._gathered_to_end)
            sums = sum(self._now[unit].whole_sums for unit in self._gathered_to_end) - held
            gathers = -self._forward_gather  # the first of them has freed the last
            self.snap(self._moment, event.peak, gathered=self._left, gradients=-held)
            if self.by_block > 2:
                self.snap(self._moment, event.peak, gathered=self._left, gradients=sums, communication=gathers)
            self.snap(self._moment, event.peak, gradients=sums, communication=gathers)
        if event.kind in ("enter", "pre_backward") and kind in ("block", "experts"):
            self._inside = [*self._inside, event.unit] if kind == "experts" else [event.unit]
            self._left = 0
        elif event.kind == "exit" and kind == "block":
            self._left = sum(self._now[unit].whole for unit in self._inside)

    def _begin_passes(self, index: int) -> None:
        """Begins the passes of all micro-batches through a unit's backward."""
        if self.units[index].kind != "experts":
            # The reduction before hides behind all passes but the last.
            self._hidden, self._sums = self._reduce_input, 0
            self._hold_reduce_input(0)
        self._sum_window(index)
        self._sums += self._now[index].whole_gradients

    def _snap_earlier(self, event: ProbeEvent) -> None:
        """Adds moments of the first micro-batch, which finds no sums, and the second; only the last gathers ahead."""
        ahead = sum(unit.gather_output for unit in self._now if unit.is_prefetched)
        held = self._before_last or self.held
        gathered, gradients, communication = (
            held[kind] - self.held[kind] for kind in ("gathered", "gradients", "communication")
        )
        communication += self._hidden - ahead
        first = event.peak + (self.by_block - 1) * event.to_come
        self.snap(self._moment, first, gathered, gradients - self._sums, communication)
        self.snap(self._moment, first - event.to_come, gathered, gradients, communication)

    def _sum_window(self, index: int) -> None:
        """Holds the whole gradients of earlier micro-batches, in the type of the reduction."""
        self._hold_whole_gradients(self._now[index], self._now[index].whole_sums)

    # Each of these changes what is held.

    def _hold_whole(self, unit: HeldUnit, gathered: bool) -> None:
        self.held["gathered"] += unit.whole * (gathered - unit.is_gathered)
        unit.is_gathered = gathered

    def _hold_copy(self, unit: HeldUnit, copied: bool) -> None:
        self.held["gathered"] += unit.copied * (copied - unit.is_copied)
        unit.is_copied = copied

    def _hold_gather(self, unit: HeldUnit, prefetched: bool) -> None:
        self.held["communication"] += unit.gather_output * (prefetched - unit.is_prefetched)
        unit.is_prefetched = prefetched

    def _hold_forward_gather(self, num_bytes: int) -> None:
        self.held["communication"] += num_bytes - self._forward_gather
        self._forward_gather = num_bytes

    def _hold_reduce_input(self, num_bytes: int) -> None:
        self.held["communication"] += num_bytes - self._reduce_input
        self._reduce_input = num_bytes

    def _hold_sharded_gradients(self, unit: HeldUnit, num_bytes: int) -> None:
        self.held["gradients"] += num_bytes - unit.sharded_gradients
        unit.sharded_gradients = num_bytes

    def _hold_whole_gradients(self, unit: HeldUnit, num_bytes: int) -> None:
        self.held["gradients"] += num_bytes - unit.whole_gradients
        unit.whole_gradients = num_bytes

    # What FSDP2 does

    def _gather(self, event: ProbeEvent, in_forward: bool) -> None:
        """Replays `unshard` and `wait_for_unshard`."""
        unit = self._now[event.unit]
        if unit.is_gathered:
            return
        what = f"gather of {self.units[event.unit].name}"
        if self.units[event.unit].num_shards(self.layout.shard) == 1:
            self.snap(what, event.level, gathered=unit.whole, communication=unit.cast_alone)
        else:
            # The copy out of the gather's output into parameters: both are whole at this moment.
            self._start_gather(event.unit, event.level)
            if in_forward and frees_gather_before_copying():
                self._hold_forward_gather(0)
            # The copy that a node keeps is flat, so assembling it needs no second copy.
            assembled = 0 if unit.is_copied else unit.assembled
            # Before torch 2.15 a local name holds the last output.
            self.snap(what, event.level, gathered=unit.whole, communication=assembled)
            # The default stream may still copy out of it; FSDP2 keeps it until the next unit waits for that.
            if in_forward:
                self._hold_forward_gather(unit.gather_output)
        self._hold_gather(unit, False)
        self._hold_whole(unit, True)
        if not in_forward:
            self._hold_copy(unit, False)

    def _start_gather(self, index: int, level: int) -> None:
        unit = self._now[index]
        # Input and output are allocated together; the input is freed when the collective is done.
        if not unit.is_prefetched:
            # The copy that a node keeps is in the compute dtype already.
            more = (0 if unit.is_copied else unit.gather_input) + unit.gather_output
            self.snap(f"gather of {self.units[index].name}", level, communication=more)
            self._hold_gather(unit, True)

    def _after_forward(self, event: ProbeEvent) -> None:
        index, unit = event.unit, self._now[event.unit]
        if self.units[index].of_teacher:
            self._after_teacher(index)
            return
        self._before.setdefault(index, []).append(self._last)
        self._last = index
        if self._reshards[index]:
            self._hold_copy(unit, False)
            self.snap(self._moment, event.level, gathered=max(0, unit.copying - unit.whole))
            self._hold_copy(unit, unit.copied > 0)
            self._hold_whole(unit, False)
        # The root's forward ends the pass.
        if index == len(self.units) - 1:
            self._hold_forward_gather(0)

    def _after_teacher(self, index: int) -> None:
        """Ends a teacher unit's forward; no backward follows, so its root frees what is still gathered."""
        is_root = self.units[index].kind == "root"
        for number, unit in enumerate(self._now):
            if self.units[number].of_teacher and (is_root or (number == index and self._reshards[index])):
                self._hold_whole(unit, False)
        if is_root:
            self._hold_forward_gather(0)

    def _prefetch(self, event: ProbeEvent) -> None:
        """Prefetches the unit whose forward came before, if it is not gathered."""
        # A unit that runs twice (tied layers) has two predecessors, in reverse order.
        uses = self._before.get(event.unit)
        before = uses.pop() if uses else None
        if before is None or self.units[before].num_shards(self.layout.shard) == 1:
            return
        if not self._now[before].is_gathered:
            self._start_gather(before, event.level)

    def _after_backward(self, event: ProbeEvent, is_last: bool) -> None:
        """Replays `post_backward`."""
        unit, level, gradients = self._now[event.unit], event.level, event.gradients
        what = f"reduction of {self.units[event.unit].name}"
        if unit.whole_gradients:  # the new gradients are alive until they are added to the sums
            self.snap(what, level, gradients=gradients)
            gradients = 0
        if gradients and unit.made_alike and (self.strategy.reduce_each_micro_batch or is_last):
            self.snap(what, level, gradients=unit.made_alike)
            gradients = unit.whole_sums
        # Before the reduction, so that parameters and the reduction's buffer never exist together.
        if self.strategy.reshard_each_micro_batch or is_last:
            self._hold_whole(unit, False)
        if not self.strategy.reduce_each_micro_batch and not is_last:
            self.snap(what, level, gradients=gradients)
            if gradients:
                self._hold_whole_gradients(unit, unit.whole_sums)
            return
        whole = unit.whole_gradients or gradients
        last = unit.last_sum if unit.whole_gradients else unit.last_gradient
        size = self.layout.reduce if unit.whole_gradients or gradients == unit.whole_sums else unit.gradient
        self._hold_whole_gradients(unit, 0)
        if not whole:
            return
        # FSDP2 waits for the reduction before this one and frees its input, then allocates its own.
        self._hold_reduce_input(0)
        # Stacks that are sharded along their matrices' rows are copied in the order of the ranks, one after another.
        self.snap(what, level, gradients=whole, communication=size * unit.turned)
        last_turned = size * unit.last_turned
        self.snap(what, level, gradients=whole + last_turned, communication=unit.reduce_input)
        self._hold_reduce_input(unit.reduce_input)
        self.snap(what, level, gradients=min(whole, last) + last_turned + unit.reduce_output + unit.quotient)
        self._keep_reduced_gradient(unit, what, level, is_last)

    def _keep_reduced_gradient(self, unit: HeldUnit, what: str, level: int, is_last: bool) -> None:
        """Keeps the reduced gradient on the device, or copies it to the host."""
        self.snap(what, level, gradients=unit.reduce_output + unit.cast_gradient)
        if not self.layout.offload:
            self._hold_sharded_gradients(unit, unit.cast_gradient or unit.reduce_output)
            return
        if not is_last:  # summed on the device in float32
            self._hold_sharded_gradients(unit, rounded(unit.reduce_output * 4 / self.layout.reduce))
            return
        # The copy to the host is asynchronous: its source lives until the event after it, at most MAX_IN_FLIGHT units.
        leaving = unit.sharded_gradients or unit.reduce_output
        self._hold_sharded_gradients(unit, 0)
        before, self._leaving = self._leaving, [*self._leaving, leaving][-MAX_IN_FLIGHT:]
        self.held["gradients"] += sum(self._leaving) - sum(before)


# Whole


class _WholeRank(_Rank):
    """Replays torch's DistributedDataParallel, with its buckets as the gradients.

    The probe drops gradients at once, because DDP copies them into the buckets as they come.
    """

    def __init__(self, units: Sequence[UnitShape], probe: Probe, strategy: Strategy, layout: MemoryLayout) -> None:
        super().__init__(units, probe, strategy, layout)
        parameters = [parameter for shape in units for parameter in shape.parameters]
        trainable = [parameter for parameter in parameters if parameter.trainable]
        # `gradient_as_bucket_view`: gradients are views into the buckets, and there is no second copy.
        self._buckets = sum(rounded(p.numel * p.held) for p in trainable)
        self.held["parameters"] = sum(rounded(p.numel * p.held) for p in parameters) + probe.buffers
        self.held["optimizer"] = optimizer_bytes(trainable, layout, resident=False)
        self.held["gradients"] = self._buckets

    def on(self, event: ProbeEvent, is_first: bool, is_last: bool) -> None:
        if event.kind == "end" and is_first and not is_last:  # summed next to the buckets until the last micro-batch
            self.held["gradients"] += self._buckets


# Names of a step's moments


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


# What the waiting micro-batches of a step hold while one of them is in a unit


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
