"""The planner's memory against real runs on gloo ranks, through the toolkit's backend and a stock Accelerator.

What is alive in a real run is counted by the same ledger on real tensors, from the second step on. The
optimizer's state is left out on both sides; so is host memory of the offload engine, which on a CPU looks
like any other.
"""

from __future__ import annotations

import gc
import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from planning_models import workload
from ranks import meet, run_on_ranks

from toolkit.planning.probe import Prober
from toolkit.planning.replay import Layout, Memory, replay
from toolkit.planning.trace import trace
from toolkit.planning.units import unit_shapes
from toolkit.planning.workload import Workload
from toolkit.sharding.apply import Checkpointing
from toolkit.sharding.strategy import STRATEGIES, MeshShape

RANKS, ROWS = 2, 2


@dataclass(frozen=True)
class Case:
    strategy: str
    precision: str = "no"
    accumulation: int = 1
    kind: str = "llama"
    checkpointing: bool = False
    offload: bool = False
    device_state_gib: float = 0.0

    def workload(self, meta: bool) -> Workload:
        return workload(self.kind, precision=self.precision, layers=3, meta=meta)

    @property
    def checkpointed(self) -> Checkpointing | None:
        return Checkpointing(1) if self.checkpointing else None


TWICE = list(itertools.product(("no", "bf16"), (1, 2)))
TRACED = [Case(strategy, *pair) for strategy in ("zero1", "zero2", "zero3") for pair in TWICE]
TRACED += [Case("zero3", "bf16", 2, "qwen2"), Case("zero3", "bf16", checkpointing=True), Case("zero2", "no", 2, "gpt2")]
WHOLE = [Case("ddp", *pair) for pair in TWICE]
OFFLOADED = [Case("zero3", *pair, offload=True) for pair in TWICE]
OFFLOADED += [Case("zero3", "bf16", offload=True, device_state_gib=0.002)]


def prepared(case: Case, work: Workload) -> tuple[Any, Any, Any]:
    from accelerate import Accelerator

    from toolkit.sharding import OffloadSettings, sharding_kwargs
    from toolkit.sharding.plugin import accumulation_plugin, reset_accelerate

    meet()
    reset_accelerate()
    offload = OffloadSettings(executor="cpu_torch", device_state_gib=case.device_state_gib) if case.offload else None
    accelerator = Accelerator(
        mixed_precision=case.precision,
        gradient_accumulation_plugin=accumulation_plugin(case.accumulation),
        **sharding_kwargs(case.strategy, offload=offload, checkpointing=case.checkpointed),
    )
    optimizer = torch.optim.AdamW(work.model.parameters(), lr=1e-3, fused=True)
    return accelerator, *accelerator.prepare(work.model, optimizer)


def measure(case: Case) -> tuple[int, int]:
    """The most bytes alive in a step up to the optimizer; and of the largest clone of a collective's input."""
    from toolkit.planning.fake import Ledger

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

    window()
    optimizer.step()
    ledger = Ledger()
    for tensor in (*model.parameters(), *model.buffers(), *batch.values(), *_buckets(case, model)):
        ledger.see(tensor)
    optimizer.zero_grad()
    device = ledger.current
    for found in gc.get_objects():
        if isinstance(found, torch.Tensor):
            ledger.see(found)
    elsewhere = ledger.current - device
    ledger.restart()
    with ledger:
        window()
    _close(accelerator)
    return ledger.peak - elsewhere, elsewhere


def _buckets(case: Case, model: Any) -> list[torch.Tensor]:
    """DDP's, which the gradients are views of and which stay when they are set to None."""
    return [p.grad for p in model.parameters() if p.grad is not None] if case.strategy == "ddp" else []


def _close(accelerator: Any) -> None:
    plugin = accelerator.state.fsdp_plugin
    if plugin is not None:
        plugin.close()
    accelerator.end_training()


def measure_all(cases: list[Case]) -> list[tuple[int, int]]:
    return [measure(case) for case in cases]


def planned(case: Case) -> Memory:
    work = case.workload(meta=True)
    whole = case.strategy == "ddp"
    prober = Prober(work, whole)
    probe = prober.probe(ROWS, case.checkpointed)
    units = unit_shapes(work.model, prober.plan, case.precision)
    compute = 2 if case.precision == "bf16" else None
    layout = Layout(1 if whole else RANKS, compute, 4, optimizer=0, offload=case.offload)
    found = replay(units, probe, STRATEGIES[case.strategy], layout, case.accumulation)
    return max(found, key=lambda memory: memory.total - memory.optimizer)


def traced(case: Case) -> Any:
    shape = MeshShape(1, RANKS)
    strategy = STRATEGIES[case.strategy]
    return trace(case.workload(meta=True), strategy, shape, ROWS, case.accumulation, case.checkpointed)
