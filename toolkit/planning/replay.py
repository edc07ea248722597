"""FSDP2's buffers, event by event: a probe's activations become the peak of a rank.

What is replayed are the lifetimes in torch/distributed/fsdp/_fully_shard (`_fsdp_param_group.py`,
`_fsdp_collectives.py`, torch 2.11 to 2.13), and those of the offload engine:

- a gather allocates its input (a cast copy of the shards, where types differ) and its output, then one
  tensor for each parameter; in forward the output lives until the next unit's copy, in backward it is
  freed at once;
- backward gathers the unit that ran before, while this one computes;
- a reduction copies the gradients into one buffer in the type of the reduction, frees them but for the
  last (its loop variable), and allocates this rank's part; the buffer lives until the next reduction.

The trace (trace.py) runs the real thing; tests hold this against it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from toolkit.planning.fake import GRANULE
from toolkit.planning.probe import Event, Probe
from toolkit.planning.units import ParameterShape, UnitShape
from toolkit.sharding.offload.capture import MAX_IN_FLIGHT
from toolkit.sharding.strategy import Strategy

REPLAYED = 3
"""Micro-batches of a window that differ: the first, those between, the last."""


@dataclass(frozen=True)
class Memory:
    """Bytes of the rank that holds most, at one moment.

    Attributes:
        moment: what is going on.
        parameters: the shards (or, unsharded, the whole), as they are held between steps.
        gradients: of parameters, sharded or whole, and sums of them.
        optimizer: its state on the device.
        gathered: whole parameters of the units that are gathered.
        activations: what backward needs, and temporaries of the blocks.
        logits: what the head and the loss take beyond that.
        communication: inputs and outputs of collectives.
    """

    moment: str
    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    logits: int
    communication: int

    @property
    def total(self) -> int:
        return (
            self.parameters
            + self.gradients
            + self.optimizer
            + self.gathered
            + self.activations
            + self.logits
            + self.communication
        )


@dataclass(frozen=True)
class Layout:
    """How a rank holds things.

    Attributes:
        shard: ranks among which one copy of the model is sharded, F.
        compute: bytes of an element in the type of compute; None: each parameter's own.
        reduce: bytes of an element in which gradients are reduced.
        optimizer: bytes of optimizer state for each trainable element.
        offload: optimizer state and masters are on the host; shards are held in the type of compute.
        residents: units whose offloaded state is on the device after all, by index.
    """

    shard: int
    compute: int | None
    reduce: int
    optimizer: int
    offload: bool = False
    residents: frozenset[int] = frozenset()


def replay(
    units: Sequence[UnitShape], probe: Probe, strategy: Strategy, layout: Layout, accumulation: int
) -> list[Memory]:
    """Every moment of a step in which a rank holds more than just before; the peak is the largest.

    Args:
        units: in the plan's order, the root last.
        accumulation: micro-batches of a step.
    """
    ranks = _Rank(units, probe, strategy, layout)
    micro_batches = min(accumulation, REPLAYED)
    for micro_batch in range(micro_batches):
        ranks.micro_batch(is_last=micro_batch == micro_batches - 1)
    ranks.snap("optimizer step", 0)
    return ranks.moments


def rounded(num_bytes: float) -> int:
    """As CUDA's allocator does."""
    return math.ceil(num_bytes / GRANULE) * GRANULE


@dataclass
class _Sizes:
    """Bytes of one unit's tensors."""

    gathered: int
    gather_input: int
    gather_output: int
    sharded: int
    reduce_input: int
    reduce_output: int
    last_gradient: int
    whole_sums: int
    cast_output: int
    optimizer: int


@dataclass
class _Unit:
    """What FSDP2 holds of one unit right now."""

    sizes: _Sizes
    gathered: bool = False
    gather_output: int = 0
    sharded_gradients: int = 0
    whole_gradients: int = 0


