"""The planner's memory against real runs on gloo ranks, through the toolkit's backend and a stock Accelerator.

What is alive in a real run is counted by the same ledger on real tensors, from the second step on. The
optimizer's state is left out on both sides; so is host memory of the offload engine, which on a CPU looks
like any other.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support.backend import accelerated, close
from support.fsdp2_trace import trace
from support.planning_models import workload
from support.ranks import run_on_ranks

from toolkit.planning.memory.fake import Ledger
from toolkit.planning.memory.probe import Prober
from toolkit.planning.memory.replay import Memory, replay
from toolkit.planning.memory.state_bytes import MemoryLayout
from toolkit.planning.workload.unit_shapes import unit_shapes
from toolkit.planning.workload.workload import Workload
from toolkit.sharding import Checkpointing, OffloadSettings
from toolkit.sharding.fsdp2.fsdp import autograd_sums_gradients
from toolkit.sharding.plan.strategy import STRATEGIES, MeshShape

RANKS, ROWS, STEPS = 2, 2, 2


@dataclass(frozen=True)
class Case:
    strategy: str
    precision: str = "no"
    accumulation: int = 1
    tokens: int = 64
    kind: str = "llama"
    vocabulary: int = 512
    checkpointing: bool = False
    offload: bool = False
    device_state_gib: float = 0.0
    whole_logits: bool = True
    experts: int = 1
    tensor: int = 1

    def workload(self, meta: bool) -> Workload:
        work = workload(
            self.kind,
            precision=self.precision,
            layers=3,
            meta=meta,
            tokens=self.tokens,
            vocabulary=self.vocabulary,
            whole_logits=self.whole_logits,
        )
        return replace(work, experts=self.experts, tensor=self.tensor)

    @property
    def checkpointed(self) -> Checkpointing | None:
        return Checkpointing(1) if self.checkpointing else None


TWICE = [("no", 1, 16), ("no", 2, 64), ("bf16", 1, 64), ("bf16", 2, 16)]
"""With few tokens the peak is a reduction's, with many the loss's."""

TRACED = [Case("zero3", *shape) for shape in TWICE]
TRACED += [Case(strategy, *shape) for strategy, shape in zip(("zero1", "zero2", "zero2", "zero1"), TWICE, strict=True)]
TRACED += [Case("zero3", *shape, tensor=2) for shape in TWICE[1:3]]
TRACED += [Case("zero3", "bf16", 2, kind="qwen2", vocabulary=2048), Case("zero3", "bf16", checkpointing=True)]
WHOLE = [Case("ddp", *shape) for shape in TWICE[1:3]]
OFFLOADED = [Case("zero3", *shape, offload=True) for shape in TWICE[1:]]
OFFLOADED += [Case("zero3", "bf16", 1, 16, offload=True, device_state_gib=0.002)]
OFFLOADED += [
    Case(strategy, "bf16", accumulation, 16, "mixtral", 64, offload=True, experts=2)
    for strategy, accumulation in (("zero3", 1), ("zero1", 2))
]
if not autograd_sums_gradients():  # torch 2.15, where offload refuses what stays in float32
    OFFLOADED += [Case("zero3", "bf16", 1, 16, "ernie4_5_moe", offload=True)]
HEAD_LOSS = [Case(strategy, "bf16", vocabulary=2048, whole_logits=False) for strategy in ("zero3", "ddp")]
HEAD_LOSS += [Case("zero3", "bf16", 2, vocabulary=2048, whole_logits=False, tensor=2)]
CASES = [*TRACED, *WHOLE, *OFFLOADED, *HEAD_LOSS]


def prepared(case: Case, work: Workload) -> tuple[Any, Any, Any]:
    offload = OffloadSettings(executor="cpu_torch", device_state_gib=case.device_state_gib) if case.offload else None
    settings = {"checkpointing": case.checkpointed, "experts": case.experts, "tensor": case.tensor}
    accelerator = accelerated(case.strategy, case.accumulation, case.precision, offload=offload, **settings)
    optimizer = torch.optim.AdamW(work.model.parameters(), lr=1e-3, fused=True)
    return accelerator, *accelerator.prepare(work.model, optimizer)


def measure(case: Case) -> int:
    """The least of some steps: a collective's thread now and then holds its tensors a moment longer."""
    work = case.workload(meta=False)
    objective = work.objective(work.model)
    accelerator, model, optimizer = prepared(case, work)
    batch = work.batch(ROWS)

    def window() -> None:
        for _ in range(case.accumulation):
            with accelerator.accumulate(model):
                loss = objective.loss_sum(model, batch)
                accelerator.backward(loss)
                del loss

    def measured_step() -> int:
        ledger = Ledger()
        _flush(accelerator)
        gc.collect()
        _see(ledger, (*model.parameters(), *model.buffers(), *batch.values(), *_buckets(case, model)))
        optimizer.zero_grad()
        device = ledger.current
        _see(ledger, (found for found in gc.get_objects() if isinstance(found, torch.Tensor)))
        elsewhere = ledger.current - device
        ledger.restart()
        with ledger:
            window()
        optimizer.step()
        return ledger.peak - elsewhere

    for _ in range(2):  # DDP makes its buckets anew after the first
        optimizer.zero_grad()
        window()
        optimizer.step()
    found = min(measured_step() for _ in range(STEPS))
    close(accelerator)
    return found


