"""The plan of a run with a frozen model is its trace: its shards, gathers and hidden states, and the heads' chunks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support.fsdp2_trace import trace
from support.planning_models import batch_of, build, config_of
from torch import nn

from toolkit.model.adapters.adapters import add_adapter
from toolkit.objectives.distillation import Distillation
from toolkit.objectives.grpo import Grpo
from toolkit.objectives.losses.divergence import Divergence
from toolkit.planning.memory.probe import Prober
from toolkit.planning.memory.replay import replay
from toolkit.planning.memory.state_bytes import MemoryLayout
from toolkit.planning.traffic import PARTIAL, traffic, with_teacher
from toolkit.planning.workload.unit_shapes import teacher_shapes, unit_shapes
from toolkit.planning.workload.workload import Workload
from toolkit.recipe.schema import AdapterSection
from toolkit.sharding.blocks.checkpointing import Checkpointing
from toolkit.sharding.plan.strategy import STRATEGIES, MeshShape
from toolkit.sharding.plan.units import plan_units

CASES: list[Any] = [
    ("zero3", MeshShape(1, 8), 2, "bf16", "llama", {"width": 256, "layers": 4}, 64, 2048, False),
    ("zero3", MeshShape(1, 2), 1, "no", "qwen2", {"layers": 5}, 96, 4096, False),
    ("zero2", MeshShape(1, 4), 2, "bf16", "qwen3", {"width": 256, "layers": 2}, 16, 256, False),
    ("zero1", MeshShape(1, 4), 1, "bf16", "llama", {"layers": 2}, 160, 256, True),
    ("hybrid", MeshShape(2, 4), 1, "bf16", "qwen2", {"width": 256, "layers": 2}, 32, 2048, True),
    ("zero3", MeshShape(1, 1), 2, "bf16", "llama", {"layers": 4}, 48, 2048, False),
]
CUT: list[Any] = [
    ("zero3", MeshShape(1, 2, tensor=2), 2, "bf16", "llama", {"width": 256, "layers": 4}, 64, 2048, False),
    ("hybrid", MeshShape(2, 2, tensor=2), 1, "bf16", "qwen2", {"width": 256, "layers": 2}, 32, 2048, False),
    ("zero3", MeshShape(1, 1, tensor=4), 1, "no", "llama", {"layers": 4}, 48, 2048, False),
]
"""With tensor groups, which cut the model. All ranks share what is frozen."""


def workload(precision: str, teacher: str, sizes: dict[str, int], tokens: int, vocabulary: int, lora: bool) -> Workload:
    model = build(config_of("llama", 3, vocabulary))
    if lora:
        model = add_adapter(model, AdapterSection(kind="lora", r=8), None)
    dtype = {"bf16": torch.bfloat16, "no": torch.float32}[precision]
    asked = build(config_of(teacher, sizes["layers"], vocabulary + 64, sizes.get("width", 128)), dtype=dtype)

    def objective(model: nn.Module, teacher: nn.Module) -> Distillation:
        return Distillation(model, False, teacher, Divergence("forward_kl"))

    return Workload(
        model,
        objective,
        partial(batch_of, "llama", tokens, vocabulary),
        precision,
        tokens,
        teacher=asked.requires_grad_(False),
    )


def of_reference(precision: str, _: str, sizes: dict[str, int], tokens: int, vocabulary: int, __: bool) -> Workload:
    """Completions that were sampled, a row each, and a frozen copy of the model as the reference."""
    config = config_of("llama", sizes["layers"], vocabulary, sizes.get("width", 128))
    dtype = {"bf16": torch.bfloat16, "no": torch.float32}[precision]

    def objective(model: nn.Module, reference: nn.Module) -> Grpo:
        return Grpo(model, "grpo", 0.1, tokens, reference=reference)

    def batch(size: int) -> dict[str, torch.Tensor]:
        found = batch_of("llama", tokens, vocabulary, size)
        segments = torch.arange(size)[:, None].expand(size, tokens).clone()
        drawn, advantages = torch.zeros(size, tokens), torch.zeros(size)
        return {**found, "segments": segments, "drawn": drawn, "advantages": advantages}

    model, reference = build(config), build(config, dtype=dtype).requires_grad_(False)
    return Workload(model, objective, batch, precision, tokens, teacher=reference)


GRID = list(itertools.product(CASES, (workload, of_reference), (None, Checkpointing(1))))


@pytest.mark.parametrize(
    ("case", "made", "checkpointing"),
    # One in five: with and without checkpoints, of either kind of frozen model.
    [
        *(pytest.param(*one, marks=pytest.mark.slow if i % 5 == 0 else pytest.mark.grid) for i, one in enumerate(GRID)),
        *(pytest.param(case, workload, None, marks=pytest.mark.slow) for case in CUT),
    ],
)
def test_the_plan_is_the_trace(case: Any, made: Any, checkpointing: Checkpointing | None) -> None:
    name, mesh, accumulation, precision, *shape = case
    work, strategy = replace(made(precision, *shape), tensor=mesh.tensor), STRATEGIES[name]
    traced = trace(work, strategy, mesh, 2, accumulation, checkpointing)
    prober = Prober(work)
    probe = prober.probe(2, checkpointing)
    assert work.teacher is not None
    asked = teacher_shapes(work.teacher, plan_units(work.teacher), precision, mesh.tensor)
    own = unit_shapes(work.model if mesh.tensor == 1 else work.model_copy(), prober.plan, precision)
    compute = 2 if precision == "bf16" else None
    moments = replay([*asked, *own], probe, strategy, MemoryLayout(mesh.shard, compute, 4, 8), accumulation)
    peak = max(moments, key=lambda memory: memory.total - memory.optimizer)
    assert (peak.total - peak.optimizer) / traced.peak == pytest.approx(1, abs=0.02), (peak, traced)

    head = prober.teacher_head if probe.gathers_head else None
    sent = traffic(own, strategy, mesh, accumulation=accumulation, compute_bytes=compute)
    sent = with_teacher(sent, asked, head, mesh, accumulation, compute)
    found = {kind: size for kind, size in sent.whole.items() if size and kind != PARTIAL}  # of which a trace has none
    assert found == traced.traffic
