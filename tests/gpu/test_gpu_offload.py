"""Offload on a CUDA device: streams, pinned memory and the copies between host and device. Skipped where there is none.

What differs from CPU ranks is the order on the device's streams, which only a device can get wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.offload_loops import Case, Found, masters, ordinary, prepare, train
from support.sanitized_threads import sanitized_threads  # noqa: F401 (a fixture of every test here)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CASES = [
    Case(),
    Case(tied=False, accumulation=3),
    Case(prefetch=True),
    Case(checkpointing=True, max_norm=None),
    Case(forwards=2),
    Case(unused=True, accumulation=3),
]
WAYS: dict[str, dict[str, Any]] = {
    "cpu_torch": {"executor": "cpu_torch"},
    "cpu_fused": {"executor": "cpu_fused"},
    "device_stream": {"executor": "device_stream"},
    "resident": {"executor": "cpu_torch", "device_state_gib": 1.0},
    "auto": {"executor": "auto"},
}


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TEST_BACKEND", "cpu:gloo,cuda:nccl")
    monkeypatch.setenv("TEST_MEETING_FOLDER", str(tmp_path))


def largest_difference(found: list[float], expected: list[float]) -> float:
    return max((abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)), default=0.0)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_offload_follows_the_ordinary_run(case: Case, way: str) -> None:
    """Equal but for the order of single roundings between the host's AdamW and the device's."""
    from support.memory import memory_report

    from toolkit.sharding import OffloadSettings

    expected = ordinary(case)
    accelerator, model, optimizer = prepare(case, OffloadSettings(**WAYS[way]))
    losses, norms = train(case, accelerator, model, optimizer)
    engine = accelerator.state.fsdp_plugin.engine
    engine.flush()
    report = memory_report(model, optimizer)
    padded = sum(unit.numel for unit in engine.state.units)
    found = Found(losses, norms, masters(model))
    assert largest_difference(found.losses, expected.losses) < 2e-3
    assert largest_difference(found.norms, expected.norms) < 2e-2
    for name, weight in expected.weights.items():
        torch.testing.assert_close(found.weights[name], weight, atol=2e-2, rtol=2e-2, msg=name)
    assert report.sharded_parameters == pytest.approx(2 * padded, rel=0.05)
    assert report.gradients == 0
    assert (report.optimizer_state > 0) == (way in ("resident", "auto"))
    assert all(unit.landing.is_pinned() for unit in engine.state.hosted)
    accelerator.state.fsdp_plugin.close()
    accelerator.end_training()
