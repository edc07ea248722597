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
"""Measured. GPUs multiply float16 as fast as bfloat16; on CPUs it is slow, and nobody trains in it."""

REACHED: dict[str, tuple[Efficiency, Efficiency, Efficiency]] = {
    "cuda": ((0.65, 0.95, 1.10), (0.75, 0.92, 1.05), (0.70, 1.0, 1.10)),
    "cpu": ((0.50, 0.85, 1.10), (0.50, 0.80, 1.20), (0.40, 0.80, 1.10)),
}
"""Share of what large products, copies and collectives were measured to reach that a training step reaches,
for `matmul_efficiency`, `memory_efficiency` and `transfer_efficiency`."""

MATMUL_SIDE = {"cuda": 8192, "cpu": 512}
"""Of the square product that is timed."""

COPY_BYTES = {"cuda": 2**30, "cpu": 2**27}
"""More than any cache."""


def calibrate(seconds: float = 20.0, *, ranks: int = 1) -> Hardware:
    """Measures this machine and stores the profile for `hardware_of("calibrated")`.

    Args:
        seconds: about how long to measure; starting ranks, to time their collectives, takes some seconds more.
        ranks: on a machine without a GPU, the ranks that will share its cores; a device is the cores of one.

    Raises:
        BadInputError: `ranks` that are more than the cores.
    """
    cores = usable_cores()
    if not 1 <= ranks <= cores:
        raise BadInputError(f"--gpus: {ranks}; allowed: 1 to {cores}, the cores of this machine")
    has_gpu = torch.cuda.is_available()
    each = seconds / 10
    hardware = _gpu(each) if has_gpu else _cpu(each, ranks, cores)
    save_profile(hardware)
    return hardware


def _gpu(each: float) -> Hardware:
    device = torch.device("cuda")
    name, count = torch.cuda.get_device_name(), torch.cuda.device_count()
    known = _as_reached(preset_of_device(name) or presets()["h100_sxm"])
    # One GPU has nobody to gather from: the data sheet's figure stays.
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


def _cpu(each: float, ranks: int, cores: int) -> Hardware:
    """One rank's threads compute at a time; of memory's bandwidth, each rank has its share."""
    device = torch.device("cpu")
    known = _as_reached(presets()["cpu"])
    copies = _copy_rate(torch.empty(COPY_BYTES["cpu"], dtype=torch.uint8), None, each)
    adam = _adam_rate(each)
    link = _all_gather_rate("cpu", max(2, ranks)) if cores > 1 else known.link_bandwidth
    before = torch.get_num_threads()
    # As the launcher gives each rank its share of the cores.
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


def _as_reached(preset: Hardware) -> Hardware:
    """A preset whose bandwidths between devices and nodes are what is reached of them, as a profile's are."""
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


def _best(run: Callable[[], object], seconds: float) -> float:
    """Seconds of the fastest of the runs; others only show what else the machine does."""
    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    # The minimum, as noise on a shared machine only ever adds.
    return min(timer.blocked_autorange(min_run_time=seconds).times)


def _matmul_rate(device: torch.device, dtype: str, seconds: float) -> float:
    """FLOP/s of a square product."""
    side = MATMUL_SIDE[device.type]
    left, right = (torch.randn(side, side, device=device).to(getattr(torch, dtype)) for _ in range(2))
    return 2 * side**3 / _best(lambda: left @ right, seconds)


def _copy_rate(source: torch.Tensor, target: torch.Tensor | None, seconds: float) -> float:
    """Bytes read and written per second; between device and host, bytes that cross."""
    crossing = target is not None
    into = torch.empty_like(source) if target is None else target
    into.copy_(source)  # the first touch maps the pages
    return source.nbytes * (1 if crossing else 2) / _best(lambda: into.copy_(source), seconds)


def _host_link_rate(device: torch.device, seconds: float) -> float:
    """Of the slower direction, pinned."""
    size = COPY_BYTES["cuda"] // 4
    on_host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(size, dtype=torch.uint8, device=device)
    return min(_copy_rate(on_host, on_device, seconds / 2), _copy_rate(on_device, on_host, seconds / 2))


def _adam_rate(seconds: float, numel: int = 2**23) -> float:
    """Bytes per second of torch's fused AdamW on the host, at `ADAM_BYTES` a parameter, on all cores."""
    parameter = torch.nn.Parameter(torch.zeros(numel))
    parameter.grad = torch.full((numel,), 1e-3)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return ADAM_BYTES * numel / _best(optimizer.step, seconds)


# Collectives


def _all_gather_rate(device_type: str, ranks: int) -> float | None:
    """Bytes that a rank sends per second in an all-gather of ranks on this machine; None where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        # A file to meet at needs no free port.
        command = [sys.executable, "-m", "toolkit.planning.time.collectives", device_type, str(ranks), folder]
        processes = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)  # noqa: S603
            for rank in range(ranks)
        ]
        try:
            told = [process.communicate(timeout=60)[0] for process in processes]
        except subprocess.TimeoutExpired:
            return None
        finally:
            for process in processes:
                process.kill()
    return float(told[0]) if processes[0].returncode == 0 else None
