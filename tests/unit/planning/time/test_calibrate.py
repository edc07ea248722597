"""Calibration of this machine: quick, plausible, stored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from toolkit.errors import BadInputError
from toolkit.planning.time.calibrate import calibrate
from toolkit.planning.time.hardware import hardware_of, presets


def test_the_measured_machine_is_stored_and_within_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    threads = torch.get_num_threads()
    found = calibrate(0.5)
    assert hardware_of("calibrated") == found
    assert torch.get_num_threads() == threads
    assert found.device_type == "cpu"
    # Between a starved core and the fastest device there is.
    assert 1e8 < found.peak_flops["float32"] < presets()["h100_sxm"].peak_flops["float32"]
    for bandwidth in (found.memory_bandwidth, found.host_memory_bandwidth):
        assert 1e8 < bandwidth < presets()["h100_sxm"].memory_bandwidth
    assert 1e6 < found.link_bandwidth < 1e12


def test_more_ranks_than_cores_are_refused() -> None:
    with pytest.raises(BadInputError, match="--gpus: 100000; allowed: 1 to"):
        calibrate(0.1, ranks=100_000)
