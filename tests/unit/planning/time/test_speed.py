"""The time of a step: published runs, the formulas by hand, and limits."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from support.fake_llama import SHAPES, segments, unit

from toolkit.planning.time.hardware import ADAM_BYTES, Hardware, hardware_of
from toolkit.planning.time.roofline import Work
from toolkit.planning.time.speed import ModelSegment, StepTime, shard_group, step_time
from toolkit.planning.time.traffic import HostExecutor, OffloadPlan, traffic
from toolkit.sharding.plan.strategy import STRATEGIES, MeshShape

KEMPNER = hardware_of("h200_sxm", gpus_per_node=4, nic_gbs=200)

PUBLISHED = [
    # Llama shape, rows of 4096 per micro-batch, ranks, accumulation, seconds per optimizer step. Full activation
    # checkpointing, bfloat16, FSDP2 on H200, 4 devices a node; all but the first under torch.compile.
    # KempnerForge, benchmarks/mfu_scaling/mfu_scaling.md #8, #4, #2:
    ("13b", 4, 8, 4, 14.81),
    ("8b", 4, 4, 2, 3.36),
    ("8b", 2, 2, 4, 2 * 2 * 4096 * 4 / 18728),
    # and benchmarks/config_validation/config_validation.md, 7b.toml and 7b_32gpu_fsdp.toml:
    ("8b", 8, 4, 4, 13.49),
    ("8b", 4, 32, 4, 7.05),
]


@pytest.mark.parametrize(("name", "rows", "num_ranks", "accumulation", "seconds"), PUBLISHED)
def test_published_steps(name: str, rows: int, num_ranks: int, accumulation: int, seconds: float) -> None:
    mesh, strategy = MeshShape(1, num_ranks), STRATEGIES["zero3"]
    sent = traffic(SHAPES[name].units, strategy, mesh, accumulation=accumulation)
    found = step_time(segments(name, rows, 4096, True), sent, strategy, mesh, KEMPNER, accumulation=accumulation)
    assert found.mid == pytest.approx(seconds, rel=0.2)
    assert found.low < seconds < found.high
    assert found.bound_by == "compute"


def test_a_device_of_less_power_is_inside_the_range() -> None:
    """torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table 1: 8 H100 of 500 W and 2.4 TB/s, 2.843 s.

    It recomputes every second matrix product: between full and no activation checkpointing.
    """
    hardware = dataclasses.replace(hardware_of("h100_sxm"), memory_bandwidth=2.4e12)
    mesh, strategy = MeshShape(1, 8), STRATEGIES["zero3"]
    sent = traffic(SHAPES["8b"].units, strategy, mesh)
    none, full = (step_time(segments("8b", 2, 8192, ac), sent, strategy, mesh, hardware) for ac in (False, True))
    assert none.low < 2.843 < full.high
    assert full.mid == pytest.approx(2.843, rel=0.2)


# By hand: arithmetic at 1 FLOP/s takes as many seconds as there are FLOPs; every efficiency is 1.

UNIT = Hardware(
    name="unit",
    memory_bytes=1,
    peak_flops={"float32": 1.0, "bfloat16": 1.0, "float16": 1.0},
    memory_bandwidth=1e30,
    link_bandwidth=1.0,
    network_bandwidth=1.0,
    host_link_bandwidth=1e30,
    host_memory_bandwidth=1e30,
    host_memory_bytes=None,
    devices_per_node=8,
    matmul_efficiency=(1.0, 1.0, 1.0),
    memory_efficiency=(1.0, 1.0, 1.0),
    transfer_efficiency=(1.0, 1.0, 1.0),
    kernel_seconds=0.0,
    device_type="cuda",
)
UNITS = (
    unit("embeddings", 80),
    *[unit("block", 400)] * 4,
    unit("tail", 80),
    unit("root", 0),
)
P = 4 * 400 + 160


def segments_of(forward: int, backward: int) -> list[ModelSegment]:
    return [ModelSegment("block", Work({("matmul", forward, 0): 1}), Work({("matmul", backward, 0): 1}), 4)]


def planned(
    strategy: str,
    mesh: MeshShape,
    hardware: Hardware = UNIT,
    *,
    forward: int = 25,
    backward: int = 50,
    accumulation: int = 1,
    offload: OffloadPlan | None = None,
) -> StepTime:
    """Forward takes 4 x `forward` seconds, backward 4 x `backward`."""
    kind = STRATEGIES[strategy]
    sent = traffic(UNITS, kind, mesh, accumulation=accumulation, offload=offload)
    work = segments_of(forward, backward)
    return step_time(work, sent, kind, mesh, hardware, accumulation=accumulation, offload=offload)


def test_one_rank_computes_and_steps() -> None:
    hardware = dataclasses.replace(UNIT, memory_bandwidth=28.0)
    found = planned("zero3", MeshShape(1, 1), hardware, accumulation=3)
    assert dataclasses.asdict(found.parts) == {
        "compute_forward": 300.0,
        "compute_backward": 600.0,
        "communication": 0.0,
        "exchange": 0.0,
        "optimizer": ADAM_BYTES * P / 28,
        "host": 0.0,
        "sampling": 0.0,
    }
    assert found.low == found.mid == found.high == found.parts.total == 900 + P


def test_ddp_reduces_once_behind_the_last_backward() -> None:
    """A ring sends 2 (N - 1) / N of the gradients, those of the embeddings when backward has ended."""
    for accumulation in (1, 3):
        found = planned("ddp", MeshShape(4, 1), accumulation=accumulation)
        total, last = 2 * 0.75 * 4 * P, 2 * 0.75 * 4 * 80
        assert found.parts.communication == pytest.approx(last + (total - last - 200))
    fast = dataclasses.replace(UNIT, link_bandwidth=1e3)
    assert planned("ddp", MeshShape(4, 1), fast).parts.communication == pytest.approx(0.001 * last)


def test_zero3_hides_gathers_and_reductions_of_every_micro_batch() -> None:
    ring = 0.75
    first, last = ring * 2 * 80, ring * 4 * 80
    forward, backward = ring * 2 * P, ring * (2 * (P - 80) + 4 * P)
    found = planned("zero3", MeshShape(1, 4), accumulation=3)
    exposed = first + (forward - first - 100) + last + (backward - last - 200)
    assert found.parts.communication == pytest.approx(3 * exposed)
    assert found.bound_by == "network"
    fast = dataclasses.replace(UNIT, link_bandwidth=1e3)
    assert planned("zero3", MeshShape(1, 4), fast, accumulation=3).parts.communication == pytest.approx(
        3 * 1e-3 * (first + last)
    )


def test_zero1_sends_once_and_zero2_gathers_once() -> None:
    ring = 0.75
    first, last = ring * 2 * 80, ring * 4 * 80
    gather, reduce = first + (ring * 2 * P - first - 100), last + (ring * 4 * P - last - 200)
    assert planned("zero1", MeshShape(1, 4), accumulation=3).parts.communication == pytest.approx(gather + reduce)
    assert planned("zero2", MeshShape(1, 4), accumulation=3).parts.communication == pytest.approx(gather + 3 * reduce)


def test_nodes_share_their_network() -> None:
    """16 ranks in 2 nodes send half of each tensor between them; inside, 15/16 over each rank's own link."""
    hardware = dataclasses.replace(UNIT, link_bandwidth=1e6, network_bandwidth=0.5)
    found = planned("zero1", MeshShape(1, 16), hardware, forward=0, backward=0)
    assert found.parts.communication == pytest.approx((2 * P + 4 * P) * 0.5 / 0.5)
    hybrid = planned("hybrid", MeshShape(2, 8), hardware, forward=0, backward=0)
    # Groups of a node gather over links; the 8 ranks of a node all-reduce their eighth side by side.
    links = 7 / 8 * (2 * (2 * P - 80) + 4 * P) / 1e6
    assert hybrid.parts.communication == pytest.approx(links + 2 * 0.5 * 4 * P / 0.5, rel=1e-6)
    # Copies in a node leave its forwards' gathers and its reductions between the nodes.
    in_node = planned("zero3", MeshShape(1, 16, 8), hardware, forward=0, backward=0)
    links = 7 / 8 * (2 * P - 160) / 1e6
    assert in_node.parts.communication == pytest.approx(links + (2 * P + 4 * P) * 0.5 / 0.5, rel=1e-6)


