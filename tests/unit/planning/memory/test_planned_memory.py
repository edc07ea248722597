"""The planner's memory against a trace of the real FSDP2, on many configurations drawn from a seed."""

from __future__ import annotations

import multiprocessing
import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import pytest
from support.fsdp2_trace import trace
from support.planning_models import DECODERS, KINDS, workload
from support.ranks import PRELOADED

from toolkit.planning.memory.probe import Prober
from toolkit.planning.memory.replay import Memory, replay
from toolkit.planning.memory.state_bytes import MemoryLayout
from toolkit.planning.workload.unit_shapes import unit_shapes
from toolkit.planning.workload.workload import Workload
from toolkit.sharding.blocks.checkpointing import Checkpointing
from toolkit.sharding.plan.strategy import STRATEGIES, MeshShape

CONFIGURATIONS = 60


@dataclass(frozen=True)
class Configuration:
    """One row of the grid; `checkpointing`: every how many blocks, and whether to the host."""

    kind: str
    strategy: str
    mesh: MeshShape
    micro_batch: int
    accumulation: int
    checkpointing: tuple[int, bool] | None
    layers: int
    tokens: int
    precision: str
    lora: bool
    vocabulary: int
    whole_logits: bool

    @property
    def checkpointed(self) -> Checkpointing | None:
        return Checkpointing(*self.checkpointing) if self.checkpointing else None

    def workload(self) -> Workload:
        return workload(
            self.kind,
            precision=self.precision,
            tokens=self.tokens,
            layers=self.layers,
            lora=self.lora,
            dropout=0.1,
            vocabulary=self.vocabulary,
            whole_logits=self.whole_logits,
        )


@dataclass(frozen=True)
class Compared:
    """Peaks without the optimizer's state, bytes, and when they are."""

    configuration: Configuration
    planned: int
    planned_moment: str
    traced: int
    traced_moment: str

    @property
    def error(self) -> float:
        return self.planned / self.traced - 1

    def __str__(self) -> str:
        return (
            f"{100 * self.error:+.3f} %  planned {self.planned} ({self.planned_moment}), "
            f"traced {self.traced} ({self.traced_moment}); {self.configuration}"
        )


def drawn(seed: int, number: int) -> list[Configuration]:
    choose = random.Random(seed)
    return [_drawn(choose, KINDS[i % len(KINDS)]) for i in range(number)]


def _drawn(choose: random.Random, kind: str) -> Configuration:
    strategy = choose.choice(["zero1", "zero2", "zero3", "hybrid"])
    ranks = choose.choice([1, 2, 4, 8, 16, 64])
    mesh = MeshShape(1, ranks)
    if strategy == "hybrid":
        shard = choose.choice([2, 4, 8])
        mesh = MeshShape(choose.choice([2, 4]), shard)
    return Configuration(
        kind=kind,
        strategy=strategy,
        mesh=mesh,
        micro_batch=choose.choice([1, 2, 3]),
        accumulation=choose.choice([1, 1, 1, 1, 2, 3]),
        checkpointing=choose.choice([None, None, (1, False), (2, False), (1, True)]),
        layers=2 if kind == "t5" else choose.choice([2, 2, 3]),
        tokens=choose.choice([16, 48, 160]),
        precision="bf16" if kind == "mixtral" else choose.choice(["bf16", "bf16", "no"]),
        lora=kind in DECODERS and kind != "mixtral" and choose.random() < 0.3,
        vocabulary=choose.choice([256, 2048]),
        whole_logits=choose.random() < 0.5,
    )


DECISIVE = [
    Configuration("llama", "zero3", MeshShape(1, 8), 1, 1, (1, False), 4, 8, "bf16", False, 256, False),
    Configuration("llama", "zero3", MeshShape(1, 2), 1, 1, (1, False), 2, 4, "bf16", False, 4096, False),
    Configuration("llama", "zero3", MeshShape(1, 8, 4), 1, 1, (1, False), 6, 8, "bf16", False, 256, False),
    Configuration("gpt2", "zero3", MeshShape(1, 8, 2), 1, 2, None, 3, 48, "no", False, 256, False),
    Configuration("qwen3", "zero3", MeshShape(1, 16, 8), 2, 1, (1, False), 6, 16, "bf16", True, 256, False),
]
"""Few tokens, so that FSDP2's buffers decide: the prefetch in backward; the last gradient of the embeddings; copies
that the ranks of a node keep from forward to backward."""


def compare(c: Configuration) -> Compared:
    found = trace(c.workload(), STRATEGIES[c.strategy], c.mesh, c.micro_batch, c.accumulation, c.checkpointed)
    peak = peak_without_optimizer(planned(c))
    return Compared(c, peak.total - peak.optimizer, peak.moment, found.peak, found.moment)


def planned(c: Configuration) -> list[Memory]:
    work = c.workload()
    prober = Prober(work)
    probe = prober.probe(c.micro_batch, c.checkpointed)
    units = unit_shapes(work.model, prober.plan, c.precision)
    layout = MemoryLayout(
        c.mesh.shard,
        2 if c.precision == "bf16" else None,
        4,
        optimizer=8,
        reshard_after_forward=c.mesh.reshard_after_forward,
    )
    return replay(units, probe, STRATEGIES[c.strategy], layout, c.accumulation)


def peak_without_optimizer(found: list[Memory]) -> Memory:
    return max(found, key=lambda memory: memory.total - memory.optimizer)


EVERY_THIRD, ALL = slice(None, None, 3), slice(None)


@pytest.fixture(
    scope="module",
    params=[pytest.param(EVERY_THIRD, marks=pytest.mark.slow), pytest.param(ALL, marks=pytest.mark.grid)],
    ids=["third", "all"],
)
def grid(request: pytest.FixtureRequest) -> list[Compared]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        return list(pool.map(compare, [*drawn(20, CONFIGURATIONS)[request.param], *DECISIVE], chunksize=2))


def test_the_grid_is_wide() -> None:
    configurations = drawn(20, CONFIGURATIONS)
    assert len(configurations) >= 60
    assert {c.kind for c in configurations} == {c.kind for c in configurations[EVERY_THIRD]} == set(KINDS)
    for name, number in (("strategy", 4), ("mesh", 8), ("accumulation", 3), ("checkpointing", 4), ("precision", 2)):
        assert len({getattr(c, name) for c in configurations}) >= number, name
    assert sum(c.lora for c in configurations) >= 6


def test_the_plan_is_the_trace(grid: list[Compared]) -> None:
    errors = sorted(grid, key=lambda compared: compared.error)
    table = "\n".join(map(str, errors))
    mean = sum(abs(compared.error) for compared in grid) / len(grid)
    assert mean <= 0.01, table
    assert errors[-1].error <= 0.05, table
    assert errors[0].error >= -0.005, table


def test_where_the_buffers_decide(grid: list[Compared]) -> None:
    for compared in grid:
        if compared.configuration in DECISIVE:
            assert abs(compared.error) <= 1e-3, str(compared)
