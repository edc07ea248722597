"""What devices and nodes can do: presets from data sheets (hardware.yaml), overrides, measured profiles.

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
"""Of a time: `low` is the shortest that is likely, `high` the longest."""

Efficiency = tuple[float, float, float]
"""Share of a nominal figure that is reached: low, mid, high."""

CALIBRATED = "calibrated"
"""The name of the profile that `calibrate` stores for this machine."""

DATA = Path(__file__).with_suffix(".yaml")

MOST = 1e12
"""GiB, GB/s or devices: far beyond what there is, and no byte of it is beyond a float's numbers."""


@dataclass(frozen=True)
class Hardware:
    """One device, and the node that it stands in.

    Attributes:
        memory_bytes: of the device.
        peak_flops: dense FLOP/s by `float32`, `bfloat16` and `float16`.
        memory_bandwidth: of the device's memory (B/s).
        link_bandwidth: to the other devices of the node, NVLink or PCIe (B/s per device and direction).
        network_bandwidth: between nodes (B/s per node and direction).
        host_link_bandwidth: between device and host, PCIe (B/s per device and direction).
        host_memory_bandwidth: DRAM (B/s per node).
        host_memory_bytes: DRAM per node; None: not known.
        matmul_efficiency: share of `peak_flops` that matrix products reach.
        memory_efficiency: share of `memory_bandwidth` that kernels reach.
        transfer_efficiency: share of the other bandwidths that collectives, copies and the host's step reach.
        kernel_seconds: the least that a kernel takes, its launch.
        device_type: `cuda`, or `cpu`: the device is then the cores of one rank.
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
        """FLOP/s of matrix products that give a time of this quantile."""
        return self.peak_flops[dtype] * _reached(self.matmul_efficiency, quantile)

    def memory(self, quantile: Quantile) -> float:
        """Bytes per second of the device's memory that give a time of this quantile."""
        return self.memory_bandwidth * _reached(self.memory_efficiency, quantile)

    def transfer(self, bandwidth: float, quantile: Quantile) -> float:
        """What is reached of one of the other bandwidths."""
        return bandwidth * _reached(self.transfer_efficiency, quantile)


def _reached(efficiency: Efficiency, quantile: Quantile) -> float:
    # A low time is what a high efficiency gives.
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
    """A preset, or a stored profile, with what is known better.

    Args:
        name: of a preset; `calibrated`; or the path of a profile.
        device_memory_gib: memory of one device (GiB).
        gpus_per_node: devices of one node.
        host_memory_gib: DRAM of one node (GiB).
        link_gbs: between the devices of a node (GB/s per device and direction).
        nic_gbs: between nodes (GB/s per node and direction).
        pcie_gbs: between device and host (GB/s per device and direction).
        dram_gbs: DRAM (GB/s per node).

    Raises:
        BadInputError: an unknown name, a profile that cannot be read, a value that is not above 0.
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
    return dataclasses.replace(_named(name), **changes)


def _named(name: str) -> Hardware:
    if name in presets():
        return presets()[name]
    if name == CALIBRATED:
        return load_profile()
    path = Path(name).expanduser()
    if path.suffix == ".json" or path.is_file():
        return load_profile(path)
    names = [*presets(), CALIBRATED]
    raise BadInputError(
        f"hardware: unknown {name!r}{_closest(name.lower(), names)}; allowed: {', '.join(names)}, or the path of a "
        "profile (.json) that calibration has written"
    )


def _closest(name: str, names: list[str]) -> str:
    """Of names that begin alike the first, as `h100_sxm` for h1000: a number that is near is another device."""
    alike = [known for known in names if len(name) > 3 and known.startswith(name[:4])]
    told = f"; did you mean {alike[0]!r}?" if alike else did_you_mean(name, names)
    return told and f" ({told.removeprefix('; ')})"


# Presets


@cache
def presets() -> Mapping[str, Hardware]:
    """All presets by name."""
    data = _data()
    return {name: _preset(name, values, data["efficiencies"]) for name, values in data["presets"].items()}


@cache
def _data() -> dict[str, Any]:
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
    """The preset of a device by the name that `torch.cuda.get_device_name` gives; None: there is none."""
    for name, values in _data()["presets"].items():
        # In the order of the file: A100-SXM4-40GB stands before A100, which is part of its name.
        # Whole words at their end: an L40 is no L4.
        if any(re.search(rf"{re.escape(part)}(?!\w)", device_name) for part in values["device_names"]):
            return presets()[name]
    return None


def peak_flops_of(device_name: str, mixed_precision: str) -> float | None:
    """The dense 16-bit peak of a device (FLOP/s); None where unknown or where compute is not in 16 bits."""
    preset = preset_of_device(device_name)
    # In float32 GPUs multiply on other units, or in TF32 if asked: no figure of the data sheet is the bound.
    if preset is None or mixed_precision == "no":
        return None
    return preset.peak_flops["float16" if mixed_precision == "fp16" else "bfloat16"]


# Profiles


def profile_path() -> Path:
    """Where the profile of this machine is stored."""
    return user_cache() / "hardware.json"


def save_profile(hardware: Hardware, path: Path | None = None) -> Path:
    """Writes a profile whole or not at all; where it is."""
    path = path or profile_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, json.dumps(dataclasses.asdict(hardware), indent=2) + "\n")
    return path


def load_profile(path: Path | None = None) -> Hardware:
    """A profile that `save_profile` has written; the one of this machine where no path is given.

    Raises:
        BadInputError: no such file, or not a profile.
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
