"""Schedules offloaded optimizer state: takes gradients, computes the norm, steps units in forward order.

Shards of the parameters stay on the device in the compute type. Masters and moments are in host memory. A unit's
gradient is copied there as soon as FSDP2 has reduced it. At `optimizer.step()` a worker thread starts to step the units
in the order of the next forward. The forward waits for one unit at a time, and only if it reaches a unit before the
worker has finished it. No unit is ever used with the weights of the previous step, so the run equals ordinary FSDP2
mixed precision bit for bit.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from toolkit import ranks
from toolkit.errors import BadInputError, RankError, ToolkitError, first_line
from toolkit.sharding.fsdp2.fsdp import fsdp_units, in_backward
from toolkit.sharding.fsdp2.gloo import before_reading_shards
from toolkit.sharding.fsdp2.shards import local_tensor, shard_group, tensor_dim, tensor_group
from toolkit.sharding.fsdp2.unused import UsedParameters
from toolkit.sharding.offload.capture import Capture, wait_for_landing
from toolkit.sharding.offload.executors import CpuFused, CpuTorch, DeviceStream, Executor, Resident, Staging, UnitStep
from toolkit.sharding.offload.host import Slabs
from toolkit.sharding.offload.kernel import load_kernel
from toolkit.sharding.offload.offloaded_units import OffloadedUnit, read_units
from toolkit.sharding.offload.settings import (
    ExecutorName,
    OffloadSettings,
    fused_kernel_refuses,
    hyper_parameters,
    state_names,
)
from toolkit.sharding.offload.state import OffloadedState, require_types
from toolkit.sharding.offload.worker import Worker

CHECK_SECONDS = 1.0
"""How often a wait for the worker checks that the worker is still alive."""

_ENGINES: weakref.WeakKeyDictionary[nn.Module, weakref.ref[OffloadEngine]] = weakref.WeakKeyDictionary()
"""Models whose state is offloaded -> their engines."""


def engine_of(model: nn.Module) -> OffloadEngine | None:
    """Returns the engine that steps a model's offloaded state, or None if nothing is offloaded."""
    engine = _ENGINES.get(model)
    return None if engine is None else engine()


