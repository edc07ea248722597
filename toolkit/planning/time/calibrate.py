"""Measures the machine at hand, and stores what it found as the hardware profile `calibrated`."""

from __future__ import annotations

import dataclasses
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable

import psutil
import torch
from torch.utils.benchmark import Timer

from toolkit.errors import BadInputError
from toolkit.planning.time.hardware import (
    ADAM_BYTES,
    CALIBRATED,
    Efficiency,
    Hardware,
    preset_of_device,
    presets,
    save_profile,
)
from toolkit.ranks import usable_cores

DTYPES = ("float32", "bfloat16")
"""The dtypes that are measured. GPUs multiply float16 as fast as bfloat16; CPUs do not train in it."""

REACHED: dict[str, tuple[Efficiency, Efficiency, Efficiency]] = {
    "cuda": ((0.65, 0.95, 1.10), (0.75, 0.92, 1.05), (0.70, 1.0, 1.10)),
    "cpu": ((0.50, 0.85, 1.10), (0.50, 0.80, 1.20), (0.40, 0.80, 1.10)),
}
"""Share of the measured rates of large products, copies and collectives that a training step reaches,
for `matmul_efficiency`, `memory_efficiency` and `transfer_efficiency`."""

MATMUL_SIDE = {"cuda": 8192, "cpu": 512}
"""Side of the square product that is timed."""

COPY_BYTES = {"cuda": 2**30, "cpu": 2**27}
"""Bytes of a timed copy: more than any cache."""


def calibrate(seconds: float = 20.0, *, ranks: int = 1) -> Hardware:
    """Measures this machine and stores the profile for `hardware_of("calibrated")`.

    Args:
        seconds: about how long to measure; starting ranks, to time their collectives, takes some seconds more.
        ranks: on a machine without a GPU, the ranks that will share its cores; a device is the cores of one.

    Raises:
        BadInputError: if `ranks` is more than the cores.
    """
    cores = usable_cores()
    if not 1 <= ranks <= cores:
        raise BadInputError(f"--gpus: {ranks}; allowed: 1 to {cores}, the cores of this machine")
    has_gpu = torch.cuda.is_available()
    each = seconds / 10
    hardware = _measure_gpu(each) if has_gpu else _measure_cpu(each, ranks, cores)
    save_profile(hardware)
    return hardware


def _measure_gpu(each: float) -> Hardware:
    device = torch.device("cuda")
    name, count = torch.cuda.get_device_name(), torch.cuda.device_count()
    known = _with_reached_bandwidths(preset_of_device(name) or presets()["h100_sxm"])
    # A single GPU has no other to gather from, so the data sheet's figure stays.
    link = _all_gather_rate("cuda", count) if count > 1 else None
    peak = {dtype: _matmul_rate(device, dtype, each) for dtype in DTYPES}
    return _profile(
        known,
        name=f"{CALIBRATED} {name}",
        memory_bytes=torch.cuda.mem_get_info()[1],
        # The tensor cores of every GPU since Ampere take both at the same rate.
        peak_flops=peak | {"float16": peak["bfloat16"]},
        memory_bandwidth=_copy_rate(torch.empty(COPY_BYTES["cuda"], dtype=torch.uint8, device=device), None, each),
        host_link_bandwidth=_host_link_rate(device, each),
        host_memory_bandwidth=_adam_rate(each),
        devices_per_node=count,
        **({} if link is None else {"link_bandwidth": link}),
    )


