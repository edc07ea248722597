"""Calibration of this machine: quick, plausible, stored."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from toolkit.errors import BadInputError
from toolkit.planning.time import collectives
from toolkit.planning.time.calibrate import calibrate
from toolkit.planning.time.hardware import hardware_of, presets


@pytest.mark.slow
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


def test_an_all_gather_is_timed_five_times_after_two_that_warm_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each of 4 ranks sends three quarters of 16 MiB, of which it holds a quarter; the best time counts."""
    sizes: list[tuple[int, int]] = []
    seconds = iter([9.0, 9.0, 4.0, 3.0, 0.5, 5.0, 6.0, 0.1])

    def timed(self: object, number: int) -> SimpleNamespace:
        for _ in range(number):
            self._globals["run"]()  # type: ignore[attr-defined]
        taken = [next(seconds) for _ in range(number)]
        return SimpleNamespace(mean=taken[0])

    monkeypatch.setattr(collectives.Timer, "timeit", timed)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(dist, "all_gather_into_tensor", lambda whole, mine: sizes.append((whole.numel(), mine.numel())))
    assert collectives.all_gather_rate("cpu", 4, tmp_path, 0) == 2**22 * 3 / 0.5
    assert sizes == [(2**24, 2**22)] * 7
