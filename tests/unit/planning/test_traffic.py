"""Traffic by the formulas of the ZeRO paper; real collectives are in tests/multiprocess/test_planned_traffic.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from toolkit.planning.traffic import HostExecutor, OffloadPlan, UnitElements, padded_elements, traffic, unit_elements
from toolkit.sharding import plan_units
from toolkit.sharding.strategy import STRATEGIES, MeshShape

BLOCK, TABLE, BLOCKS, K = 1000, 400, 3, 3
P = BLOCKS * BLOCK + 2 * TABLE
UNITS = (
    UnitElements("embeddings", TABLE, TABLE, True),
    *[UnitElements("block", BLOCK, BLOCK, True)] * BLOCKS,
    UnitElements("tail", TABLE, TABLE, False),
    UnitElements("root", 0, 0, False),
)
TWICE = 2 * P - TABLE  # forward and backward; the tail once


@pytest.mark.parametrize(
    ("strategy", "mesh", "gathered", "scattered", "all_reduced"),
    [
        ("ddp", MeshShape(4, 1), 0, 0, P),
        ("zero1", MeshShape(1, 4), P, P, 0),
        ("zero2", MeshShape(1, 4), P, K * P, 0),
        ("zero3", MeshShape(1, 4), K * TWICE, K * P, 0),
        ("hybrid", MeshShape(2, 4), K * TWICE, K * P, P // 4),
    ],
)
def test_bytes_of_a_window(strategy: str, mesh: MeshShape, gathered: int, scattered: int, all_reduced: int) -> None:
    found = traffic(UNITS, STRATEGIES[strategy], mesh, accumulation=K)
    assert found.whole == {"all_gather": 2 * gathered, "reduce_scatter": 4 * scattered, "all_reduce": 4 * all_reduced}
    ring, replicas = (mesh.shard - 1) / mesh.shard, (mesh.replicate - 1) / mesh.replicate
    assert found.all_gather == pytest.approx(2 * gathered * ring)
    assert found.reduce_scatter == pytest.approx(4 * scattered * ring)
    assert found.all_reduce == pytest.approx(2 * 4 * all_reduced * replicas)
    assert found.sent == found.all_gather + found.reduce_scatter + found.all_reduce


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_one_rank_sends_nothing(strategy: str) -> None:
    found = traffic(UNITS, STRATEGIES[strategy], MeshShape(1, 1), accumulation=K)
    assert (found.sent, sum(found.whole.values()), sum(found.calls.values())) == (0, 0, 0)
    assert (found.first_gather, found.last_reduce, found.trainable) == (0, 0, P)


@pytest.mark.parametrize(
    ("executor", "num_ranks", "to_host", "to_device"),
    [
        ("cpu_fused", 4, 4, 2),
        ("cpu_torch", 4, 4, 2),
        ("device_stream", 4, 16, 16),
        ("cpu_fused", 1, 2, 2),
        ("device_stream", 1, 14, 14),
    ],
)
def test_bytes_over_the_host_link(executor: HostExecutor, num_ranks: int, to_host: int, to_device: int) -> None:
    """Per parameter of this rank; one rank's gradients are in the type of compute."""
    mesh = MeshShape(1, num_ranks)
    found = traffic(UNITS, STRATEGIES["zero3"], mesh, offload=OffloadPlan(executor))
    assert (found.device_to_host, found.host_to_device) == (to_host * P // num_ranks, to_device * P // num_ranks)
    half = traffic(UNITS, STRATEGIES["zero3"], mesh, offload=OffloadPlan(executor, device_share=0.5))
    assert (half.device_to_host, half.host_to_device) == (found.device_to_host // 2, found.host_to_device // 2)
    assert traffic(UNITS, STRATEGIES["zero3"], mesh).device_to_host == 0


def test_units_of_a_model_are_padded_and_shared_parameters_counted_once() -> None:
    assert padded_elements((10, 3), 4) == 12 * 3
    assert padded_elements((), 4) == 4
    assert padded_elements((8, 3), 4) == 8 * 3
    with torch.device("meta"):
        model = nn.Module()
        model.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6)) for _ in range(2))
        model.extra = nn.Linear(3, 3)
    model.layers[0].requires_grad_(False)
    linears = 8 * 6 + 8 + 8 * 5 + 8  # of 5 and of 6 rows, padded to 8
    found = unit_elements(model, plan_units(model, ["Sequential"]), 4)
    assert [(unit.kind, unit.parameters, unit.trainable) for unit in found] == [
        ("block", linears, 0),
        ("block", linears, linears),
        ("root", 4 * 3 + 4, 4 * 3 + 4),
    ]
