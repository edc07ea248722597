"""The plan of accumulation by block against a trace of the real FSDP2."""

from __future__ import annotations

import pytest
from support.planning_models import workload

from toolkit.planning.memory.probe import Prober
from toolkit.planning.memory.replay import replay
from toolkit.planning.memory.state_bytes import MemoryLayout
from toolkit.planning.memory.trace import trace
from toolkit.planning.time.traffic import traffic
from toolkit.planning.workload.unit_shapes import unit_shapes
from toolkit.sharding.blocks.checkpointing import Checkpointing
from toolkit.sharding.fsdp2.fsdp import autograd_sums_gradients
from toolkit.sharding.plan.strategy import STRATEGIES, MeshShape


@pytest.mark.parametrize(
    ("micro_batches", "tokens", "offload", "tolerance"),
    [(4, 160, False, 0.01), (4, 8, False, 0.01), (4, 160, True, 0.05)],
)
def test_the_plan_of_a_window_is_its_trace(micro_batches: int, tokens: int, offload: bool, tolerance: float) -> None:
    work = workload("llama", precision="bf16", tokens=tokens, layers=4, vocabulary=256)
    mesh, checkpointing, zero3 = MeshShape(1, 8), Checkpointing(1, offload), STRATEGIES["zero3"]
    traced = trace(work, zero3, mesh, 1, micro_batches, checkpointing, by_block=True)
    prober = Prober(work)
    probe = prober.probe(1, checkpointing)
    units = unit_shapes(work.model, prober.plan, "bf16")
    moments = replay(units, probe, zero3, MemoryLayout(8, 2, 4, optimizer=8), micro_batches, by_block=True)
    # torch 2.15 adds each gradient to the window's sums in place; the plan waits for all of a unit's, as 2.13 does.
    tolerance = 0.1 if autograd_sums_gradients() else tolerance
    assert max(m.total - m.optimizer for m in moments) == pytest.approx(traced.peak, rel=tolerance)
    # Each of the four blocks leaves its input there, whether the probe ran it or another like it.
    assert micro_batches * probe.host_peak == traced.host_peak
    planned = traffic(units, zero3, mesh, accumulation=1, compute_bytes=2).whole
    assert {kind: num_bytes for kind, num_bytes in planned.items() if num_bytes} == traced.traffic
