"""toolkit.training.profile: on a list of events written out, each microsecond has one owner."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from toolkit.training.profile import DATA, KINDS, PROFILED, UPDATE, Event, _events_of, _subtract, _union, attributed

CPU = [
    Event(PROFILED, 100, 200),
    Event("aten::mm", 90, 110),  # 10 inside
    Event("aten::linear", 120, 150),  # 30, with the next one inside it
    Event("aten::addmm", 125, 140),
    Event("gloo:all_gather", 140, 160),  # 10 exposed
    Event(DATA, 155, 170),  # 10 after the gather
    Event(UPDATE, 180, 190),
    Event("aten::_fused_adamw_", 180, 188),  # the host's
    Event("gloo:all_reduce", 188, 190),  # 2 exposed, inside the update
    Event("Optimizer.step#AdamW.step", 180, 190),
]


def test_on_the_cpu() -> None:
    found = attributed(CPU)
    assert found == pytest.approx({"compute": 40e-6, "communication": 12e-6, "data": 10e-6, "host": 38e-6})
    assert sum(found.values()) == pytest.approx(100e-6)
    assert tuple(found) == KINDS


def test_on_a_device_kernels_count_and_operators_do_not() -> None:
    kernels = [
        Event("void gemm_kernel", 105, 125, True),  # 20
        Event("ncclDevKernel_AllGather", 115, 135, True),  # 10 exposed
        Event("Memcpy HtoD (Pinned -> Device)", 135, 140, True),
        Event("void adamw_kernel", 182, 187, True),  # 5, inside the update
    ]
    found = attributed(CPU + kernels)
    assert found == pytest.approx({"compute": 25e-6, "communication": 10e-6, "data": 15e-6, "host": 50e-6})


def seen(name: str, start: float, end: float, device: str, is_label: bool = False) -> SimpleNamespace:
    """An event as torch's profiler tells it."""
    kind, times = SimpleNamespace(name=device), SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, time_range=times, device_type=kind, is_user_annotation=is_label)


def test_a_label_on_the_device_is_no_compute_that_hides_communication() -> None:
    told: Any = SimpleNamespace(
        events=lambda: [
            seen(PROFILED, 100, 200, "CPU", True),
            seen(PROFILED, 100, 200, "CUDA", True),
            seen("FSDP::all_gather (model.layers.0)", 110, 160, "CUDA", True),
            seen("ncclDevKernel_AllGather", 110, 150, "CUDA"),  # 30 exposed
            seen("void gemm_kernel", 140, 160, "CUDA"),  # 20
        ]
    )
    assert attributed(_events_of(told)) == pytest.approx(
        {"compute": 20e-6, "communication": 30e-6, "data": 0.0, "host": 50e-6}
    )


def test_intervals() -> None:
    assert _union([(5, 6), (1, 3), (2, 4), (4, 5)]) == [(1, 6)]
    assert _subtract([(0, 10), (20, 30)], [(-5, 1), (3, 4), (9, 22), (29, 40)]) == [(1, 3), (4, 9), (22, 29)]
    assert _subtract([(0, 1)], []) == [(0, 1)]
    assert _subtract([(0, 9)], [(0, 9)]) == []
