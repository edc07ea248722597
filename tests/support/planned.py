"""The plan of one rank's step, put together as the planner does it, for a comparison with a trace of the real FSDP2."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from support.fsdp2_trace import Traced, trace
from toolkit.planning.memory.probe import Probe, Prober
from toolkit.planning.memory.replay import Memory, replay
from toolkit.planning.memory.state_bytes import MemoryLayout
from toolkit.planning.workload.unit_shapes import UnitShape, teacher_shapes, unit_shapes
from toolkit.planning.workload.workload import Workload
from toolkit.sharding.blocks.checkpointing import Checkpointing
from toolkit.sharding.plan.strategy import STRATEGIES, MeshShape
from toolkit.sharding.plan.units import plan_units


@dataclass(frozen=True)
class Planned:
    """A step of AdamW.

    Attributes:
        micro_batch: rows.
        accumulation: micro-batches of a step.
    """

    work: Workload
    strategy: str
    mesh: MeshShape
    checkpointing: Checkpointing | None = None
    micro_batch: int = 1
    accumulation: int = 1
    by_block: bool = False

    @cached_property
    def prober(self) -> Prober:
        return Prober(self.work)

    @cached_property
    def probe(self) -> Probe:
        return self.prober.probe(self.micro_batch, self.checkpointing)

    @property
    def compute_bytes(self) -> int | None:
        return 2 if self.work.mixed_precision == "bf16" else None

    @cached_property
    def units(self) -> list[UnitShape]:
        return unit_shapes(self.work.model, self.prober.plan, self.work.mixed_precision, experts=self.work.experts)

    @cached_property
    def teacher_units(self) -> list[UnitShape]:
        teacher = self.work.teacher
        return teacher_shapes(teacher, plan_units(teacher), self.work.mixed_precision) if teacher is not None else []

    @cached_property
    def peak_moment(self) -> Memory:
        """When a rank holds most, the optimizer's state aside."""
        layout = MemoryLayout(
            self.mesh.shard, self.compute_bytes, 4, optimizer=8, reshard_after_forward=self.mesh.reshard_after_forward
        )
        shapes = [*self.teacher_units, *self.units]
        moments = replay(shapes, self.probe, STRATEGIES[self.strategy], layout, self.accumulation, self.by_block)
        return max(moments, key=lambda memory: memory.total - memory.optimizer)

    @property
    def peak(self) -> int:
        """Bytes, without the optimizer's state."""
        return self.peak_moment.total - self.peak_moment.optimizer

    def traced(self, work: Workload | None = None) -> Traced:
        """What the real FSDP2 does, of the workload or of another one like it."""
        shape = (STRATEGIES[self.strategy], self.mesh, self.micro_batch, self.accumulation, self.checkpointing)
        return trace(work or self.work, *shape, self.by_block)
