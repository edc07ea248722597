"""toolkit.training.profile: on a list of events written out, each microsecond has one owner."""

from __future__ import annotations

import pytest

from toolkit.training.profile import DATA, KINDS, PROFILED, UPDATE, Event, _union, _without, attributed

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
        Event(PROFILED, 100, 200, True),  # a label's shadow on the device
    ]
    found = attributed(CPU + kernels)
    assert found == pytest.approx({"compute": 25e-6, "communication": 10e-6, "data": 15e-6, "host": 50e-6})


def test_intervals() -> None:
    assert _union([(5, 6), (1, 3), (2, 4), (4, 5)]) == [(1, 6)]
    assert _without([(0, 10), (20, 30)], [(-5, 1), (3, 4), (9, 22), (29, 40)]) == [(1, 3), (4, 9), (22, 29)]
    assert _without([(0, 1)], []) == [(0, 1)]
    assert _without([(0, 9)], [(0, 9)]) == []