@pytest.mark.parametrize(
    ("executor", "num_ranks", "bytes_each"),
    [("cpu_fused", 1, 32), ("cpu_fused", 4, 36), ("cpu_torch", 1, 54), ("cpu_torch", 4, 46)],
)
def test_offload_hides_behind_the_next_forward(executor: HostExecutor, num_ranks: int, bytes_each: int) -> None:
    """With clipping; all ranks of a node share its DRAM. What the first unit takes is never hidden."""
    mesh, offload = MeshShape(1, num_ranks), OffloadPlan(executor)
    slow = dataclasses.replace(UNIT, link_bandwidth=1e30, host_memory_bandwidth=bytes_each * P / 1000.0)
    assert planned("zero3", mesh, slow, offload=offload).parts.host == pytest.approx(1000 - 100)
    assert planned("zero3", mesh, slow, offload=offload).bound_by == "host"
    fast = dataclasses.replace(slow, host_memory_bandwidth=bytes_each * P / 50.0)
    found = planned("zero3", mesh, fast, offload=offload)
    assert found.parts.host == pytest.approx(50 * 80 / P)
    assert found.parts.optimizer == 0.0
    assert found.bound_by == "compute"


def test_a_node_that_is_not_full_counts_as_one() -> None:
    """12 ranks on nodes of 8: half of what is gathered comes over the network."""
    quick = dataclasses.replace(UNIT, link_bandwidth=1e30)
    assert shard_group(MeshShape(1, 12), 8).seconds(1000.0, quick, "mid") == pytest.approx(500)


