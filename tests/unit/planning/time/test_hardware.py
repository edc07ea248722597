"""Hardware: data-sheet presets, overrides, profiles; every wrong value is told."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import BadInputError
from toolkit.planning.time.hardware import (
    hardware_of,
    load_profile,
    peak_flops_of,
    preset_of_device,
    presets,
    profile_path,
    save_profile,
)

OPTIONS = ("device_memory_gib", "gpus_per_node", "host_memory_gib", "link_gbs", "nic_gbs", "pcie_gbs", "dram_gbs")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_presets_hold_the_data_sheets_figures() -> None:
    h100 = hardware_of("h100_sxm")
    assert h100.peak_flops == {"float32": 67e12, "bfloat16": 989e12, "float16": 989e12}
    assert (h100.memory_bandwidth, h100.link_bandwidth, h100.host_link_bandwidth) == (3.35e12, 450e9, 64e9)
    assert h100.memory_bytes == pytest.approx(79.1 * 2**30, rel=1e-6)
    assert {"h100_sxm", "h200_sxm", "a100_40", "a100_80", "l40s", "rtx4090", "rtx5090", "cpu"} <= set(presets())


def test_every_preset_is_whole_and_in_order() -> None:
    for name in presets():
        hardware = hardware_of(name)
        for low, mid, high in (hardware.matmul_efficiency, hardware.memory_efficiency, hardware.transfer_efficiency):
            assert 0 < low < mid < high, name
        figures = [value for value in dataclasses.asdict(hardware).values() if isinstance(value, int | float)]
        assert min(*figures, *hardware.peak_flops.values()) > 0, name
        assert hardware.peak_flops["bfloat16"] >= hardware.peak_flops["float32"] or name == "cpu"
        low, mid, high = (hardware.flops("bfloat16", level) for level in ("low", "mid", "high"))
        assert low > mid > high, name


def test_overrides_are_in_their_units() -> None:
    found = hardware_of(
        "a100_80",
        device_memory_gib=40,
        gpus_per_node=4,
        host_memory_gib=512,
        link_gbs=100,
        nic_gbs=12.5,
        pcie_gbs=20,
        dram_gbs=150,
    )
    assert (found.memory_bytes, found.devices_per_node, found.host_memory_bytes) == (40 * 2**30, 4, 512 * 2**30)
    assert (found.link_bandwidth, found.network_bandwidth) == (100e9, 12.5e9)
    assert (found.host_link_bandwidth, found.host_memory_bandwidth) == (20e9, 150e9)


def test_values_that_are_not_above_0_are_refused_by_name() -> None:
    for option in OPTIONS:
        for value in (0, -1, float("nan"), float("inf")):
            with pytest.raises(BadInputError, match=f"{option}: .*above 0"):
                hardware_of("h100_sxm", **{option: value})


def test_an_unknown_name_is_told_with_the_nearest_and_all() -> None:
    with pytest.raises(BadInputError, match=r"unknown 'H100' \(did you mean 'h100_sxm'\?\); allowed: h100_sxm, .*cpu"):
        hardware_of("H100")


def test_a_profile_is_stored_and_read_by_name_or_path(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"no profile .* calibrate"):
        hardware_of("calibrated")
    mine = dataclasses.replace(hardware_of("cpu"), name="mine", memory_bandwidth=11e9)
    assert save_profile(mine) == profile_path()
    assert hardware_of("calibrated") == mine
    assert hardware_of(str(save_profile(mine, tmp_path / "other.json"))) == mine


DAMAGED: list[tuple[Any, str]] = [
    ("no json", "not JSON"),
    ([], "not a profile"),
    ({"surplus": 1}, "surplus"),
    ({"memory_bandwidth": -1}, "memory_bandwidth is -1"),
    ({"memory_bandwidth": "fast"}, "memory_bandwidth is 'fast'"),
    ({"matmul_efficiency": [0.5]}, "matmul_efficiency"),
    ({"peak_flops": {"float32": 1.0}}, "peak_flops"),
    ({"device_type": "tpu"}, "device_type"),
]


def test_a_damaged_profile_is_refused(tmp_path: Path) -> None:
    path = save_profile(hardware_of("cpu"), tmp_path / "profile.json")
    values = json.loads(path.read_text())
    for change, told in DAMAGED:
        path.write_text(change if isinstance(change, str) else json.dumps({**values, **change} if change else change))
        with pytest.raises(BadInputError, match=told):
            load_profile(path)


DEVICES = [
    ("NVIDIA H100 80GB HBM3", "h100_sxm"),
    ("NVIDIA H200", "h200_sxm"),
    ("NVIDIA A100-SXM4-40GB", "a100_40"),
    ("NVIDIA A100-SXM4-80GB", "a100_80"),
    ("NVIDIA L40S", "l40s"),
    ("NVIDIA GeForce RTX 5090", "rtx5090"),
    ("NVIDIA L4", "l4"),
    ("NVIDIA L40", None),
    ("NVIDIA A10G", "a10g"),
    ("NVIDIA A10", None),
    ("NVIDIA RTX A6000", "a6000"),
    ("NVIDIA RTX 6000 Ada Generation", None),
    ("Tesla V100-SXM2-16GB", "v100_16"),
    ("Tesla V100-SXM2-32GB", "v100_32"),
    ("AMD Instinct MI300X", "mi300x"),
    ("NVIDIA GeForce RTX 4090", "rtx4090"),
    ("NVIDIA GeForce GTX 1080", None),
]


def test_a_device_is_known_by_its_name() -> None:
    expected = {"h100_sxm": 989e12, "h200_sxm": 989e12, "a100_40": 312e12, "a100_80": 312e12, "l40s": 362e12}
    for device, preset in DEVICES:
        found = preset_of_device(device)
        assert (found.name if found else None) == preset, device
        if preset is None or preset in expected:
            assert peak_flops_of(device, "bf16") == expected.get(preset or ""), device
        assert peak_flops_of(device, "no") is None, device


def test_each_type_of_16_bits_has_its_own_peak() -> None:
    """A V100 multiplies float16 alone on its tensor cores."""
    assert peak_flops_of("Tesla V100-SXM2-32GB", "fp16") == 125e12
    assert peak_flops_of("Tesla V100-SXM2-32GB", "bf16") == 15.7e12
    assert peak_flops_of("NVIDIA L4", "fp16") == peak_flops_of("NVIDIA L4", "bf16") == 121e12


def test_the_module_imports_no_torch() -> None:
    program = "import sys, toolkit.planning.time.hardware as h; h.presets(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