def _measure_cpu(each: float, ranks: int, cores: int) -> Hardware:
    """Measures one rank's threads at a time; each rank gets its share of the memory's bandwidth."""
    device = torch.device("cpu")
    known = _with_reached_bandwidths(presets()["cpu"])
    copies = _copy_rate(torch.empty(COPY_BYTES["cpu"], dtype=torch.uint8), None, each)
    adam = _adam_rate(each)
    link = _all_gather_rate("cpu", max(2, ranks)) if cores > 1 else known.link_bandwidth
    before = torch.get_num_threads()
    # The launcher gives each rank this share of the cores too.
    torch.set_num_threads(cores // ranks)
    try:
        peak = {dtype: _matmul_rate(device, dtype, each) for dtype in DTYPES}
    finally:
        torch.set_num_threads(before)
    return _profile(
        known,
        name=f"{CALIBRATED} {platform.processor() or platform.machine()}, {cores // ranks} of {cores} cores",
        memory_bytes=psutil.virtual_memory().total // ranks,
        peak_flops=known.peak_flops | peak,
        # All ranks draw on the same DRAM at the same time, and "PCIe" is a copy inside it.
        memory_bandwidth=copies / ranks,
        link_bandwidth=link,
        host_link_bandwidth=copies / ranks,
        host_memory_bandwidth=adam,
        devices_per_node=ranks,
    )


def _with_reached_bandwidths(preset: Hardware) -> Hardware:
    """Returns a preset whose bandwidths between devices and nodes are the reached ones, as in a profile."""
    share = preset.transfer_efficiency[1]
    return dataclasses.replace(
        preset,
        link_bandwidth=preset.link_bandwidth * share,
        network_bandwidth=preset.network_bandwidth * share,
    )


def _profile(known: Hardware, **measured: object) -> Hardware:
    matmul, memory, transfer = REACHED[known.device_type]
    return dataclasses.replace(
        known,
        host_memory_bytes=psutil.virtual_memory().total,
        matmul_efficiency=matmul,
        memory_efficiency=memory,
        transfer_efficiency=transfer,
        **measured,  # type: ignore[arg-type]
    )


# Measurements


def _fastest_run(run: Callable[[], object], seconds: float) -> float:
    """Returns the seconds of the fastest run."""
    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    # The minimum, because noise on a shared machine only ever adds time.
    return min(timer.blocked_autorange(min_run_time=seconds).times)


def _matmul_rate(device: torch.device, dtype: str, seconds: float) -> float:
    """Returns the FLOP/s of a square product."""
    side = MATMUL_SIDE[device.type]
    left, right = (torch.randn(side, side, device=device).to(getattr(torch, dtype)) for _ in range(2))
    return 2 * side**3 / _fastest_run(lambda: left @ right, seconds)


def _copy_rate(source: torch.Tensor, target: torch.Tensor | None, seconds: float) -> float:
    """Returns bytes read and written per second; between device and host, the bytes that cross."""
    crossing = target is not None
    into = torch.empty_like(source) if target is None else target
    into.copy_(source)  # the first touch maps the pages
    return source.nbytes * (1 if crossing else 2) / _fastest_run(lambda: into.copy_(source), seconds)


def _host_link_rate(device: torch.device, seconds: float) -> float:
    """Returns the bytes per second of the slower direction, with pinned memory."""
    size = COPY_BYTES["cuda"] // 4
    on_host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(size, dtype=torch.uint8, device=device)
    return min(_copy_rate(on_host, on_device, seconds / 2), _copy_rate(on_device, on_host, seconds / 2))


def _adam_rate(seconds: float, numel: int = 2**23) -> float:
    """Returns the bytes per second of torch's fused AdamW on all host cores, at `ADAM_BYTES` per parameter."""
    parameter = torch.nn.Parameter(torch.zeros(numel))
    parameter.grad = torch.full((numel,), 1e-3)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return ADAM_BYTES * numel / _fastest_run(optimizer.step, seconds)


# Collectives


def _all_gather_rate(device_type: str, ranks: int) -> float | None:
    """Returns the bytes that a rank sends per second in an all-gather on this machine, or None if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        # A rendezvous by file needs no free port.
        command = [sys.executable, "-m", "toolkit.planning.time.collectives", device_type, str(ranks), folder]
        processes = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)  # noqa: S603
            for rank in range(ranks)
        ]
        try:
            printed = [process.communicate(timeout=60)[0] for process in processes]
        except subprocess.TimeoutExpired:
            return None
        finally:
            for process in processes:
                process.kill()
    return float(printed[0]) if processes[0].returncode == 0 else None
