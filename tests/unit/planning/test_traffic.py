"""Traffic by the formulas of the ZeRO paper; real collectives are in tests/multiprocess/test_planned_traffic.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.cases import cases
from support.fake_llama import unit

from toolkit.planning.traffic import OffloadPlan, traffic, with_teacher
from toolkit.planning.workload.unit_shapes import ParameterShape, UnitShape
from toolkit.sharding.plan.strategy import STRATEGIES, MeshShape
from toolkit.sharding.plan.unit_plan import UnitKind

TABLES = cases(__file__)

BLOCK, TABLE, BLOCKS, K = 1000, 400, 3, 3
P = BLOCKS * BLOCK + 2 * TABLE
UNITS = (unit("embeddings", TABLE), *[unit("block", BLOCK)] * BLOCKS, unit("tail", TABLE), unit("root", 0))
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
    assert replace(found, exchanged=5).sent == found.all_gather + found.reduce_scatter + found.all_reduce + 5


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_one_rank_sends_nothing(strategy: str) -> None:
    found = traffic(UNITS, STRATEGIES[strategy], MeshShape(1, 1), accumulation=K)
    assert (found.sent, sum(found.whole.values()), sum(found.calls.values())) == (0, 0, 0)


@pytest.mark.parametrize(
    ("streams", "num_ranks", "to_host", "to_device"),
    [(False, 4, 4, 2), (True, 4, 16, 16), (False, 1, 2, 2), (True, 1, 14, 14)],
)
def test_bytes_over_the_host_link(streams: bool, num_ranks: int, to_host: int, to_device: int) -> None:
    """Per parameter of this rank; one rank's gradients are in the type of compute."""
    mesh = MeshShape(1, num_ranks)
    found = traffic(UNITS, STRATEGIES["zero3"], mesh, offload=OffloadPlan(streams=streams))
    assert (found.device_to_host, found.host_to_device) == (to_host * P // num_ranks, to_device * P // num_ranks)
    half = traffic(UNITS, STRATEGIES["zero3"], mesh, offload=OffloadPlan(0.5, streams))
    assert (half.device_to_host, half.host_to_device) == (found.device_to_host // 2, found.host_to_device // 2)
    kept = traffic(UNITS, STRATEGIES["zero3"], mesh)
    assert kept.device_to_host == kept.host_to_device == 0
    assert (kept.exchanged, kept.sequence) == (0, 1)


def test_rows_are_padded_and_frozen_parameters_gathered_alone() -> None:
    """10 rows of 3 on 4 ranks are 12; without mixed precision each parameter is gathered as it is held."""
    frozen, trained = ParameterShape((10, 3), False, held=2), ParameterShape((8, 3), True, held=4)
    units = [UnitShape("block", "block", True, (frozen, trained))]
    found = traffic(units, STRATEGIES["zero1"], MeshShape(1, 4))
    assert found.whole == {"all_gather": 2 * (36 + 24), "reduce_scatter": 4 * 24, "all_reduce": 0}
    assert found.calls == {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 0}
    plain = traffic(units, STRATEGIES["zero1"], MeshShape(1, 4), compute_bytes=None)
    assert plain.whole["all_gather"] == 2 * 36 + 4 * 24


def test_a_teacher_is_gathered_for_each_forward_and_its_head_once_more() -> None:
    """In bf16, by each of K forwards; a rank of 4 sends three quarters, rounded down once."""
    mesh = MeshShape(1, 4)
    alone = traffic(UNITS, STRATEGIES["zero3"], mesh, accumulation=K)
    both = with_teacher(alone, UNITS, len(UNITS) - 2, mesh, K, 2)
    whole = 2 * K * (P + TABLE)
    assert both.whole == {**alone.whole, "all_gather": alone.whole["all_gather"] + whole}
    assert both.all_gather == alone.all_gather + whole * 3 // 4
    assert both.forward_all_gather == alone.forward_all_gather + whole
    # The root has no parameters, so it is not gathered.
    assert both.calls == {**alone.calls, "all_gather": alone.calls["all_gather"] + K * (BLOCKS + 2 + 1)}
    one = traffic(UNITS, STRATEGIES["zero3"], MeshShape(1, 1))
    assert with_teacher(one, UNITS, 0, MeshShape(1, 1), K, 2) == one


def named(name: str, numel: int, trainable: bool = True, kind: UnitKind = "block") -> UnitShape:
    return replace(unit(kind, numel, trainable), name=name, reshard_after_forward=True)


@pytest.mark.parametrize(("trained", "gathered_again"), TABLES["BACKWARD"])
def test_backward_gathers_what_is_behind_the_first_trained_unit(
    trained: tuple[bool, bool, bool], gathered_again: tuple[str, ...]
) -> None:
    """Units a and b with experts inside, in the forward's order a.experts, a, b.experts, b; the sizes tell which."""
    of_a, of_experts, of_b = trained
    sizes = {"a": 1000, "a.experts": 10_000, "b": 100_000, "b.experts": 1_000_000}
    units = [
        named("a", sizes["a"], of_a),
        named("a.experts", sizes["a.experts"], of_a, kind="experts"),
        named("b", sizes["b"], of_b),
        named("b.experts", sizes["b.experts"], of_experts, kind="experts"),
    ]
    found = traffic(units, STRATEGIES["zero3"], MeshShape(1, 2))
    again = found.whole["all_gather"] - found.forward_all_gather
    assert again == 2 * sum(sizes[name] for name in gathered_again)


def test_ddp_reduces_by_buckets_of_25_mib() -> None:
    """Gradients in float32, so that a bucket holds a quarter as many elements as bytes."""
    full = 25 * 2**20 // 4
    for numel, calls in ((full, 1), (full + 1, 2), (2 * full, 2)):
        found = traffic([unit("block", numel)], STRATEGIES["ddp"], MeshShape(2, 1))
        assert found.calls == {"all_gather": 0, "reduce_scatter": 0, "all_reduce": calls}


@pytest.mark.parametrize(
    ("num_ranks", "accumulation", "compute_bytes", "expected"),
    [(2, 1, 2, 4), (1, 2, 2, 4), (1, 1, 2, 2), (1, 1, None, 4)],
)
def test_a_gradient_that_is_reduced_or_summed_is_float32(
    num_ranks: int, accumulation: int, compute_bytes: int | None, expected: int
) -> None:
    mesh = MeshShape(1, num_ranks)
    found = traffic(
        UNITS, STRATEGIES["zero3"], mesh, accumulation=accumulation, compute_bytes=compute_bytes, offload=OffloadPlan()
    )
    assert found.device_to_host == expected * P // num_ranks


@pytest.mark.parametrize(
    ("strategy", "mesh", "per_node", "expected"),
    [
        ("zero3", MeshShape(1, 8), 8, 0),
        # One ring over two nodes: each passes on half of the whole.
        ("zero3", MeshShape(1, 16), 8, (2 * TWICE + 4 * P) * K // 2),
        ("zero1", MeshShape(1, 16), 8, (2 * P + 4 * P) // 2),
        ("ddp", MeshShape(16, 1), 8, 2 * 4 * P // 2),
        # Eight groups of two replicas, each of an eighth.
        ("hybrid", MeshShape(2, 8), 8, 8 * 2 * 4 * P // 8 // 2),
        # Four nodes of two ranks: two rings of four replicas cross them, and shard groups none.
        ("hybrid", MeshShape(4, 2), 2, 2 * 2 * 4 * P // 2 * 3 // 4),
    ],
)
def test_what_a_node_sends_to_the_others(strategy: str, mesh: MeshShape, per_node: int, expected: int) -> None:
    found = traffic(UNITS, STRATEGIES[strategy], mesh, accumulation=K)
    padded = 16 * len(UNITS) * 4 * K  # rows are padded to a multiple of the ranks
    assert found.between_nodes(mesh, per_node) == pytest.approx(expected, abs=padded)


def test_the_roots_own_parameters_come_last_in_the_forward() -> None:
    """So that backward, which ends at the second block, gathers the two blocks again, and not the embeddings."""
    frozen = [unit("embeddings", TABLE, trainable=False), named("a", BLOCK, trainable=False)]
    units = [*frozen, named("b", BLOCK), replace(unit("root", 8), name="")]
    found = traffic(units, STRATEGIES["zero3"], MeshShape(1, 2))
    assert found.whole["all_gather"] - found.forward_all_gather == 2 * 2 * BLOCK
