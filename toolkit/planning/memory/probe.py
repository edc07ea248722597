"""Runs one micro-batch without memory, to find the activations that a rank would hold at each of FSDP2's moments.

The model runs once under FakeTensorMode, whole, without FSDP2 and without a process group; a ledger
counts the bytes. Hooks are placed as FSDP2 places its own: before and after the forward of each unit's
modules, and at the arrival of the gradients of its outputs and inputs. Of blocks that are alike, the
first, the second and the last run; the others are skipped and get the figures of the second. So the cost
does not grow with depth, nor with the length of rows that run in chunks or token by token.

Gradients are dropped when FSDP2 would reduce them, so that only activations are counted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from toolkit.model.structure.fake_tensors import FakeTensorMode
from toolkit.objectives.losses.chunks import one_for_all_alike
from toolkit.objectives.teacher import teacher_units
from toolkit.planning.memory.fake import (
    Ledger,
    autocast,
    cuda_dropout,
    exchanged_bytes,
    give_parameters,
    host_copies,
    tree_map_only,
)
from toolkit.planning.memory.known import known_batch
from toolkit.planning.memory.recurrence import few_products
from toolkit.planning.workload.unit_shapes import head_unit
from toolkit.planning.workload.workload import Workload
from toolkit.sharding.apply import PRECISIONS, precision_policies
from toolkit.sharding.blocks.checkpointing import Checkpointing, checkpoint_blocks
from toolkit.sharding.parallel.expert_parallel import shard_experts
from toolkit.sharding.parallel.sequence_parallel import without_ranks
from toolkit.sharding.plan.unit_plan import UnitPlan
from toolkit.sharding.plan.units import owned_parameters, plan_units

MomentKind = Literal["enter", "exit", "unshard", "reshard", "loss", "pre_backward", "post_backward", "end"]


@dataclass(frozen=True)
class ProbeEvent:
    """A moment at which FSDP2 acts, and what the model held up to it.

    Attributes:
        unit: index in the plan, after the units of a teacher; the root's is the last.
        level: live bytes of activations at the moment, without gradients of the unit's parameters.
        peak: the most since the moment before.
        gradients: bytes of the unit's gradients in the compute dtype, if they are dropped at this moment.
        host: the most bytes of checkpoints on the host since the moment before.
        exchanged: bytes sent since the moment before to the ranks that share rows or experts, or cut matrices.
        to_come: by block, bytes that a micro-batch before this unit holds more than one after it.
    """

    kind: MomentKind
    unit: int
    level: int
    peak: int
    gradients: int = 0
    host: int = 0
    exchanged: int = 0
    to_come: int = 0


@dataclass(frozen=True)
class Probe:
    """The memory of a micro-batch, and what it exchanges.

    Attributes:
        events: in the order of the run: forward, `loss` at its end, then backward.
        buffers: bytes of the model's buffers and of the batch.
        batch: bytes of the batch alone.
    """

    events: tuple[ProbeEvent, ...]
    buffers: int
    batch: int = 0

    @property
    def exchanged(self) -> int:
        """Bytes that a rank sends to those that share its rows or experts, or cut its matrices."""
        return sum(event.exchanged for event in self.events)

    @property
    def host_peak(self) -> int:
        """The most bytes of checkpoints on the host."""
        return max(event.host for event in self.events)

    @property
    def gathers_head(self) -> bool:
        """Whether the head of a teacher is gathered once more for the loss."""
        return any(event.kind == "unshard" for event in self.events)


class Prober:
    """Probes one workload, any number of times.

    Args:
        whole: whether to run it as torch's DDP does: mixed precision casts parameters at their uses.

    Attributes:
        teacher_head: number of the unit that has a teacher's head, or None without a teacher.
    """

    def __init__(self, workload: Workload, whole: bool = False) -> None:
        self._workload = workload
        # FSDP2 gathers in the compute dtype; DDP keeps float32 parameters and Accelerate wraps the forward in
        # autocast, whose cast copies of the weights are activations.
        self._autocast = whole and workload.mixed_precision != "no"
        self.plan = plan_units(workload.model, workload.unit_classes, workload.experts > 1)
        # Buffers, such as the frequencies of rotary embeddings, are real: models compute them while they are built.
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._dtype = None if self._autocast else PRECISIONS[workload.mixed_precision]
        self._output_dtype = None if whole else precision_policies(workload.mixed_precision)[1].output_dtype
        self._model = workload.model_copy()
        for path in (unit.name for unit in self.plan.units if unit.kind == "experts"):
            shard_experts(self._model.get_submodule(path), workload.experts)
        with self._mode:
            casts_units = give_parameters(self._model, self._dtype)
        self._parts = [_ProbedModel(self._model, self.plan, casts_units)]
        self.teacher_head = self._add_teacher()
        self._objective = workload.objective(self._model, *(part.model for part in self._parts[:-1]))
        if self._autocast:
            self._model.forward = autocast(self._model.forward, PRECISIONS[workload.mixed_precision])
        # Under FSDP2 a unit's gradients are freed when it is reduced, which `_record` does.
        if whole:  # DDP copies gradients into its buckets as they come
            for parameter in self._model.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]

    def _add_teacher(self) -> int | None:
        """Adds a teacher as the first part; returns the unit of its head, or None without a teacher."""
        model = self._workload.teacher_copy()
        if model is None:
            return None
        plan = teacher_units(model, self._workload.unit_classes)
        with self._mode:
            # Held in the compute dtype: autocast casts nothing either.
            casts = give_parameters(model, PRECISIONS[self._workload.mixed_precision])
        self._parts.insert(0, _ProbedModel(model, plan, casts))
        return head_unit(model, plan)

    def probe(self, micro_batch_size: int, checkpointing: Checkpointing | None) -> Probe:
        """Probes one micro-batch of `micro_batch_size` samples."""
        run = _Run(self._parts, self._dtype, self._output_dtype)
        if self.teacher_head is not None:
            assert self._objective.teacher is not None
            self._objective.teacher.gathering = functools.partial(run.gathered, self.teacher_head)
        with ExitStack() as stack:
            stack.enter_context(self._mode)
            stack.enter_context(cuda_dropout())  # the process is on a CPU; what is counted is a GPU's
            stack.enter_context(without_ranks())
            stack.enter_context(host_copies(run.ledger))
            stack.enter_context(self._with_checkpoints(checkpointing))
            stack.enter_context(one_for_all_alike(run.count_as))
            stack.enter_context(few_products(self._model))
            run.start()
            batch = known_batch(stack, self._workload.batch(micro_batch_size), self._objective)
            buffers = run.see_inputs(batch)
            with run.ledger:
                loss = self._objective.loss_sum(self._model, batch)
                run.reached_loss()
                torch.autograd.backward(loss)
                del loss
                run.finish()
        return Probe(tuple(_with_skipped_blocks(run.events, run.stands_in)), buffers, run.batch_bytes)

    @contextmanager
    def _with_checkpoints(self, checkpointing: Checkpointing | None) -> Iterator[None]:
        parents = [
            part.model.get_submodule(path)
            for part in self._parts
            for unit in part.plan.units
            if unit.kind in ("block", "tail")
            for path in unit.modules
        ]
        modules = [module for parent in parents for module in (parent, *parent.children())]
        before = [module.__dict__.get("forward") for module in modules]
        if checkpointing is not None:
            checkpoint_blocks(self._model, self.plan, checkpointing)
        try:
            yield
        finally:
            # A checkpoint is an attribute of the module that hides the forward of its class.
            for module, forward in zip(modules, before, strict=True):
                module.__dict__.pop("forward", None)
                if forward is not None:
                    module.forward = forward


@dataclass(frozen=True)
class _ProbedModel:
    """A model that runs: a teacher, or the one that is trained.

    Attributes:
        casts_units: whether all its units cast their inputs, not the root alone.
    """

    model: nn.Module
    plan: UnitPlan
    casts_units: bool


class _Run:
    """The hooks of one probe and what they recorded. The last of the parts is trained."""

    def __init__(
        self, parts: Sequence[_ProbedModel], dtype: torch.dtype | None, output_dtype: torch.dtype | None
    ) -> None:
        self.models = [part.model for part in parts]
        self.events: list[ProbeEvent] = []
        self.ledger = Ledger(on_operator=self._on_operator)
        self.stands_in: dict[int, int] = {}
        self.outputs: dict[int, Any] = {}
        self._dtype, self._output_dtype = dtype, output_dtype
        numbered = [(part, number, unit) for number, part in enumerate(parts) for unit in part.plan.units]
        self._casts = [part.casts_units or unit.kind == "root" for part, _, unit in numbered]
        self._units = [[part.model.get_submodule(path) for path in unit.modules] for part, _, unit in numbered]
        self._parameters = [
            own for part in parts for own in owned_parameters(part.model, (unit.modules for unit in part.plan.units))
        ]
        self._kinds = [unit.kind for _, _, unit in numbered]
        self._part_of = [number for _, number, _ in numbered]
        self._running: dict[int, set[int]] = {}
        self._in_backward: set[int] = set()
        self._handles: list[Any] = []
        self._base = self.batch_bytes = self._exchanged = 0
        self._times = 1

    def start(self) -> None:
        for unit, modules in enumerate(self._units):
            for module in modules:
                enter, leave = self._before_forward(unit), self._after_forward(unit)
                # With keyword arguments, because transformers passes all but the hidden states by name.
                self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
                self._handles.append(module.register_forward_hook(leave))
        self._stand_aside()

    def see_inputs(self, batch: dict[str, torch.Tensor]) -> int:
        """Counts parameters, buffers and the batch, (B, T) and so on, at the start; returns bytes of the latter two."""
        for parameter in (parameter for model in self.models for parameter in model.parameters()):
            self.ledger.see(parameter)
        before = self.ledger.current
        for tensor in (tensor for model in self.models for tensor in model.buffers()):
            self.ledger.see(tensor)
        without_batch = self.ledger.current
        for tensor in batch.values():
            if isinstance(tensor, torch.Tensor):
                self.ledger.see(tensor)
        self.batch_bytes = self.ledger.current - without_batch
        # Levels count from here: the replay adds parameters, as each strategy holds them.
        self._base = self.ledger.current
        self.ledger.restart()
        return self._base - before

    def reached_loss(self) -> None:
        self._record("loss", len(self._units) - 1)

    def finish(self) -> None:
        """Ends backward: FSDP2 reduces now what has not been reduced yet, the root first."""
        # A unit whose inputs need no gradient, such as the embeddings, has no hook that fires: FSDP2 ends it in the
        # callback that it queues for the end of backward.
        left = [unit for unit in range(len(self._units)) if unit in self._in_backward]
        for unit in sorted(left, key=lambda unit: (unit != len(self._units) - 1, unit)):
            self._record("post_backward", unit)
        self._record("end", len(self._units) - 1)
        for handle in self._handles:
            handle.remove()
        for parameter in self.models[-1].parameters():
            parameter.grad = None

    @contextmanager
    def gathered(self, unit: int) -> Iterator[None]:
        """Returns a context that gathers a unit outside of its forward."""
        self._record("unshard", unit)
        yield
        self._record("reshard", unit)

    def _record(self, kind: MomentKind, unit: int) -> None:
        ledger = self.ledger
        gradients = 0
        peak, level = ledger.peak - self._base, ledger.current - self._base
        if kind == "post_backward":
            self._in_backward.discard(unit)
            # What this frees are the gradients; activations that backward has used up went before.
            for parameter in self._parameters[unit]:
                parameter.grad = None
            gradients = level - (ledger.current - self._base)
            level -= gradients
        self.events.append(ProbeEvent(kind, unit, level, peak, gradients, ledger.host_peak, self._exchanged))
        self._exchanged = 0
        ledger.restart()
        ledger.host_peak = ledger.host

    def _on_operator(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        self._exchanged += exchanged_bytes(func, args, out) * self._times

    def count_as(self, times: int) -> None:
        """Makes each operator from now on count `times` times."""
        self._times = times

    def _before_forward(self, unit: int) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if self._casts[unit]:
                args, kwargs = self._cast((args, kwargs), self._dtype)
            # A unit of several modules is gathered by the first that runs and released after the last.
            running = self._running.get(unit)
            if running is None:
                self._running[unit] = running = {id(own) for own in self._units[unit]}
                self._record("enter", unit)
                args, kwargs = self._watch_inputs(unit, args, kwargs)
            running.discard(id(module))
            return args, kwargs

        return hook

    def _watch_inputs(self, unit: int, args: Any, kwargs: Any) -> Any:
        """Records when the gradients of all inputs are there, like FSDP2's RegisterPostBackwardFunction."""
        found: list[torch.Tensor] = []

        def collect(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.requires_grad:
                found.append(tensor)
            return tensor

        tree_map_only(torch.Tensor, collect, (args, kwargs))
        if not found:
            return args, kwargs
        # One node for all inputs, so that it is called once and after the last of them.
        watched = iter(_Watch.apply(lambda: self._record("post_backward", unit), *found))  # type: ignore[no-untyped-call]
        return tree_map_only(torch.Tensor, lambda t: next(watched) if t.requires_grad else t, (args, kwargs))

    def _after_forward(self, unit: int) -> Callable[..., Any]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
            if self._running.get(unit):
                return output  # the unit's other modules are still to come
            self._leave_unit(unit, output)
            if self._kinds[unit] != "root":
                self._record("exit", unit)
                return output
            incomplete = list(self._running)  # T5's tied embeddings: one of the unit's modules is never called
            for other in incomplete:
                self._leave_unit(other, output)
            # The root casts its output before FSDP2 releases the last gather.
            output = self._cast(output, self._output_dtype)
            for done in (unit, *incomplete):
                self._record("exit", done)
            return output

        return hook

    def _leave_unit(self, unit: int, output: Any) -> None:
        self._running.pop(unit, None)
        tree_map_only(torch.Tensor, lambda t: self._watch_output(unit, t), output)

    def _watch_output(self, unit: int, tensor: torch.Tensor) -> torch.Tensor:
        def hook(_gradient: torch.Tensor) -> None:
            # A module with several outputs gathers at the first gradient that arrives.
            if unit not in self._in_backward:
                self._in_backward.add(unit)
                self._record("pre_backward", unit)

        if tensor.requires_grad:
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        return tensor

    def _cast(self, value: Any, dtype: torch.dtype | None) -> Any:
        if dtype is None:
            return value
        return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, value)

    def _stand_aside(self) -> None:
        """Skips blocks that are like three others, unless they hold units of their own."""
        alike: dict[Any, list[int]] = {}
        can_stand_aside = "experts" not in self._kinds
        for unit, modules in enumerate(self._units):
            if can_stand_aside and self._kinds[unit] == "block" and len(modules) == 1:
                alike.setdefault((self._part_of[unit], signature(modules[0])), []).append(unit)
        for units in alike.values():
            # The first differs because nothing before it keeps its input, the last because its output goes to the
            # head. The second stands for those between.
            for unit in units[2:-1]:
                self.stands_in[unit] = units[1]
                (module,) = self._units[unit]
                module.forward = Aside(self.outputs, units[1])
        # With three or fewer, none is skipped, and nothing needs what the second returned.
        for unit in {units[1] for units in alike.values() if len(units) > 3}:
            (module,) = self._units[unit]
            self._handles.append(module.register_forward_hook(self._keep_output(unit), with_kwargs=True))

    def _keep_output(self, unit: int) -> Callable[..., None]:
        """Records a block's outputs after the first: inputs that it passes on, by their places, or values."""

        def hook(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            places = {id(value): place for place, value in (*enumerate(args), *kwargs.items())}
            others = output[1:] if isinstance(output, tuple) else None
            kept = [(places.get(id(value)), value) for value in others or ()]
            self.outputs[unit] = others and [(place, value if place is None else None) for place, value in kept]

        return hook


class _Watch(torch.autograd.Function):
    """Passes tensors on, and calls back when the gradients of all of them are there."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        ctx.call()
        return None, *gradients


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _with_skipped_blocks(events: Sequence[ProbeEvent], stands_in: dict[int, int]) -> Iterator[ProbeEvent]:
    """Yields the events, with those of skipped blocks replaced by the ones of the block that they duplicate."""
    forward, backward = _costs(events)
    # Each skipped block adds what it would have kept to all levels after it, and removes it in backward.
    offset = host = 0
    for position, event in enumerate(events):
        like = stands_in.get(event.unit)
        entered = None if like is None else (forward if event.kind in ("enter", "exit") else backward)[like]
        if entered is None or event.kind in ("enter", "pre_backward"):
            yield replace(event, level=event.level + offset, peak=event.peak + offset, host=event.host + host)
            continue
        if like is not None and event.kind == "exit":
            host += forward[like].host
        yield ProbeEvent(
            event.kind,
            event.unit,
            event.level + offset + entered.level,
            events[position - 1].level + offset + entered.peak,
            entered.gradients,
            event.host + host,
            entered.exchanged,
        )
        offset += entered.change
        if like is not None and event.kind == "post_backward":
            host -= forward[like].host


@dataclass(frozen=True)
class _Cost:
    """The change in live bytes by a block's forward or backward, relative to their level before it.

    Attributes:
        level, peak: at its end, and the most in it.
        change: when the next block begins.
        host: bytes that a forward moves to the host.
    """

    level: int
    peak: int
    change: int
    gradients: int
    host: int
    exchanged: int


def _costs(events: Sequence[ProbeEvent]) -> tuple[dict[int, _Cost], dict[int, _Cost]]:
    """Returns the costs of each unit's forward and backward that no other unit interrupts."""
    forward: dict[int, _Cost] = {}
    backward: dict[int, _Cost] = {}
    for before, event, after in zip(events, events[1:], events[2:], strict=False):
        # Another unit's event between the two: units are nested, and what lies between is not this block's alone.
        if before.unit == event.unit and (before.kind, event.kind) in PAIRS:
            start = before.level
            change, peak = after.level - start, event.peak - start
            cost = _Cost(event.level - start, peak, change, event.gradients, event.host - before.host, event.exchanged)
            (forward if event.kind == "exit" else backward)[event.unit] = cost
    return forward, backward


PAIRS = (("enter", "exit"), ("pre_backward", "post_backward"))


# Blocks that do the same work, of which most need not run


class Aside:
    """The forward of a skipped block: returns its first input in the output structure of the block it duplicates.

    Args:
        outputs: for units that ran, their further outputs, each as the place of an input or as a value.
        like: the unit that it duplicates.
    """

    def __init__(self, outputs: Mapping[int, Any], like: int) -> None:
        self._outputs, self._like = outputs, like

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else next(value for value in kwargs.values() if isinstance(value, torch.Tensor))
        # Hooks on outputs sit on tensors: if the input were returned itself, it would have every block's hooks.
        hidden = hidden.view_as(hidden)  # a new tensor, like a block's output
        others = self._outputs.get(self._like)
        if others is None:
            return hidden
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        return (hidden, *(value if place is None else given[place] for place, value in others))


def signature(block: nn.Module) -> Any:
    """Returns a key that is equal for blocks that do the same work: modules, settings and parameters, no numbers."""
    modules = tuple((name, type(module).__name__, *sorted(_settings(module))) for name, module in block.named_modules())
    parameters = tuple((name, tuple(p.shape), p.requires_grad) for name, p in block.named_parameters())
    return modules, parameters, getattr(block.__dict__.get("forward"), "__name__", "")


def _settings(module: nn.Module) -> Iterator[tuple[str, str]]:
    for name, value in module.__dict__.items():
        if isinstance(value, str | int | float) and not name.startswith("_") and name not in NUMBERS:
            yield name, str(value)


NUMBERS = ("layer_idx", "layer_id", "layer_number", "training")
"""Settings of a module that may differ between blocks that do the same work."""