class OffloadEngine:
    """Steps the offloaded optimizer state of one model.

    The constructor takes the sharded model before it has weights, and allocates all host memory. Then `state.seed`
    receives the masters, and `attach` registers the hooks. Collective.

    Args:
        model: sharded, with its trainable parameters in the compute type.
        optimizer: a torch optimizer. `attach` looks up its parameters.
        settings: how state is held and stepped.
        mixed_precision: `no` or `bf16`.
        is_last_micro_batch: called in backward; returns whether it is the last of the optimizer step.
        accumulates: whether an optimizer step has more than one micro-batch.

    Attributes:
        state: masters and moments.
        optimizer: the optimizer whose settings are read at every step.
        executor: the executor of the units that are not resident.
        reason: why this executor was chosen.

    Raises:
        BadInputError: if nothing is trainable, or the dtypes, the optimizer, the executor or the host's memory do not
            allow offload.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        settings: OffloadSettings,
        mixed_precision: str,
        is_last_micro_batch: Callable[[], bool],
        accumulates: bool,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.settings = settings
        self._is_last = is_last_micro_batch
        units = read_units(model)
        if not units:
            raise BadInputError("offload: no parameter of the model is trainable; leave offload out")
        require_types(units, mixed_precision)
        parameter = units[0].slots[0].parameter
        assert isinstance(parameter, DTensor)
        self._group, self._parts = shard_group(parameter), tensor_group(parameter)
        self._device = _device_of(parameter)
        self._handle = getattr(torch, self._device.type)
        self.threads = settings.threads or default_threads(self._device)
        self.executor, self.reason = choose(settings.executor, optimizer)
        # One rank reduces nothing: it gets the gradient of one backward, in the compute type if all parameters have it.
        types = {slot.parameter.dtype for unit in units for slot in unit.slots}
        exact = next(iter(types)) if len(types) == 1 and ranks.world_size() == 1 and not accumulates else torch.float32
        self.state = OffloadedState(
            units, state_names(optimizer), self._device, settings.device_state_gib, exact, self.executor
        )
        self._seen: list[OffloadedUnit] = []
        self._clip: _Clip | None = None
        self._worker = Worker(self._device, self.threads)
        self._agreed = False
        # Weakly: the model's hooks hold the engine, so dropping the model (as a Trainer's end does) frees host memory.
        _ENGINES[model] = weakref.ref(self)
        self._end = weakref.finalize(self, _free_memory, self._worker, self._handle, self.state.slabs)
        # Not at the end of the process: the device may wait for a rank that is gone.
        self._end.atexit = False

    @torch.no_grad()
    def attach(self) -> None:
        """Registers the hooks, once the parameters have their shards and the optimizer has the parameters."""
        parameters: dict[str, Any] = dict(self.model.named_parameters())
        groups = {id(p): i for i, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
        on_device = self.executor == "device_stream"
        for unit in self.state.units:
            for slot in unit.slots:
                # By name: loading the weights replaces the parameters that the units found.
                slot.parameter = parameters[slot.name]
                slot.group = groups.get(id(slot.parameter))
                # A fused optimizer needs the count on the device on which it steps.
                slot.step = torch.zeros((), device=self._device if on_device or unit.resident else "cpu")
        units = {id(slot.parameter): unit for unit in self.state.units for slot in unit.slots}
        self._used = UsedParameters(self.model, lambda p: id(p) in units and units[id(p)].has_gradient)
        self._executors = self._make_executors()
        once = self.settings.during_backward
        self._capture = Capture(self._device, self._is_last, self._on_landed, self._require_same_parameters, once)
        for unit in self.state.units:
            self._capture.attach(unit)
            # Wait in the gather, not before the forward: an explicit prefetch gathers a unit ahead of its forward. With
            # a wait before the forward, training silently used old weights, and losses were off by 8e-2 to 1e-1.
            before_reading_shards(unit.modules[0], functools.partial(self._wait_for_weights, unit))
            for module in unit.modules:
                module.register_forward_pre_hook(functools.partial(self._note_order, unit))

    def describe(self) -> str:
        """Returns a line for people: what steps the state, why, and how much memory it takes."""
        threads = "" if self.executor == "device_stream" else f", {self.threads} thread{'s' * (self.threads != 1)}"
        residents = self.state.residents
        on_device = f"; {len(residents)} of {len(self.state.units)} units on the device" if residents else ""
        return f"{self.executor}{threads} ({self.reason}); {self.state.plan} of host memory a rank{on_device}"

    # Called from outside

    @torch.no_grad()
    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Returns the 2-norm of all gradients over all ranks, a scalar on the device, and scales the next step.

        Equals `torch.nn.utils.clip_grad_norm_` bit for bit: it is the norm of the parameters' norms, and each of these
        is the root of the sum of squares over ranks.

        Args:
            parameters: all trainable parameters of the model, of any shape.
            max_norm: the norm to which larger gradients are scaled.
            norm_type: only 2 is supported.

        Raises:
            BadInputError: if parameters are missing, the norm is another one, or units are stepped during backward
                and `max_norm` is finite.
        """
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        self._require_clippable(listed, max_norm, norm_type)
        self._finish_window()
        norms = {
            id(unit.slots[i].parameter): unit.norms[i]
            for unit in self.state.units
            if unit.norms is not None
            for i in unit.present
        }
        if not norms:
            return torch.zeros((), device=self._device)
        # In the order given, and without those that have no gradient: as zeros they would change the order of the sum,
        # and its last bit.
        counted = [parameter for parameter in listed if id(parameter) in norms]
        stacked = torch.stack([norms[id(parameter)] for parameter in counted])
        # Only over the shards of one replica: others hold the same gradients, which would be counted again.
        if dist.get_world_size(self._group) > 1:
            squares = stacked**2
            dist.all_reduce(squares, group=self._group)
            stacked = squares**0.5
        if self._parts is not None:
            stacked = self._over_parts(counted, stacked)
        norm: torch.Tensor = torch.linalg.vector_norm(stacked)
        if self._clip is not None:
            norm = norm * self._clip.factor  # the gradients are clipped already
        self._clip = _Clip(norm, float(max_norm), self._handle, self._clip)
        return norm

    def _over_parts(self, parameters: Sequence[torch.Tensor], norms: torch.Tensor) -> torch.Tensor:
        """Returns the norms (n,) of whole parameters, of which this rank's tensor group has each a part or all."""
        is_cut = torch.tensor([isinstance(p, DTensor) and tensor_dim(p) is not None for p in parameters])
        squares = torch.where(is_cut.to(norms.device), norms**2, 0.0)
        dist.all_reduce(squares, group=self._parts)
        return torch.where(is_cut.to(norms.device), squares**0.5, norms)

    def step(self) -> None:
        """Hands every unit with a gradient to the worker, with the current settings of the optimizer.

        Raises:
            BadInputError: if other parameters are trained, or in other groups, than at `prepare`, or backward has not
                ended.
        """
        if in_backward():
            raise BadInputError(
                "offload: optimizer.step was called inside of backward, as by a hook of a parameter, before all "
                "gradients are known; call it after backward, or train without offload"
            )
        self._require_same_parameters()
        self._finish_window()
        self._agreed = False
        self._raise_error()
        clip, self._clip = self._clip, None
        # In the order of the last forward, which the next one most likely repeats; units that it did not run come last.
        order = [*self._seen, *(unit for unit in self.state.units if unit not in self._seen)]
        self._seen = []
        if clip is not None:
            self._worker.submit(clip.decide, _do_nothing)  # before the units of the step: it waits for the norm
        after = self._handle.current_stream().record_event()
        # Copied now: the scheduler runs right after this, and the worker steps later.
        settings = hyper_parameters(self.optimizer)
        for unit in order:
            if unit.gradient is not None and unit.present:
                self._submit_step(unit, settings, clip, after)
            unit.forget_gradient()

    def discard(self) -> None:
        """Discards the gradients that no step has used."""
        for unit in self.state.units:
            unit.forget_gradient()
        self._used.drop_unreduced(slot.parameter for unit in self.state.units for slot in unit.slots)
        self._agreed = False
        self._clip = None

    def flush(self) -> None:
        """Waits until every step handed in has been taken and its weights have arrived."""
        for unit in self.state.units:
            # A step's weights are sent after its masters: once they have arrived the host may read either.
            self._wait_for_weights(unit)
            if unit.arrived is not None:
                unit.arrived.synchronize()

    def close(self) -> None:
        """Ends the worker and frees the host memory. The model cannot be trained any more."""
        self._end()

    # The schedule

    def _on_landed(self, unit: OffloadedUnit) -> None:
        if self._clip is not None and self._clip.limits:
            raise BadInputError(
                "offload: backward was called between clip_grad_norm_ and optimizer.step; clip once, after the last "
                "backward of the step (under accumulate, if accelerator.sync_gradients)"
            )
        self._agreed, self._clip = False, None
        if self.settings.during_backward:
            self._agree_on_used([unit])
            if unit.present:
                self._submit_step(unit, hyper_parameters(self.optimizer), None, unit.landed)
            # The task holds it from now on, so that `step` does not hand it in again.
            unit.gradient = None

    def _finish_window(self) -> None:
        """Completes the gradients of the optimizer step, once for both clipping and `step`."""
        self._capture.finish()
        if not self._agreed:
            self._agree_on_used([] if self.settings.during_backward else self.state.units)
        self._agreed = True

    def _agree_on_used(self, units: Sequence[OffloadedUnit]) -> None:
        """Sets `present` of the units: the parameters that any rank used. Collective."""
        used = iter(self._used.used_by_any([slot.parameter for unit in units for slot in unit.slots]))
        for unit in units:
            unit.present = frozenset(i for i in range(len(unit.slots)) if next(used))

    def _submit_step(
        self, unit: OffloadedUnit, settings: tuple[dict[str, Any], ...], clip: _Clip | None, after: Any
    ) -> None:
        assert unit.gradient is not None
        # Here and not on the worker, which may come to the unit only after the next forward has.
        unit.published.clear()
        task = functools.partial(self._step_unit, unit, unit.gradient, unit.present, settings, clip, after)
        self._worker.submit(task, unit.published.set)

    def _step_unit(
        self,
        unit: OffloadedUnit,
        gradient: torch.Tensor,
        present: frozenset[int],
        settings: tuple[dict[str, Any], ...],
        clip: _Clip | None,
        after: Any,
    ) -> None:
        """Steps one unit and copies its weights to the device. Runs on the worker."""
        wait_for_landing(unit)
        if clip is None or not clip.skip:
            step = UnitStep(unit, gradient, present, settings, 1.0 if clip is None else clip.scale)
            executor = self._executors[unit]
            stream = executor.stream(unit)
            # The shards are overwritten: a forward without gradients between backward and step may still read them.
            stream.wait_event(after)
            with self._handle.stream(stream):
                for begin, weights in executor.step(step):
                    _copy_to_shards(step, begin, weights)
                unit.arrived = stream.record_event()
            executor.sent(unit.arrived)
        # Last: whoever waits for this reads `arrived` next.
        unit.published.set()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _note_order(self, unit: OffloadedUnit, *_: object) -> None:
        """Records the order of units before each module's forward: the next forward needs them in this order."""
        # An evaluation does not predict the next training forward. Checkpointed blocks run a second time, in backward.
        if torch.is_grad_enabled() and unit not in self._seen:
            self._seen.append(unit)

    def _wait_for_weights(self, unit: OffloadedUnit) -> None:
        """Waits until the unit has the weights of the last step, for work on the current stream."""
        while not unit.published.wait(CHECK_SECONDS):
            if not self._worker.alive:
                raise RankError(f"offload: the thread that steps the optimizer on rank {ranks.rank()} is gone")
        self._raise_error()
        if unit.arrived is not None:
            self._handle.current_stream().wait_event(unit.arrived)

    def _raise_error(self) -> None:
        error = self._worker.error
        if error is not None:
            raise RankError(
                f"offload: the optimizer step failed on rank {ranks.rank()}: "
                f"{type(error).__name__}: {first_line(error)}"
            ) from error

    # Parts

    def _make_executors(self) -> dict[OffloadedUnit, Executor]:
        state, chosen = self.state, dict[OffloadedUnit, Executor]()
        if state.hosted:
            staging = Staging(state.staging, self._device)
            executor = make_executor(
                self.executor, self.optimizer, state.hosted, staging, state.scratch, self._device, self.threads
            )
            chosen |= dict.fromkeys(state.hosted, executor)
        if state.residents:
            chosen |= dict.fromkeys(state.residents, Resident(self.optimizer, state.residents, self._device))
        return chosen

    def _require_same_parameters(self) -> None:
        """Raises BadInputError if parameters were frozen, unfrozen or given to the optimizer since `prepare`.

        FSDP2 reduces what is trained now, into places that were laid out then.
        """
        groups = {id(p): number for number, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
        laid_out = {id(slot.parameter): slot for unit in self.state.units for slot in unit.slots}
        for parameter in (parameter for _, unit in fsdp_units(self.model) for parameter in unit):
            slot = laid_out.get(id(parameter))
            if parameter.requires_grad != (slot is not None) or (slot and slot.group != groups.get(id(parameter))):
                raise BadInputError(
                    "offload: parameters were frozen, unfrozen or added to the optimizer after accelerator.prepare "
                    f"(first: {slot.name if slot else f'one of shape {tuple(parameter.shape)}'}), and their state has "
                    "no place; settle what is trained before prepare, or train without offload"
                )

    def _require_clippable(self, parameters: list[torch.Tensor], max_norm: float, norm_type: float) -> None:
        given = {id(parameter) for parameter in parameters}
        missing = [s.name for unit in self.state.units for s in unit.slots if id(s.parameter) not in given]
        if missing:
            raise BadInputError(
                f"clip_grad_norm_: {len(missing)} trainable parameters are not among those given (first: "
                f"{missing[0]}); with offload, pass model.parameters()"
            )
        if norm_type != 2.0:
            raise BadInputError(f"clip_grad_norm_: norm_type is {norm_type}; with offload, only 2 is supported")
        if self.settings.during_backward and math.isfinite(max_norm):
            raise BadInputError(
                f"clip_grad_norm_: max_norm is {max_norm}, but the step is taken during backward, before the norm is "
                "known; set during_backward=False"
            )


class _Clip:
    """Copies the norm of a step to the host and decides how to clip.

    Args:
        norm: a scalar on the device.
        max_norm: the norm to which larger gradients are scaled.
        handle: the device module, such as `torch.cuda`.
        before: an earlier clipping of the same gradients, if any.

    Attributes:
        factor: the factor of the gradients, a scalar on the device.
        limits: whether a norm was finite to which gradients are scaled.
        skip: whether the norm is not finite, so that the step is skipped. Set by `decide`.
        scale: the factor of the gradients. Set by `decide`.
    """

    def __init__(self, norm: torch.Tensor, max_norm: float, handle: Any, before: _Clip | None = None) -> None:
        # As torch's `clip_grads_with_norm_` has it, so that the scale is its scale to the last bit.
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        self.factor: torch.Tensor = scale if before is None else scale * before.factor
        self.limits: bool = math.isfinite(max_norm) or (before is not None and before.limits)
        both = torch.stack([norm, self.factor])
        # The worker waits for this copy, in `decide`; the main thread goes on to the next forward.
        self._both = torch.empty(2, pin_memory=both.is_cuda).copy_(both, non_blocking=True)
        self._event = handle.current_stream().record_event()
        self.skip = False
        self.scale = 1.0

    def decide(self) -> None:
        """Waits for the norm and sets `skip` and `scale`."""
        if self._event is not None:  # as torch.cpu's streams return
            self._event.synchronize()
        norm, self.scale = self._both.tolist()
        self.skip = not math.isfinite(norm)


def _copy_to_shards(step: UnitStep, begin: int, weights: torch.Tensor) -> None:
    """Copies new weights into the shards, rounded to their dtype.

    If the executor has rounded the weights already, shards that stay in float32 get their masters instead.

    Args:
        step: the step that was taken.
        begin: the first element of `weights` in the unit's flat tensors.
        weights: new weights, flat, (n,).
    """
    for slot in step.slots:
        first = max(slot.offset, begin)
        last = min(slot.offset + slot.numel, begin + weights.numel())
        if first < last:
            shard = local_tensor(slot.parameter).view(-1)
            is_rounded = weights.dtype.itemsize < shard.dtype.itemsize
            new = step.unit.master[first:last] if is_rounded else weights[first - begin : last - begin]
            shard[first - slot.offset : last - slot.offset].copy_(new, non_blocking=True)


def _free_memory(worker: Worker, handle: Any, slabs: Slabs) -> None:
    """Frees an engine's memory. Holds no reference to the engine, so that the engine can be collected."""
    # In this order: worker and device may still be copying from the memory that is given back.
    worker.close()
    handle.synchronize()
    slabs.release()


def _device_of(parameter: DTensor) -> torch.device:
    kind = parameter.device_mesh.device_type
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _do_nothing() -> None:
    pass


# ---- Chooses the executor: the requested one, or our own kernel where it can be built ----


def default_threads(device: torch.device) -> int:
    """Returns the threads of the step: this rank's share of the cores, minus two for the main thread and the data.

    On CPU ranks the forward uses the whole share, so the step gets half of it.
    """
    cores = ranks.cores_of_this_rank()
    return max(1, cores // 2 if device.type == "cpu" else cores - 2)


def choose(asked: ExecutorName, optimizer: torch.optim.Optimizer) -> tuple[str, str]:
    """Returns the executor and the reason for the choice, the same on every rank. Collective.

    Args:
        asked: the requested executor; `auto` is `cpu_fused` where every rank can build it, and else `cpu_torch`.
        optimizer: the optimizer whose step it takes.

    Raises:
        BadInputError: if the requested executor is not available.
    """
    if asked not in ("auto", "cpu_fused"):
        return asked, "as asked"
    problem = fused_kernel_refuses(optimizer)
    if problem is None:
        # The kernel counts only if every rank has it: hosts may differ in compilers, but must not differ in executors.
        problem = next((found for found in ranks.gather_objects(_kernel_problem()) if found is not None), None)
    if problem is None:
        return "cpu_fused", "as asked" if asked == "cpu_fused" else "its kernel can be built here"
    if asked == "cpu_fused":
        raise BadInputError(f"offload executor cpu_fused: {problem}; use cpu_torch or auto")
    return "cpu_torch", f"cpu_fused: {problem}"


def make_executor(
    name: str,
    optimizer: torch.optim.Optimizer,
    units: Sequence[OffloadedUnit],
    staging: Staging,
    scratch: torch.Tensor | None,
    device: torch.device,
    threads: int,
) -> Executor:
    """Returns the executor of units whose state is on the host.

    Args:
        name: `cpu_torch`, `cpu_fused` or `device_stream`.
        optimizer: whose class and settings are used.
        units: the units to step.
        staging: the buffers through which weights leave for the device.
        scratch: flat float32, (numel of the longest unit,). None if gradients arrive in float32.
        device: the device of the shards.
        threads: the threads of the kernel.
    """
    if name == "device_stream":
        return DeviceStream(optimizer, units, device)
    if name == "cpu_fused":
        return CpuFused(load_kernel(), staging, threads)
    return CpuTorch(optimizer, units, staging, scratch)


def _kernel_problem() -> str | None:
    try:
        load_kernel()
    except (ToolkitError, OSError, RuntimeError) as error:
        return first_line(error)
    return None