def _see(ledger: Any, tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        ledger.see(tensor)


def _buckets(case: Case, model: Any) -> list[torch.Tensor]:
    """DDP's, which the gradients are views of and which stay when they are set to None."""
    return [p.grad for p in model.parameters() if p.grad is not None] if case.strategy == "ddp" else []


def _flush(accelerator: Any) -> None:
    """Until the offload engine's worker has taken its last step: what it still holds would be let go of unseen."""
    engine = getattr(accelerator.state.fsdp_plugin, "engine", None)
    if engine is not None:
        engine.flush()


def measure_all(cases: list[Case]) -> list[int]:
    return [measure(case) for case in cases]


def planned(case: Case) -> Memory:
    work = case.workload(meta=True)
    whole = case.strategy == "ddp"
    prober = Prober(work, whole)
    probe = prober.probe(ROWS, case.checkpointed)
    model = work.model if case.tensor == 1 else work.model_copy()
    units = unit_shapes(model, prober.plan, case.precision, experts=case.experts)
    compute = 2 if case.precision == "bf16" else None
    layout = MemoryLayout(1 if whole else RANKS // case.tensor, compute, 4, optimizer=0, offload=case.offload)
    found = replay(units, probe, STRATEGIES[case.strategy], layout, case.accumulation)
    return max(found, key=lambda memory: memory.total - memory.optimizer)


def traced(case: Case) -> Any:
    shape = MeshShape(1, RANKS // case.tensor, tensor=case.tensor)
    strategy = STRATEGIES[case.strategy]
    return trace(case.workload(meta=True), strategy, shape, ROWS, case.accumulation, case.checkpointed)


@pytest.fixture(scope="module")
def measured() -> dict[Case, int]:
    """By case: the rank that holds most."""
    found = run_on_ranks(measure_all, RANKS, CASES)
    return {case: max(of_ranks) for case, *of_ranks in zip(CASES, *found, strict=True)}


@pytest.mark.parametrize("case", TRACED, ids=str)
def test_the_trace_is_the_real_run(measured: dict[Case, int], case: Case) -> None:
    assert traced(case).peak == pytest.approx(measured[case], rel=1e-3)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_plan_is_the_real_run(measured: dict[Case, int], case: Case) -> None:
    """Offloaded: what the device holds. Whole: DDP with its buckets as gradients."""
    peak = planned(case)
    assert peak.total - peak.optimizer == pytest.approx(measured[case], rel=0.02), peak
