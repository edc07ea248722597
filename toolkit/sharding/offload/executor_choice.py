"""Chooses the executor: the requested one, or our own kernel where it can be built."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from toolkit import ranks
from toolkit.errors import BadInputError, ToolkitError, first_line
from toolkit.sharding.offload.executors import CpuFused, CpuTorch, DeviceStream, Executor, Staging
from toolkit.sharding.offload.kernel import load_kernel
from toolkit.sharding.offload.offloaded_units import OffloadedUnit
from toolkit.sharding.offload.settings import ExecutorName, fused_kernel_refuses


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