def test_offload_during_backward_hides_behind_it() -> None:
    slow = dataclasses.replace(UNIT, host_memory_bandwidth=32 * P / 1000.0)
    offload = OffloadPlan(during_backward=True)
    assert planned("zero3", MeshShape(1, 1), slow, offload=offload).parts.host == pytest.approx(1000 - 200)


def test_state_on_the_device_takes_its_share_and_the_first_unit() -> None:
    slow = dataclasses.replace(UNIT, host_memory_bandwidth=32 * P / 1000.0, memory_bandwidth=28 * P / 10)
    found = planned("zero3", MeshShape(1, 1), slow, offload=OffloadPlan(device_share=0.25))
    assert found.parts.host == pytest.approx(750 - 100)
    assert found.parts.optimizer == pytest.approx(10 * 0.25)
    hidden = dataclasses.replace(slow, host_memory_bandwidth=32 * P / 10.0)
    assert planned("zero3", MeshShape(1, 1), hidden, offload=OffloadPlan(device_share=0.25)).parts.host == 0.0


def test_streamed_state_is_bound_by_the_host_link() -> None:
    """12 bytes per parameter each way in the forward, and one rank's gradients both ways, down during backward."""
    slow = dataclasses.replace(UNIT, host_link_bandwidth=14 * P / 1000.0)
    found = planned("zero3", MeshShape(1, 1), slow, offload=OffloadPlan("device_stream"))
    edge = 80 / P
    gradients = 1000 * 2 / 14
    assert found.bound_by == "PCIe"
    assert found.parts.host == pytest.approx(edge * gradients + 0 + (1000 - 100))


def steady_seconds(clip: bool, forward: float, accumulation: int, host_bandwidth: float, resident: int) -> float:
    """Seconds per step of one rank after many, unit by unit: forward, backward, gradient down, step, weights up.

    28 equal blocks of which the first is needed first; backward takes twice as long; 50 GB/s each way over PCIe.
    """
    numel, num_units = 100e6, 28
    device = cpu = up = down = 0.0
    ready, ends = [0.0] * num_units, []
    for _ in range(12):
        for _ in range(accumulation):
            for unit_ready in ready:
                device = max(device, unit_ready) + forward / num_units
            gone = [device + 2 * forward / num_units * (num_units - i) for i in range(num_units)]
            device += 2 * forward
        landed = [0.0] * num_units
        for i in reversed(range(resident, num_units)):
            down = landed[i] = max(down, gone[i]) + 4 * numel / 50e9
        for i in range(resident, num_units) if clip else reversed(range(resident, num_units)):
            cpu = max(cpu, max(device, down) if clip else landed[i]) + 36 * numel / host_bandwidth
            up = ready[i] = max(up, cpu) + 2 * numel / 50e9
        ends.append(device)
    return (ends[-1] - ends[3]) / (len(ends) - 4)


