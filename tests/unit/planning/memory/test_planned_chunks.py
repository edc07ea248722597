"""Norms and MLPs in chunks in the plan: the peak against a trace of the real FSDP2, and by formula."""

from __future__ import annotations

import pytest
from support.planning_models import workload

from toolkit.planning.memory.probe import Prober
from toolkit.planning.memory.replay import MemoryLayout, replay
from toolkit.planning.memory.trace import trace
from toolkit.planning.workload.unit_shapes import unit_shapes
from toolkit.planning.workload.workload import Workload
from toolkit.sharding.blocks.checkpointing import Checkpointing
from toolkit.sharding.plan.strategy import STRATEGIES, MeshShape

TOKENS = 4096


def work_of(lora: bool) -> Workload:
    return workload("llama", tokens=TOKENS, layers=4, width=64, vocabulary=256, lora=lora)


@pytest.mark.parametrize("lora", [False, True])
def test_the_plan_is_the_trace_and_most_of_a_blocks_activations_are_gone(lora: bool) -> None:
    mesh, zero3, peaks, flops = MeshShape(1, 2), STRATEGIES["zero3"], [], []
    for chunk_tokens in (None, 256):
        checkpointing = Checkpointing(1, True, chunk_tokens)
        work = work_of(lora)
        prober = Prober(work)
        probe = prober.probe(1, checkpointing)
        shapes = unit_shapes(work.model, prober.plan, "bf16")
        planned = max(
            moment.total - moment.optimizer
            for moment in replay(shapes, probe, zero3, MemoryLayout(2, 2, 4, optimizer=8), 1)
        )
        traced = trace(work_of(lora), zero3, mesh, 1, 1, checkpointing)
        assert planned == pytest.approx(traced.peak, rel=0.02)
        assert probe.host_peak == traced.host_peak
        # Of the blocks: with so small a model the head's logits take more.
        backward = [e.peak for e in probe.events if e.kind == "post_backward" and shapes[e.unit].kind == "block"]
        peaks.append(max(backward))
        flops.append((probe.forward.flops, probe.backward.flops))
    # Three of sixteen chunks run in the plan, and count for all.
    assert flops[0][0] == flops[1][0]
    assert flops[0][1] == pytest.approx(flops[1][1], rel=0.02)  # a checkpoint alone leaves out its last product
    assert peaks[1] < 0.45 * peaks[0]
