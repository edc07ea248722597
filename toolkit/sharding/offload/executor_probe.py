"""Chooses the executor: the requested one, or the fastest on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from toolkit import ranks
from toolkit.errors import BadInputError, ToolkitError, first_line
from toolkit.sharding.offload.executors import (
    CpuFused,
    CpuTorch,
    DeviceStream,
    Executor,
    Staging,
    UnitStep,
    stream_bytes,
)
from toolkit.sharding.offload.kernel import load_kernel
from toolkit.sharding.offload.offloaded_units import OffloadedUnit, Slot
from toolkit.sharding.offload.settings import ExecutorName, fused_kernel_refuses, hyper_parameters, state_names

PROBE_NUMEL = 4 * 2**20
PROBE_SECONDS = 0.5
"""The longest time for which one executor is measured."""

STREAM_SHARE = 1 / 8
"""The share of the device's memory that `device_stream` may take for `auto` to consider it."""


def default_threads(device: torch.device) -> int:
    """Returns the threads of the step: this rank's share of the cores, minus two for the main thread and the data.

    On CPU ranks the forward uses the whole share, so the step gets half of it.
    """
    cores = ranks.cores_of_this_rank()
    return max(1, cores // 2 if device.type == "cpu" else cores - 2)


def choose(
    asked: ExecutorName, optimizer: torch.optim.Optimizer, device: torch.device, threads: int, longest: int = 0
) -> tuple[str, str]:
    """Returns the executor and the reason for the choice, the same on every rank. Collective.

    Args:
        asked: the requested executor, or `auto`.
        optimizer: the optimizer whose step it takes.
        device: the device of the shards.
        threads: the threads of the step on the host.
        longest: the number of elements of the longest unit, which decides how much device memory `device_stream` needs.

    Raises:
        BadInputError: if the requested executor is not available.
    """
    problem = fused_kernel_refuses(optimizer)
    if problem is None and asked in ("auto", "cpu_fused"):
        # The kernel counts only if every rank has it: hosts may differ in compilers, but must not differ in executors.
        problem = next((found for found in ranks.gather_objects(_kernel_problem()) if found is not None), None)
    if asked == "cpu_fused" and problem is not None:
        raise BadInputError(f"offload executor cpu_fused: {problem}; use cpu_torch or auto")
    if asked != "auto":
        return asked, "as asked"
    candidates = ["cpu_torch"] if problem is not None else ["cpu_torch", "cpu_fused"]
    if device.type != "cpu" and all(ranks.gather_objects(_fits_on_device(device, stream_bytes(longest)))):
        candidates.append("device_stream")
    if len(candidates) == 1:
        return candidates[0], f"cpu_fused: {problem}"
    rates = _measure_rates(candidates, optimizer, device, threads)
    best = max(rates, key=rates.__getitem__)
    measured = ", ".join(f"{name} {rate / 1e6:.0f}M" for name, rate in rates.items())
    return best, f"parameters per second and rank: {measured}"


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


def _fits_on_device(device: torch.device, num_bytes: int) -> bool:
    """Returns whether the device can hold these bytes for the whole run in addition to the model."""
    return num_bytes <= STREAM_SHARE * int(torch.cuda.mem_get_info(device)[1])


def _kernel_problem() -> str | None:
    try:
        load_kernel()
    except (ToolkitError, OSError, RuntimeError) as error:
        return first_line(error)
    return None


def _measure_rates(
    candidates: Sequence[str], optimizer: torch.optim.Optimizer, device: torch.device, threads: int
) -> dict[str, float]:
    """Measures parameters per second of the slowest rank. All ranks measure at once, as they will step at once."""

    def measure() -> dict[str, float]:
        before = torch.get_num_threads()
        # As the worker will do; this is the main thread, which gets its own number back.
        torch.set_num_threads(threads)
        try:
            return {name: _measure_rate(name, optimizer, device, threads) for name in candidates}
        finally:
            torch.set_num_threads(before)

    everyone = ranks.on_every_rank(measure, "measure the executors of offload")
    return {name: min(rates[name] for rates in everyone) for name in candidates}


@torch.no_grad()
def _measure_rate(name: str, optimizer: torch.optim.Optimizer, device: torch.device, threads: int) -> float:
    unit = _probe_unit(state_names(optimizer))
    pin = device.type == "cuda"
    # As in `OffloadedState`: state is pinned only if it is streamed.
    if pin and name == "device_stream":
        unit.master = unit.master.pin_memory()
        unit.moments = {key: moment.pin_memory() for key, moment in unit.moments.items()}
    weights = torch.empty(unit.numel, dtype=torch.bfloat16, pin_memory=pin)
    if name == "device_stream":
        unit.slots[0].step = unit.slots[0].step.to(device)
    executor = make_executor(name, optimizer, [unit], Staging([weights], device), None, device, threads)
    gradient = torch.full((unit.numel,), 1e-3, pin_memory=pin)
    # A scale other than 1: clipping is an extra pass over memory in some executors and free in others.
    step = UnitStep(unit, gradient, frozenset(range(len(unit.slots))), hyper_parameters(optimizer), 0.5)
    target = torch.empty(unit.numel, dtype=torch.bfloat16, device=device)
    best, until = float("inf"), time.perf_counter() + PROBE_SECONDS
    while time.perf_counter() < until:
        best = min(best, _time_once(lambda: _step_and_copy(executor, step, target), device))
    return unit.numel / best


def _step_and_copy(executor: Executor, step: UnitStep, target: torch.Tensor) -> None:
    for begin, weights in executor.step(step):
        target[begin : begin + weights.numel()].copy_(weights, non_blocking=True)


def _time_once(run: Callable[[], Any], device: torch.device) -> float:
    started = time.perf_counter()
    run()
    # Work on a device has only been queued so far.
    getattr(torch, device.type).synchronize()
    return time.perf_counter() - started


def _probe_unit(names: Sequence[str]) -> OffloadedUnit:
    parameter: Any = torch.empty(0, dtype=torch.bfloat16)
    slot = Slot("probe", parameter, 0, torch.Size((PROBE_NUMEL,)), group=0)
    unit = OffloadedUnit("probe", [], [slot], PROBE_NUMEL)
    unit.master = torch.zeros(PROBE_NUMEL)
    unit.moments = {name: torch.zeros(PROBE_NUMEL) for name in names}
    return unit
