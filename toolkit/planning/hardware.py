"""The memory and the peak rates of devices: presets from data sheets (hardware.yaml), with figures that users replace.

Importing this needs no torch.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from toolkit.errors import BadInputError, did_you_mean
from toolkit.paths import GIB

DATA = Path(__file__).with_suffix(".yaml")

MOST = 1e12
"""GiB or devices: far beyond what there is, and no byte of it is beyond a float's numbers."""


@dataclass(frozen=True)
class Hardware:
    """One device and its node.

    Attributes:
        memory_bytes: memory of the device.
        peak_flops: dense FLOP/s by `bfloat16` and `float16`.
        host_memory_bytes: DRAM per node, or None if it is not known.
        device_type: `cuda`, or `cpu` if the device is the cores of one rank.
    """

    name: str
    memory_bytes: int
    peak_flops: dict[str, float] = field(hash=False)
    host_memory_bytes: int | None
    devices_per_node: int
    device_type: Literal["cuda", "cpu"]


def hardware_of(
    name: str,
    *,
    device_memory_gib: float | None = None,
    gpus_per_node: int | None = None,
    host_memory_gib: float | None = None,
) -> Hardware:
    """Returns a preset, with the figures that the caller replaces.

    Args:
        name: the name of a preset.
        device_memory_gib: memory of one device (GiB).
        gpus_per_node: devices of one node.
        host_memory_gib: DRAM of one node (GiB).

    Raises:
        BadInputError: if the name is unknown, or a value is not above 0.
    """
    if name not in presets():
        raise BadInputError(
            f"hardware: unknown {name!r}{_suggestion(name.lower(), [*presets()])}; allowed: {', '.join(presets())}"
        )
    given = {
        "device_memory_gib": ("memory_bytes", device_memory_gib, GIB),
        "gpus_per_node": ("devices_per_node", gpus_per_node, 1),
        "host_memory_gib": ("host_memory_bytes", host_memory_gib, GIB),
    }
    changes: dict[str, Any] = {}
    for option, (attribute, value, unit) in given.items():
        if value is None:
            continue
        if not 0 < value <= MOST:
            raise BadInputError(f"{option}: {value}; allowed: a number above 0, and at most {MOST:g}")
        changes[attribute] = int(value * unit)
    return dataclasses.replace(presets()[name], **changes)


def _suggestion(name: str, names: list[str]) -> str:
    """Suggests the first name with the same beginning: `h100_sxm` for h1000, since a similar number names another."""
    alike = [known for known in names if len(name) > 3 and known.startswith(name[:4])]
    return f" (did you mean {alike[0]!r}?)" if alike else did_you_mean(name, names)


@cache
def presets() -> Mapping[str, Hardware]:
    """Returns all presets by name."""
    return {name: _preset(name, values) for name, values in _presets_file().items()}


@cache
def _presets_file() -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load(DATA.read_text(encoding="utf-8"))["presets"]
    return data


def _preset(name: str, values: dict[str, Any]) -> Hardware:
    host_gib = values.get("host_memory_gib")
    return Hardware(
        name=name,
        memory_bytes=int(values["memory_gib"] * GIB),
        peak_flops={dtype: tflops * 1e12 for dtype, tflops in values["tflops"].items()},
        host_memory_bytes=None if host_gib is None else int(host_gib * GIB),
        devices_per_node=values["devices_per_node"],
        device_type=values.get("device_type", "cuda"),
    )


def preset_of_device(device_name: str) -> Hardware | None:
    """Returns the preset of a device by its name from `torch.cuda.get_device_name`, or None if there is none."""
    for name, values in _presets_file().items():
        # In the order of the file: A100-SXM4-40GB is before A100, which is part of its name.
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
