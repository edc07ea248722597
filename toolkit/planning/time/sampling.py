"""Estimates the seconds in which a model writes the completions that it learns from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from toolkit.planning.time.hardware import Hardware, Quantile
from toolkit.planning.time.roofline import Work
from toolkit.planning.time.speed import StepTime, shard_group
from toolkit.sharding.plan.strategy import MeshShape


@dataclass(frozen=True)
class Sampling:
    """What a rank does before each optimizer step.

    Attributes:
        whole: the forward of a batch of prompts with whole completions.
        asked: share of its tokens that are prompts'; these alone run at once.
        token: the forward of one further token of a batch whose cache is full.
        tokens: the most tokens of a completion; those that stop earlier take less.
        batches: batches that a rank writes.
        gathered: bytes of all units; 0 if each rank holds the whole model.
        once: whether the units are gathered once for all forwards, and not for each.
    """

    whole: Work
    asked: float
    token: Work
    tokens: int
    batches: int
    gathered: int
    once: bool

    def seconds(self, mesh: MeshShape, hardware: Hardware, dtype: str, quantile: Quantile) -> float:
        """Returns the time of a step's completions; a forward that gathers takes the longer of the two."""
        group = shard_group(mesh, hardware.devices_per_node)
        gather = group.seconds(self.gathered, hardware, quantile) if mesh.shard > 1 else 0.0
        each = 0.0 if self.once else gather
        whole, token = (work.seconds(hardware, dtype, quantile) for work in (self.whole, self.token))
        of_batch = max(self.asked * whole, each) + (self.tokens - 1) * max(token, each)
        return self.batches * of_batch + (gather if self.once else 0.0)


def with_sampling(time: StepTime, sampling: Sampling, mesh: MeshShape, hardware: Hardware, dtype: str) -> StepTime:
    """Adds the seconds of sampling to those of a step."""
    low, mid, high = (sampling.seconds(mesh, hardware, dtype, quantile) for quantile in ("low", "mid", "high"))
    return replace(
        time,
        low=time.low + low,
        mid=time.mid + mid,
        high=time.high + high,
        parts=replace(time.parts, sampling=mid),
        bound_by="sampling" if mid > time.mid else time.bound_by,
    )
