"""A quantised base in the plan: its bytes by formula, and the peak against a trace of the real FSDP2."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from packaging.version import Version
from support.planning_models import workload

from toolkit.model.adapters.adapters import add_adapter, base_of, quantise
from toolkit.model.quantised.quantised import OLDEST_TORCH
from toolkit.planning.memory.probe import Prober
from toolkit.planning.memory.replay import replay
from toolkit.planning.memory.state_bytes import MemoryLayout
from toolkit.planning.memory.trace import trace
from toolkit.planning.workload.unit_shapes import unit_shapes
from toolkit.planning.workload.workload import Workload
from toolkit.recipe.schema import AdapterSection
from toolkit.sharding.blocks.checkpointing import Checkpointing
from toolkit.sharding.plan.strategy import STRATEGIES, MeshShape

pytestmark = pytest.mark.skipif(Version(torch.__version__) < OLDEST_TORCH, reason="this torch cannot shard bytes")

CASES = [
    ({"quantize": "nf4"}, "zero3", MeshShape(1, 8), "bf16", None),
    ({"quantize": "nf4", "double_quantization": True}, "zero3", MeshShape(1, 2), "bf16", Checkpointing(1)),
    ({"quantize": "nf4", "double_quantization": True}, "zero3", MeshShape(1, 1), "bf16", Checkpointing(1)),
    ({"quantize": "nf4"}, "hybrid", MeshShape(2, 2), "no", None),
    ({"quantize": "int8"}, "zero2", MeshShape(1, 4), "bf16", None),
]


def quantised_workload(adapter: dict[str, object], precision: str) -> Workload:
    work = workload("llama", precision=precision, tokens=24, layers=4, width=256, vocabulary=256, whole_logits=True)
    section = AdapterSection.model_validate({"kind": "lora", "r": 8, **adapter})
    model = base_of(work.model)
    quantise(model, section)
    return replace(work, model=add_adapter(model, section, None))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_plan_is_the_trace(case: tuple[dict[str, object], str, MeshShape, str, Checkpointing | None]) -> None:
    adapter, name, mesh, precision, checkpointing = case
    strategy = STRATEGIES[name]
    work = quantised_workload(adapter, precision)
    prober = Prober(work)
    layout = MemoryLayout(mesh.shard, 2 if precision == "bf16" else None, 4, optimizer=8)
    moments = replay(
        unit_shapes(work.model, prober.plan, precision), prober.probe(1, checkpointing), strategy, layout, 1
    )
    planned = max(moment.total - moment.optimizer for moment in moments)
    traced = trace(quantised_workload(adapter, precision), strategy, mesh, 1, 1, checkpointing)
    assert planned == pytest.approx(traced.peak, rel=0.02)


def test_a_weight_takes_half_a_byte_and_its_share_of_a_scale() -> None:
    linear = {"nf4": 1 / 2 + 4 / 64, "double": 1 / 2 + 1 / 64 + 4 / (64 * 256), "int8": 1.0}
    for kind, each in linear.items():
        adapter = {"quantize": "nf4" if kind == "double" else kind, "double_quantization": kind == "double"}
        work = quantised_workload(adapter, "bf16")
        blocks = [unit for unit in unit_shapes(work.model, Prober(work).plan, "bf16") if unit.kind == "block"]
        found = sum(p.numel for unit in blocks for p in unit.parameters if not p.is_cast)
        # Of each block: q, o (256 x 256), k, v (64 x 256), gate, up, down (736 x 256).
        weights = 4 * (2 * 256 * 256 + 2 * 64 * 256 + 3 * 736 * 256)
        assert found == pytest.approx(each * weights, rel=0.02)
