"""Hardware: presets of data sheets, overrides, peak rates; every wrong value is an error."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.cases import cases

from toolkit.errors import BadInputError
from toolkit.planning.hardware import hardware_of, peak_flops_of, preset_of_device, presets

OPTIONS = ("device_memory_gib", "gpus_per_node", "host_memory_gib")


def test_presets_hold_the_data_sheets_figures() -> None:
    h100 = hardware_of("h100_sxm")
    assert h100.peak_flops == {"bfloat16": 989e12, "float16": 989e12}
    assert h100.memory_bytes == pytest.approx(79.1 * 2**30, rel=1e-6)
    assert {"h100_sxm", "h200_sxm", "a100_40", "a100_80", "l40s", "rtx4090", "rtx5090", "cpu"} <= set(presets())


def test_every_preset_has_all_figures() -> None:
    for name, hardware in presets().items():
        assert hardware.name == name
        assert min(hardware.memory_bytes, hardware.devices_per_node, *hardware.peak_flops.values()) > 0, name
        assert set(hardware.peak_flops) == {"bfloat16", "float16"}, name


def test_overrides_are_in_their_units() -> None:
    found = hardware_of("a100_80", device_memory_gib=40, gpus_per_node=4, host_memory_gib=512)
    assert (found.memory_bytes, found.devices_per_node, found.host_memory_bytes) == (40 * 2**30, 4, 512 * 2**30)


def test_values_that_are_not_above_0_are_refused_by_name() -> None:
    for option in OPTIONS:
        for value in (0, -1, float("nan"), float("inf")):
            with pytest.raises(BadInputError, match=f"{option}: .*above 0"):
                hardware_of("h100_sxm", **{option: value})


def test_an_unknown_name_is_told_with_the_nearest_and_all() -> None:
    with pytest.raises(BadInputError, match=r"unknown 'H100' \(did you mean 'h100_sxm'\?\); allowed: h100_sxm, .*cpu"):
        hardware_of("H100")


DEVICES: dict[str, str | None] = cases(__file__)["DEVICES"]


def test_a_device_is_known_by_its_name() -> None:
    expected = {"h100_sxm": 989e12, "h200_sxm": 989e12, "a100_40": 312e12, "a100_80": 312e12, "l40s": 362e12}
    for device, preset in DEVICES.items():
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
    program = "import sys, toolkit.planning.hardware as h; h.presets(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
