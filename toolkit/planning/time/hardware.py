"""The speed and memory of devices and nodes: presets from data sheets (hardware.yaml), overrides, measured profiles.

All figures are in bytes, seconds and FLOP/s; GB are 1e9 bytes and GiB 2**30. Importing this needs no torch.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from toolkit.errors import BadInputError, did_you_mean
from toolkit.paths import GIB, atomic_write, user_cache

GB = 1e9

ADAM_BYTES = 28
"""Memory traffic of fused AdamW per parameter: reads p, g, m, v and writes p, m, v in float32."""

Quantile = Literal["low", "mid", "high"]
"""Quantile of a time: `low` is the optimistic time, `high` the pessimistic one."""

Efficiency = tuple[float, float, float]
"""Share of a nominal figure that is reached in practice: low, mid, high."""

CALIBRATED = "calibrated"
"""The name of the profile that `calibrate` stores for this machine."""

DATA = Path(__file__).with_suffix(".yaml")

MOST = 1e12
"""GiB, GB/s or devices: far beyond what there is, and no byte of it is beyond a float's numbers."""


@dataclass(frozen=True)
class Hardware:
    """One device and its node.

    Attributes:
        memory_bytes: memory of the device.
        peak_flops: dense FLOP/s by `float32`, `bfloat16` and `float16`.
        memory_bandwidth: bandwidth of the device's memory (B/s).
        link_bandwidth: bandwidth to the other devices of the node, NVLink or PCIe (B/s per device and direction).
        network_bandwidth: bandwidth between nodes (B/s per node and direction).
        host_link_bandwidth: bandwidth between device and host, PCIe (B/s per device and direction).
        host_memory_bandwidth: bandwidth of DRAM (B/s per node).
        host_memory_bytes: DRAM per node, or None if it is not known.
        matmul_efficiency: share of `peak_flops` that matrix products reach.
        memory_efficiency: share of `memory_bandwidth` that kernels reach.
        transfer_efficiency: share of the other bandwidths that collectives, copies and the host's step reach.
        kernel_seconds: the shortest time of a kernel, its launch.
        device_type: `cuda`, or `cpu` if the device is the cores of one rank.
    """

    name: str
    memory_bytes: int
    peak_flops: dict[str, float] = field(hash=False)
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    host_link_bandwidth: float
    host_memory_bandwidth: float
    host_memory_bytes: int | None
    devices_per_node: int
    matmul_efficiency: Efficiency
    memory_efficiency: Efficiency
    transfer_efficiency: Efficiency
    kernel_seconds: float
    device_type: Literal["cuda", "cpu"]

    def flops(self, dtype: str, quantile: Quantile) -> float:
        """Returns the FLOP/s of matrix products for a time of this quantile."""
        return self.peak_flops[dtype] * _share_reached(self.matmul_efficiency, quantile)

    def memory(self, quantile: Quantile) -> float:
        """Returns the bytes per second of the device's memory for a time of this quantile."""
        return self.memory_bandwidth * _share_reached(self.memory_efficiency, quantile)

    def transfer(self, bandwidth: float, quantile: Quantile) -> float:
        """Returns the reached share of one of the other bandwidths, for a time of this quantile."""
        return bandwidth * _share_reached(self.transfer_efficiency, quantile)


def _share_reached(efficiency: Efficiency, quantile: Quantile) -> float:
    # A high efficiency gives a low time.
    low, mid, high = efficiency
    return {"low": high, "mid": mid, "high": low}[quantile]


def hardware_of(
    name: str,
    *,
    device_memory_gib: float | None = None,
    gpus_per_node: int | None = None,
    host_memory_gib: float | None = None,
    link_gbs: float | None = None,
    nic_gbs: float | None = None,
    pcie_gbs: float | None = None,
    dram_gbs: float | None = None,
) -> Hardware:
    """Returns a preset or a stored profile, with the figures that the caller overrides.

    Args:
        name: the name of a preset, `calibrated`, or the path of a profile.
        device_memory_gib: memory of one device (GiB).
        gpus_per_node: devices of one node.
        host_memory_gib: DRAM of one node (GiB).
        link_gbs: bandwidth between the devices of a node (GB/s per device and direction).
        nic_gbs: bandwidth between nodes (GB/s per node and direction).
        pcie_gbs: bandwidth between device and host (GB/s per device and direction).
        dram_gbs: bandwidth of DRAM (GB/s per node).

    Raises:
        BadInputError: if the name is unknown, a profile cannot be read, or a value is not above 0.
    """
    given = {
        "device_memory_gib": ("memory_bytes", device_memory_gib, GIB),
        "gpus_per_node": ("devices_per_node", gpus_per_node, 1),
        "host_memory_gib": ("host_memory_bytes", host_memory_gib, GIB),
        "link_gbs": ("link_bandwidth", link_gbs, GB),
        "nic_gbs": ("network_bandwidth", nic_gbs, GB),
        "pcie_gbs": ("host_link_bandwidth", pcie_gbs, GB),
        "dram_gbs": ("host_memory_bandwidth", dram_gbs, GB),
    }
    changes: dict[str, Any] = {}
    for option, (attribute, value, unit) in given.items():
        if value is None:
            continue
        if not 0 < value <= MOST:
            raise BadInputError(f"{option}: {value}; allowed: a number above 0, and at most {MOST:g}")
        # GiB and counts are whole, GB/s are not.
        changes[attribute] = int(value * unit) if isinstance(unit, int) else value * unit
    return dataclasses.replace(_hardware_by_name(name), **changes)