def test_offload_is_as_fast_as_its_schedule_unit_by_unit() -> None:
    # The first block stands for the embeddings, which have no work of their own here but are needed first.
    units = [unit("embeddings", 100_000_000), *[unit("block", 100_000_000)] * 27]
    work = [ModelSegment("block", Work({("matmul", 1, 0): 1}), Work({("matmul", 2, 0): 1}))]
    kind, mesh = STRATEGIES["zero3"], MeshShape(1, 1)
    steps = [(0.1, 2), (0.4, 2), (0.4, 4), (1.5, 2)]  # seconds of forward, and accumulation
    for clip, bandwidth, step, resident in itertools.product((True, False), (50e9, 150e9, 600e9), steps, (0, 7)):
        forward, accumulation = step
        peaks = dict.fromkeys(UNIT.peak_flops, 1 / forward)
        speeds = {"memory_bandwidth": 4e12, "host_link_bandwidth": 50e9, "host_memory_bandwidth": bandwidth}
        hardware = dataclasses.replace(UNIT, **speeds, peak_flops=peaks)
        offload = OffloadPlan(device_share=resident / 28, during_backward=not clip)
        sent = traffic(units, kind, mesh, accumulation=accumulation, offload=offload)
        found = step_time(work, sent, kind, mesh, hardware, accumulation=accumulation, offload=offload)
        simulated = steady_seconds(clip, forward, accumulation, bandwidth, resident)
        case = (clip, bandwidth, step, resident)
        assert found.mid - found.parts.optimizer == pytest.approx(simulated, rel=0.08), case


# Limits


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_never_slower_on_a_faster_machine(strategy: str) -> None:
    h100 = hardware_of("h100_sxm")
    mesh = MeshShape(16, 1) if strategy == "ddp" else MeshShape(1, 16)
    offload = None if strategy == "ddp" else OffloadPlan()
    kind = STRATEGIES[strategy]
    sent = traffic(SHAPES["8b"].units, kind, mesh, accumulation=2, offload=offload)
    work = segments("8b", 4, 4096, True)

    def time(hardware: Hardware) -> StepTime:
        return step_time(work, sent, kind, mesh, hardware, accumulation=2, offload=offload)

    for figure in [key for key in dataclasses.asdict(h100) if key.endswith("_bandwidth")]:
        times = [time(dataclasses.replace(h100, **changed(h100, figure, f))) for f in (1e-3, 0.1, 1, 10, 1e3)]
        for name in ("low", "mid", "high"):
            series = [getattr(found, name) for found in times]
            assert series == sorted(series, reverse=True), figure
        assert all(found.low <= found.mid <= found.high for found in times)


def changed(hardware: Hardware, figure: str, factor: float) -> dict[str, Any]:
    return {figure: getattr(hardware, figure) * factor}


def test_ddp_over_a_fast_link_is_compute_alone() -> None:
    fast = dataclasses.replace(UNIT, link_bandwidth=1e30, network_bandwidth=1e30)
    alone = planned("ddp", MeshShape(1, 1), fast).mid
    assert planned("ddp", MeshShape(4096, 1), fast).mid == pytest.approx(alone) == pytest.approx(300.0)


def test_thousands_of_ranks_approach_whole_tensors_over_one_link() -> None:
    """A ring sends (N - 1) / N: half of the tensors for 2 ranks, nearly all for 4096."""
    kind, units = STRATEGIES["zero3"], SHAPES["8b"].units

    def communication(num_ranks: int) -> float:
        mesh, hardware = MeshShape(1, num_ranks), dataclasses.replace(UNIT, devices_per_node=num_ranks)
        sent = traffic(units, kind, mesh)
        return step_time(segments_of(0, 0), sent, kind, mesh, hardware).parts.communication

    assert communication(4096) / communication(2) == pytest.approx(2 * 4095 / 4096, rel=1e-3)