@dataclass
class _Rank:
    units: Sequence[UnitShape]
    probe: Probe
    strategy: Strategy
    layout: Layout
    moments: list[Memory] = field(default_factory=list)

    def __post_init__(self) -> None:
        root = len(self.units) - 1
        self._now = [_Unit(self._sizes(shape, i)) for i, shape in enumerate(self.units)]
        self._reshards = [
            self.strategy.reshard_each_micro_batch and shape.reshard_after_forward for shape in self.units
        ]
        self._root = root
        self._held_gather = 0  # the output of the last gather in forward
        self._reduce_input = 0  # the input of the last reduction
        self._in_flight: list[int] = []  # gradients on their way to the host
        self._static = sum(unit.sizes.sharded for unit in self._now) + self.probe.buffers
        self._optimizer = sum(unit.sizes.optimizer for unit in self._now)
        self._order: list[int] = []  # of the forwards
        self._before: dict[int, list[int | None]] = {}  # which ran before each forward of a unit
        self._loss_level = _level_before_head(self.probe.events, self.units)
        self._loss_over = False

    # Sizes

    def _sizes(self, shape: UnitShape, index: int) -> _Sizes:
        f, layout = self.layout.shard, self.layout
        compute = [layout.compute or p.held for p in shape.parameters]
        padded = [p.shard_numel(f) * f for p in shape.parameters]
        gathered = sum(rounded(n * c) for n, c in zip(padded, compute, strict=True))
        casts = layout.compute is not None
        whole = sum(n * c for n, c in zip(padded, compute, strict=True))
        trainable = shape.trainable
        reduce_input = rounded(layout.reduce * sum(p.shard_numel(f) * f for p in trainable)) if trainable else 0
        resident = layout.offload and index in layout.residents
        held = [self._held(p) for p in shape.parameters]
        sharded = sum(rounded(p.shard_numel(f) * h) for p, h in zip(shape.parameters, held, strict=True))
        own = sum(p.shard_numel(f) for p in trainable)
        return _Sizes(
            gathered=gathered,
            gather_input=rounded(whole // f) if casts else 0,
            gather_output=rounded(whole) if f > 1 else 0,
            sharded=sharded,
            reduce_input=reduce_input,
            reduce_output=rounded(reduce_input // f),
            last_gradient=self._last_gradient(trainable) if f > 1 else 0,
            whole_sums=sum(rounded(p.numel * layout.reduce) for p in trainable),
            cast_output=rounded(own * (layout.compute or 4)) if layout.offload and layout.compute not in (None, layout.reduce) else 0,
            optimizer=self._optimizer_bytes(trainable, own, resident),
        )

    def _held(self, parameter: ParameterShape) -> int:
        if self.layout.offload and parameter.trainable:
            return self.layout.compute or parameter.held
        return parameter.held

    def _last_gradient(self, trainable: Sequence[ParameterShape]) -> int:
        if not trainable:
            return 0
        last = trainable[-1]
        return rounded(last.numel * (self.layout.compute or last.held))

    def _optimizer_bytes(self, trainable: Sequence[ParameterShape], own: int, resident: bool) -> int:
        if self.layout.offload:  # master, moments and the gradient's landing place
            return 4 * rounded(own * 4) if resident else 0
        f = self.layout.shard
        each = (rounded(p.shard_numel(f) * self.layout.optimizer / 2) for p in trainable)
        return sum(2 * size + GRANULE for size in each)  # the step counter is a tensor, too

    # The run

    def micro_batch(self, is_last: bool) -> None:
        self._order.clear()
        self._before = {index: [] for index in range(len(self.units))}
        self._loss_over = False
        self._seen_backward: set[int] = set()
        previous = Event("end", self._root, 0, 0)
        for event in self.probe.events:
            self.snap(self._moment(previous, event), event.peak)
            level = event.level
            if event.kind == "enter":
                self._gather(event.unit, level, in_forward=True)
            elif event.kind == "exit":
                self._after_forward(event.unit)
            elif event.kind == "pre_backward":
                self._before_backward(event.unit, level)
            elif event.kind == "post_backward":
                self._reduce(event.unit, level, event.gradients, is_last)
            else:
                self._reduce_input = 0
            previous = event

    def snap(self, moment: str, activations: int, communication: int = 0, gathered: int = 0, gradients: int = 0) -> None:
        """Adds a moment; the numbers are what is there beyond what the units hold."""
        logits = 0
        if not self._loss_over and activations > self._loss_level and self._in_head:
            logits = activations - self._loss_level
        self.moments.append(
            Memory(
                moment,
                self._static,
                gradients + sum(unit.sharded_gradients + unit.whole_gradients for unit in self._now) + sum(self._in_flight),
                self._optimizer,
                gathered + sum(unit.sizes.gathered for unit in self._now if unit.gathered),
                activations - logits,
                logits,
                communication + self._held_gather + self._reduce_input + sum(unit.gather_output for unit in self._now),
            )
        )

    _in_head = False

    def _moment(self, previous: Event, event: Event) -> str:
        """What went on between two events."""
        name = self.units[event.unit].name
        is_block = self.units[event.unit].kind == "block"
        forward = event.kind in ("enter", "exit")
        self._in_head = False
        if event.kind == "exit" and is_block:
            return f"forward of {name}"
        if event.kind == "post_backward" and is_block:
            return f"backward of {name}"
        blocks_left = any(u.kind == "block" for u in self.units)
        if blocks_left and self._after_last_block(previous):
            self._in_head = True
            if forward:
                return "forward of the head"
            return "loss" if event.kind == "pre_backward" and not self._seen_backward else "backward of the head"
        return "forward" if forward else "backward"

    def _after_last_block(self, previous: Event) -> bool:
        return self._past_blocks

    _past_blocks = False

    def _gather(self, index: int, level: int, in_forward: bool) -> None:
        """`unshard` and `wait_for_unshard`."""
        unit = self._now[index]
        where = f"gather of {self.units[index].name}"
        if not unit.gathered:
            if self.layout.shard > 1:
                if not unit.gather_output:
                    self.snap(where, level, communication=unit.sizes.gather_input + unit.sizes.gather_output)
                    unit.gather_output = unit.sizes.gather_output
                self.snap(where, level, gathered=unit.sizes.gathered)  # a local name still holds the last output
                if in_forward:
                    self._held_gather = unit.gather_output
                unit.gather_output = 0
            unit.gathered = True
        if in_forward and self.units[index].kind == "block":
            self._past_blocks = False

    def _after_forward(self, index: int) -> None:
        self._before[index].append(self._order[-1] if self._order else None)
        self._order.append(index)
        if self._reshards[index]:
            self._now[index].gathered = False
        if index == self._root:
            self._held_gather = 0
        if self.units[index].kind == "block":
            self._past_blocks = True

    def _before_backward(self, index: int, level: int) -> None:
        self._seen_backward.add(index)
        self._gather(index, level, in_forward=False)
        if self.units[index].kind == "block":
            self._past_blocks = False
            self._loss_over = True
        if self._before[index]:
            before = self._before[index].pop()
            if before is not None:
                self._prefetch(before, level)

    def _prefetch(self, index: int, level: int) -> None:
        unit = self._now[index]
        if unit.gathered or unit.gather_output or self.layout.shard == 1:
            return
        self.snap(
            f"gather of {self.units[index].name}",
            level,
            communication=unit.sizes.gather_input + unit.sizes.gather_output,
        )
        unit.gather_output = unit.sizes.gather_output

    def _reduce(self, index: int, level: int, gradients: int, is_last: bool) -> None:
        """`post_backward` of FSDP2."""
        unit, name = self._now[index], self.units[index].name
        sizes = unit.sizes
        where = f"reduction of {name}"
        reduces = self.strategy.reduce_each_micro_batch or is_last
        reshards = self.strategy.reshard_each_micro_batch or is_last
        if unit.whole_gradients:  # summed into the whole ones; freed one by one
            self.snap(where, level, gradients=gradients)
            gradients = 0
        if reshards:
            unit.gathered = False
        if not reduces:
            if gradients and not unit.whole_gradients:
                self.snap(where, level, gradients=gradients)
                unit.whole_gradients = sizes.whole_sums
            return
        whole, unit.whole_gradients = unit.whole_gradients or gradients, 0
        if not whole:
            return
        self._reduce_input = 0
        self.snap(where, level, gradients=whole, communication=sizes.reduce_input)
        self._reduce_input = sizes.reduce_input
        self.snap(where, level, gradients=min(whole, sizes.last_gradient) + sizes.reduce_output)
        self._keep(unit, level, where, is_last)

    def _keep(self, unit: _Unit, level: int, where: str, is_last: bool) -> None:
        """What becomes of the reduced gradient."""
        sizes = unit.sizes
        if not self.layout.offload:
            unit.sharded_gradients = sizes.reduce_output
            return
        self.snap(where, level, gradients=sizes.reduce_output + sizes.cast_output)
        if not is_last:
            unit.sharded_gradients = sizes.reduce_output
            return
        flat, unit.sharded_gradients = unit.sharded_gradients or sizes.reduce_output, 0
        self._in_flight.append(flat)
        self._in_flight = self._in_flight[-MAX_IN_FLIGHT:]


def _level_before_head(events: Sequence[Event], units: Sequence[UnitShape]) -> int:
    """Live activations when the last block's forward is done."""
    exits = [event for event in events if event.kind == "exit" and units[event.unit].kind == "block"]
    return exits[-1].level if exits else 0
