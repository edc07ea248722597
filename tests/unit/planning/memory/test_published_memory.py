"""The planner's memory against figures that others measured on GPUs and published.

KempnerForge on H200s (github.com/KempnerInstitute/KempnerForge, benchmarks/mfu_scaling/mfu_scaling.md of
2026-04-05 and benchmarks/config_validation/config_validation.md of 2026-04-06): Llama-3 shapes under FSDP2,
4096 tokens, every block checkpointed, weights, gradients and moments in bfloat16, reduced in float32,
gradients summed whole until the last micro-batch (`set_requires_gradient_sync(False)`), units resharded
after forward, the root's too. Peaks are `max_memory_allocated`, in GiB.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from accelerate import init_empty_weights
from support import fsdp2_trace as traces
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from toolkit.planning.memory import probe
from toolkit.planning.memory.probe import Prober
from toolkit.planning.memory.replay import Memory, replay
from toolkit.planning.memory.state_bytes import MemoryLayout
from toolkit.planning.workload.unit_shapes import unit_shapes
from toolkit.planning.workload.workload import Workload
from toolkit.sharding import apply
from toolkit.sharding.blocks.checkpointing import Checkpointing
from toolkit.sharding.plan.strategy import STRATEGIES, MeshShape, Strategy
from toolkit.sharding.plan.unit_plan import UnitPlan
from toolkit.sharding.plan.units import plan_units

GIB = 2**30
VOCABULARY, TOKENS, HEADS, GROUPS = 128256, 4096, 32, 8
SUMMED_WHOLE = Strategy("summed whole", True, False, True, False, "zero3 that reduces once per optimizer step")


@dataclass(frozen=True)
class Published:
    """`parameters` of the model, in billions; `gib`: measured."""

    parameters: float
    width: int
    layers: int
    heads: int
    ranks: int
    rows: int
    accumulation: int
    gib: float


ROWS = (
    Published(14.84, 5120, 40, 40, 8, 4, 4, 88.5),
    Published(8.03, 4096, 32, 32, 4, 4, 2, 61.1),
    Published(8.03, 4096, 32, 32, 2, 2, 4, 62.4),
    Published(8.03, 4096, 32, 32, 4, 8, 4, 81.0),
    Published(8.03, 4096, 32, 32, 32, 4, 4, 51.3),
)


class Norm(nn.Module):
    """RMS norm in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (scaled * self.weight).to(x.dtype)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Block(nn.Module):
    """Keys and values are repeated for the queries' heads before the attention."""

    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.size, self.repeats = width // heads, heads // GROUPS
        self.attention_norm, self.mlp_norm = Norm(width), Norm(width)
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, GROUPS * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        cos, sin = (torch.empty(x.shape[1], self.size // 2, dtype=x.dtype) for _ in range(2))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        k, v = (tensor.repeat_interleave(self.repeats, dim=1) for tensor in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(out.transpose(1, 2).flatten(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.attention_norm(x))
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    def __init__(self, row: Published) -> None:
        super().__init__()
        hidden = -(-int(4 * row.width * (2 / 3) * 1.3) // 256) * 256
        self.embed = nn.Embedding(VOCABULARY, row.width)
        self.layers = nn.ModuleList(Block(row.width, hidden, row.heads) for _ in range(row.layers))
        self.norm = Norm(row.width)
        self.head = nn.Linear(row.width, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class KeepsLogits:
    """Cross-entropy in the type of the logits, which the training loop's local name keeps over backward."""

    unit = "tokens"

    def loss_sum(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.logits = model(batch["ids"])
        return F.cross_entropy(self.logits.flatten(0, 1), batch["labels"].flatten())


@cache
def workload(row: Published) -> Workload:
    with init_empty_weights(include_buffers=False):
        model = Llama(row).to(torch.bfloat16)

    def batch(rows: int) -> dict[str, torch.Tensor]:
        ids = torch.empty(rows, TOKENS, dtype=torch.long)
        return {"ids": ids, "labels": torch.empty_like(ids)}

    return Workload(model, lambda _model: KeepsLogits(), batch, "no", TOKENS)


def resharding(plan: UnitPlan) -> UnitPlan:
    """The root, too, is resharded after forward."""
    return UnitPlan(tuple(replace(unit, reshard_after_forward=True) for unit in plan.units))


def planned(row: Published) -> Memory:
    work = workload(row)
    prober = Prober(work)
    units = unit_shapes(work.model, resharding(prober.plan), "no")
    layout = MemoryLayout(row.ranks, None, reduce=4, optimizer=4)
    found = replay(units, prober.probe(row.rows, Checkpointing(1)), SUMMED_WHOLE, layout, row.accumulation)
    return max(found, key=lambda memory: memory.total)


@pytest.fixture
def their_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is cast: not the logits either."""

    def policies(*_args: object) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy]:
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        return policy, policy

    monkeypatch.setattr(apply, "precision_policies", policies)
    monkeypatch.setattr(probe, "precision_policies", policies)


@pytest.mark.slow
@pytest.mark.usefixtures("their_policy")
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_h200s(row: Published) -> None:
    peak = planned(row)
    work = workload(row)
    parameters = sum(parameter.numel() for parameter in work.model.parameters())
    assert parameters == pytest.approx(row.parameters * 1e9, rel=1e-3)
    error = peak.total / GIB / row.gib - 1
    print(f"published {row.gib} GiB, planned {peak.total / GIB:.1f} GiB ({peak.moment}), {100 * error:+.1f} %")
    assert abs(error) <= 0.02, peak


@pytest.mark.slow
@pytest.mark.usefixtures("their_policy")
def test_a_trace_of_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ROWS[1]
    monkeypatch.setattr(traces, "plan_units", lambda *given: resharding(plan_units(*given)))
    found = traces.trace(
        workload(row), SUMMED_WHOLE, MeshShape(1, row.ranks), row.rows, row.accumulation, Checkpointing(1)
    )
    optimizer = 4 * row.parameters * 1e9 / row.ranks
    assert (found.peak + optimizer) / GIB == pytest.approx(row.gib, rel=0.02)
    peak = planned(row)
    assert peak.total - peak.optimizer == pytest.approx(found.peak, rel=0.005)


# The ZeRO paper


def states(name: str, shard: int) -> dict[str, int]:
    """Bytes between the window's last backward and the optimizer, of bf16 compute with float32 masters."""
    work = workload(ROWS[1])
    prober = Prober(work)
    units = unit_shapes(work.model, prober.plan, "bf16")
    strategy = STRATEGIES[name]
    found = replay(units, prober.probe(1, Checkpointing(1)), strategy, MemoryLayout(shard, 2, 4, 8), 1)
    step = next(memory for memory in found if memory.moment == "optimizer step")
    return step.parts() | {"whole": 2 * sum(parameter.numel for shape in units for parameter in shape.parameters)}


def test_the_zero_paper() -> None:
    """Figure 1 of arXiv 1910.02054: 7.5e9 parameters take 120 GB on each of 64 GPUs, and 1.9 GB in stage 3.

    That is 2 + 2 + 12 bytes a parameter; here 4 of master, 4 of gradient and 8 of moments, the same 16.
    Its 31.4 GB (stage 1) and 16.6 GB (stage 2) hold bf16 weights whole: so does FSDP2, inside the window
    alone, and as its gradients are sharded in both, 2 P + 16 P / 64 = 16.9 GB.
    """
    parameters = sum(p.numel() for p in workload(ROWS[1]).model.parameters())
    for name, shard, gigabytes in (("ddp", 1, 120.0), ("zero3", 64, 1.88), ("zero1", 64, 1.88)):
        parts = states(name, shard)
        held = parts["parameters"] + parts["gradients"] + parts["optimizer"]
        assert held / parameters == pytest.approx(gigabytes / 7.5, rel=0.01), name
    parts = states("zero2", 64)
    held = parts["whole"] + parts["parameters"] + parts["gradients"] + parts["optimizer"]
    assert held / parameters == pytest.approx(16.875 / 7.5, rel=0.01)