def _hardware_by_name(name: str) -> Hardware:
    if name in presets():
        return presets()[name]
    if name == CALIBRATED:
        return load_profile()
    path = Path(name).expanduser()
    if path.suffix == ".json" or path.is_file():
        return load_profile(path)
    names = [*presets(), CALIBRATED]
    raise BadInputError(
        f"hardware: unknown {name!r}{_suggestion(name.lower(), names)}; allowed: {', '.join(names)}, or the path of a "
        "profile (.json) that calibration has written"
    )


def _suggestion(name: str, names: list[str]) -> str:
    """Suggests the first name with the same beginning: `h100_sxm` for h1000, as a close number is another device."""
    alike = [known for known in names if len(name) > 3 and known.startswith(name[:4])]
    return f" (did you mean {alike[0]!r}?)" if alike else did_you_mean(name, names)


# Presets


@cache
def presets() -> Mapping[str, Hardware]:
    """Returns all presets by name."""
    data = _presets_file()
    return {name: _preset(name, values, data["efficiencies"]) for name, values in data["presets"].items()}


@cache
def _presets_file() -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load(DATA.read_text(encoding="utf-8"))
    return data


def _preset(name: str, values: dict[str, Any], efficiencies: dict[str, Any]) -> Hardware:
    device_type = values.get("device_type", "cuda")
    reached = efficiencies[device_type]
    host_gib = values.get("host_memory_gib")
    return Hardware(
        name=name,
        memory_bytes=int(values["memory_gib"] * GIB),
        peak_flops={dtype: tflops * 1e12 for dtype, tflops in values["tflops"].items()},
        memory_bandwidth=values["memory_gbs"] * GB,
        link_bandwidth=values["link_gbs"] * GB,
        network_bandwidth=values["network_gbs"] * GB,
        host_link_bandwidth=values["host_link_gbs"] * GB,
        host_memory_bandwidth=values["host_memory_gbs"] * GB,
        host_memory_bytes=None if host_gib is None else int(host_gib * GIB),
        devices_per_node=values["devices_per_node"],
        matmul_efficiency=tuple(reached["matmul"]),
        memory_efficiency=tuple(reached["memory"]),
        transfer_efficiency=tuple(reached["transfer"]),
        kernel_seconds=reached["kernel_seconds"],
        device_type=device_type,
    )


def preset_of_device(device_name: str) -> Hardware | None:
    """Returns the preset of a device by its name from `torch.cuda.get_device_name`, or None if there is none."""
    for name, values in _presets_file()["presets"].items():
        # In the order of the file: A100-SXM4-40GB stands before A100, which is part of its name.
        # Whole words at their end: an L40 is not an L4.
        if any(re.search(rf"{re.escape(part)}(?!\w)", device_name) for part in values["device_names"]):
            return presets()[name]
    return None


def peak_flops_of(device_name: str, mixed_precision: str) -> float | None:
    """Returns the dense 16-bit peak of a device (FLOP/s), or None if it is unknown or compute is not in 16 bits."""
    preset = preset_of_device(device_name)
    # In float32 GPUs multiply on other units, or in TF32 if enabled: no figure of the data sheet is the bound.
    if preset is None or mixed_precision == "no":
        return None
    return preset.peak_flops["float16" if mixed_precision == "fp16" else "bfloat16"]


# Profiles


def profile_path() -> Path:
    """Returns the path of this machine's profile."""
    return user_cache() / "hardware.json"


def save_profile(hardware: Hardware, path: Path | None = None) -> Path:
    """Writes a profile atomically, and returns its path."""
    path = path or profile_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, json.dumps(dataclasses.asdict(hardware), indent=2) + "\n")
    return path


def load_profile(path: Path | None = None) -> Hardware:
    """Reads a profile that `save_profile` wrote, by default the one of this machine.

    Raises:
        BadInputError: if there is no such file, or it is not a profile.
    """
    path = path or profile_path()
    if not path.is_file():
        raise BadInputError(f"hardware: no profile at {path}; calibrate this machine first, or name a preset")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BadInputError(f"hardware: {path} is not JSON: {error}; calibrate this machine again") from error
    problem = _profile_problem(values)
    if problem is not None:
        raise BadInputError(f"hardware: {path}: {problem}; calibrate this machine again")
    settled: dict[str, Any] = {k: tuple(v) if k.endswith("_efficiency") else v for k, v in values.items()}
    return Hardware(**settled)


def _profile_problem(values: Any) -> str | None:
    names = {entry.name for entry in dataclasses.fields(Hardware)}
    if not isinstance(values, dict) or set(values) != names:
        found = sorted(set(values) ^ names) if isinstance(values, dict) else type(values).__name__
        return f"not a profile of this version ({found} missing or unknown)"
    texts = {"name", "device_type"}
    if not all(isinstance(values[key], str) for key in texts) or values["device_type"] not in ("cuda", "cpu"):
        return "name must be text, and device_type cuda or cpu"
    if not isinstance(values["peak_flops"], dict) or set(values["peak_flops"]) != {"float32", "bfloat16", "float16"}:
        return "peak_flops must have float32, bfloat16 and float16"
    for key in names - texts:
        value = values[key]
        numbers = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else [value]
        if key.endswith("_efficiency") and len(numbers) != 3:
            return f"{key} must have three numbers"
        if key == "host_memory_bytes" and value is None:
            continue
        if not all(isinstance(n, int | float) and not isinstance(n, bool) and n > 0 for n in numbers):
            return f"{key} is {value!r}; allowed: numbers above 0"
    return None
