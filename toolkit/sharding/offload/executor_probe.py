"""Which executor: the one that is asked for, or the fastest here."""

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
"""Most that one executor is measured for."""

STREAM_SHARE = 1 / 8
"""Of the device's memory, that `auto` lets `device_stream` take."""


def default_threads(device: torch.device) -> int:
    """Threads of the step: this rank's share of the cores, less two for the main thread and the data.

    On CPU ranks, whose forward takes all of the share, half of it.
    """
    cores = ranks.cores_of_this_rank()
    return max(1, cores // 2 if device.type == "cpu" else cores - 2)


def choose(
    asked: ExecutorName, optimizer: torch.optim.Optimizer, device: torch.device, threads: int, longest: int = 0
) -> tuple[str, str]:
    """The executor and why it was chosen; the same on every rank. Collective.

    Args:
        longest: elements of the longest unit, by which `device_stream` takes memory on the device.

    Raises:
        BadInputError: an executor that was asked for and cannot be had.
    """
    problem = fused_kernel_refuses(optimizer)
    if problem is None and asked in ("auto", "cpu_fused"):
        # The kernel counts only where every rank has it: hosts may differ in their compilers, but not in executors.
        problem = next((found for found in ranks.gather_objects(_kernel_problem()) if found is not None), None)
    if asked == "cpu_fused" and problem is not None:
        raise BadInputError(f"offload executor cpu_fused: {problem}; use cpu_torch or auto")
    if asked != "auto":
        return asked, "as asked"
    candidates = ["cpu_torch"] if problem is not None else ["cpu_torch", "cpu_fused"]
    if device.type != "cpu" and all(ranks.gather_objects(_has_room(device, stream_bytes(longest)))):
        candidates.append("device_stream")
    if len(candidates) == 1:
        return candidates[0], f"cpu_fused: {problem}"
    rates = _measured(candidates, optimizer, device, threads)
    best = max(rates, key=rates.__getitem__)
    told = ", ".join(f"{name} {rate / 1e6:.0f}M" for name, rate in rates.items())
    return best, f"parameters per second and rank: {told}"


def make_executor(
    name: str,
    optimizer: torch.optim.Optimizer,
    units: Sequence[OffloadedUnit],
    staging: Staging,
    scratch: torch.Tensor | None,
    device: torch.device,
    threads: int,
) -> Executor:
    """The executor of units whose state lies on the host."""
    if name == "device_stream":
        return DeviceStream(optimizer, units, device)
    if name == "cpu_fused":
        return CpuFused(load_kernel(), staging, threads)
    return CpuTorch(optimizer, units, staging, scratch)


def _has_room(device: torch.device, num_bytes: int) -> bool:
    """Whether buffers may stand on the device for the whole run, beside what offload is there to make room for."""
    return num_bytes <= STREAM_SHARE * int(torch.cuda.mem_get_info(device)[1])


def _kernel_problem() -> str | None:
    try:
        load_kernel()
    except (ToolkitError, OSError, RuntimeError) as error:
        return first_line(error)
    return None


def _measured(
    candidates: Sequence[str], optimizer: torch.optim.Optimizer, device: torch.device, threads: int
) -> dict[str, float]:
    """Parameters per second of the slowest rank, all ranks measuring together as they will step together."""

    def measure() -> dict[str, float]:
        before = torch.get_num_threads()
        # As the worker will do; this is the main thread, which gets its own number back.
        torch.set_num_threads(threads)
        try:
            return {name: _rate(name, optimizer, device, threads) for name in candidates}
        finally:
            torch.set_num_threads(before)

    everyone = ranks.on_every_rank(measure, "measure the executors of offload")
    return {name: min(rates[name] for rates in everyone) for name in candidates}


@torch.no_grad()
def _rate(name: str, optimizer: torch.optim.Optimizer, device: torch.device, threads: int) -> float:
    unit = _sample(state_names(optimizer))
    pin = device.type == "cuda"
    # As `OffloadedState` has it: state is pinned only where it streams.
    if pin and name == "device_stream":
        unit.master = unit.master.pin_memory()
        unit.moments = {key: moment.pin_memory() for key, moment in unit.moments.items()}
    weights = torch.empty(unit.numel, dtype=torch.bfloat16, pin_memory=pin)
    if name == "device_stream":
        unit.slots[0].step = unit.slots[0].step.to(device)
    executor = make_executor(name, optimizer, [unit], Staging([weights], device), None, device, threads)
    gradient = torch.full((unit.numel,), 1e-3, pin_memory=pin)
    # A scale other than 1: clipping is a pass over memory of its own in some executors and free in others.
    step = UnitStep(unit, gradient, frozenset(range(len(unit.slots))), hyper_parameters(optimizer), 0.5)
    target = torch.empty(unit.numel, dtype=torch.bfloat16, device=device)
    best, until = float("inf"), time.perf_counter() + PROBE_SECONDS
    while time.perf_counter() < until:
        best = min(best, _seconds(lambda: _step(executor, step, target), device))
    return unit.numel / best


def _step(executor: Executor, step: UnitStep, target: torch.Tensor) -> None:
    for begin, weights in executor.step(step):
        target[begin : begin + weights.numel()].copy_(weights, non_blocking=True)


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    started = time.perf_counter()
    run()
    # Work on a device has only been queued so far.
    getattr(torch, device.type).synchronize()
    return time.perf_counter() - started


def _sample(names: Sequence[str]) -> OffloadedUnit:
    parameter: Any = torch.empty(0, dtype=torch.bfloat16)
    slot = Slot("probe", parameter, 0, torch.Size((PROBE_NUMEL,)), group=0)
    unit = OffloadedUnit("probe", [], [slot], PROBE_NUMEL)
    unit.master = torch.zeros(PROBE_NUMEL)
    unit.moments = {name: torch.zeros(PROBE_NUMEL) for name in names}
    return unit
