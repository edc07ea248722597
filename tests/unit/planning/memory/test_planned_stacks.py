"""Plans of experts that are sharded along their matrices' rows, against a trace of the real FSDP2."""

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
from toolkit.sharding.plan.strategy import STRATEGIES, MeshShape


@pytest.mark.parametrize(
    ("strategy", "mesh", "accumulation", "checkpointing", "by_block"),
    [
        ("zero3", MeshShape(1, 8), 2, Checkpointing(1), False),
        ("zero2", MeshShape(1, 8), 2, None, False),
        ("zero1", MeshShape(1, 8), 2, Checkpointing(1), False),
        ("hybrid", MeshShape(2, 8), 1, Checkpointing(1), False),
        ("zero3", MeshShape(1, 16, 8), 1, Checkpointing(1), False),
        ("zero3", MeshShape(1, 8), 3, Checkpointing(1), True),
    ],
)
def test_plans_hold_and_send_what_the_trace_does(
    strategy: str, mesh: MeshShape, accumulation: int, checkpointing: Checkpointing | None, by_block: bool
) -> None:
    work = workload("mixtral", tokens=16, layers=3)  # of 4 experts
    found = trace(work, STRATEGIES[strategy], mesh, 1, accumulation, checkpointing, by_block)
    prober = Prober(work)
    units = unit_shapes(work.model, prober.plan, "bf16")
    layout = MemoryLayout(mesh.shard, 2, 4, optimizer=8, node=mesh.node)
    probe = prober.probe(1, checkpointing)
    moments = replay(units, probe, STRATEGIES[strategy], layout, accumulation, by_block)
    peak = max(moment.total - moment.optimizer for moment in moments)
    assert peak == pytest.approx(found.peak, rel=0.02)
    sent = traffic(units, STRATEGIES[strategy], mesh, accumulation=1 if by_block else accumulation)
    assert {kind: sent.whole[kind] for kind in found.traffic} == found.traffic
    stacks = [p for unit in units for p in unit.parameters if len(p.shape) == 3]
    assert {p.shard_numel(mesh.shard) * mesh.shard / p.numel for p in stacks} == {1.0}
