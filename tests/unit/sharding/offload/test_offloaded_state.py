"""State of units in host memory, and its way to the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from toolkit.sharding.offload.capture import Capture
from toolkit.sharding.offload.executors import FlatOptimizer, UnitStep
from toolkit.sharding.offload.offloaded_units import OffloadedUnit, UnitSlice
from toolkit.sharding.offload.state import OffloadedState

MOMENTS = ("exp_avg", "exp_avg_sq")
BYTES = 10 * (4 + 4 + 4 + 4)
"""Of a unit: master, two moments and the gradient, in float32."""


def unit(number: int) -> OffloadedUnit:
    parameter: Any = torch.zeros(10)
    return OffloadedUnit(f"u{number}", [], [UnitSlice(f"p{number}", parameter, 0, torch.Size((10,)), group=0)], 10)


def state(gib: float, gradients: torch.dtype = torch.float32, executor: str = "cpu_torch") -> OffloadedState:
    return OffloadedState([unit(0), unit(1)], MOMENTS, torch.device("cpu"), gib, gradients, executor)


@pytest.mark.parametrize(
    ("gradients", "executor", "staged"),
    [
        (torch.float32, "cpu_torch", 2 * 4),
        (torch.bfloat16, "cpu_torch", 2 * 4 + 4),  # gradients in float32, for torch's step
        (torch.bfloat16, "cpu_fused", 2 * 4),
        (torch.bfloat16, "device_stream", 0),
    ],
)
def test_the_host_holds_what_was_planned(gradients: torch.dtype, executor: str, staged: int) -> None:
    """Of 20 elements master, moments and gradient; of the longest unit, two buffers in the type of the weights."""
    found = state(0.0, gradients, executor)
    assert found.plan.total == found.host_bytes == 20 * (3 * 4 + gradients.itemsize) + 10 * staged


def test_units_stay_on_the_device_while_they_fit_to_the_byte() -> None:
    for num_bytes, resident in ((BYTES - 1, 0), (BYTES, 1), (2 * BYTES - 1, 1), (2 * BYTES, 2)):
        assert len(state(num_bytes / 2**30).residents) == resident, num_bytes


def test_a_second_gradient_is_added_where_the_first_one_is() -> None:
    """That of a resident unit is on the device, for which torch's device without memory stands."""
    resident = unit(0)
    resident.resident, resident.landing = True, torch.zeros(10, device="meta")
    capture = Capture(torch.device("cpu"), lambda: True, lambda _: None, lambda: None, once=False)
    for _ in range(2):
        capture._pass_on(resident, torch.ones(10, device="meta"))
    assert resident.gradient is not None
    assert resident.gradient.device.type == "meta"


def test_a_unit_of_which_nothing_is_stepped_has_an_optimizer_all_the_same() -> None:
    alone = unit(0)
    alone.slots[0].group = None
    alone.master = torch.ones(10)
    inner = FlatOptimizer(torch.optim.AdamW([torch.ones(1)]), alone, alone.master, {})
    inner.step(UnitStep(alone, torch.ones(10), frozenset({0}), ({},), 1.0), torch.ones(10))
    assert alone.master.tolist() == [1.0] * 10
