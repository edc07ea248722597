"""Estimates the seconds of one optimizer step from work, traffic and hardware.

Within a micro-batch, all-gathers overlap with the compute of the forward and of the backward, and
reductions with the backward; what the first unit waits for, and what the last unit leaves, overlaps with
nothing. Offloaded state is stepped as toolkit.sharding.offload schedules it: behind the next forward
if gradients are clipped, else possibly behind the backward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from toolkit.planning.time.hardware import ADAM_BYTES, Hardware, Quantile
from toolkit.planning.time.roofline import Work
from toolkit.planning.time.traffic import STATE_BYTES, HostExecutor, OffloadPlan, Traffic
from toolkit.sharding.plan.strategy import MeshShape, Strategy

HOST_BYTES: dict[HostExecutor, tuple[int, int]] = {
    "cpu_fused": (32, 36),
    "cpu_torch": (54, 46),
    "device_stream": (28, 32),
}
"""DRAM traffic per parameter of a step on the host, copies to and from the device included: with gradients
in 16 bits (one rank, no accumulation) and in float32. torch's executor casts the former first."""

Bound = Literal["compute", "network", "PCIe", "host", "sampling"]


@dataclass(frozen=True)
class ModelSegment:
    """A part of the model that runs `count` times per micro-batch.

    With activation checkpointing, `backward` holds the second forward.
    """

    name: str
    forward: Work
    backward: Work
    count: int = 1


@dataclass(frozen=True)
class StepParts:
    """Seconds of one optimizer step that add up to its time.

    Attributes:
        communication: collectives that no compute hides, except `exchange`.
        exchange: exchange of tokens for heads if ranks share rows, of tokens and sums if they cut matrices; layers
            wait for it.
        optimizer: the step on the device.
        host: the step on the host and its copies, as far as nothing hides them.
        sampling: completions that the model learns from, before their forward.
    """

    compute_forward: float
    compute_backward: float
    communication: float
    exchange: float
    optimizer: float
    host: float
    sampling: float = 0.0

    @property
    def total(self) -> float:
        return float(sum(dataclasses.astuple(self)))


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step.

    Attributes:
        low, mid, high: the optimistic time, the best guess, the pessimistic time.
        parts: the parts of `mid`.
        bound_by: the resource that is busy longest in a step; `network` is any link between devices.
    """

    low: float
    mid: float
    high: float
    parts: StepParts
    bound_by: Bound


def step_time(
    segments: Sequence[ModelSegment],
    traffic: Traffic,
    strategy: Strategy,
    mesh: MeshShape,
    hardware: Hardware,
    *,
    accumulation: int = 1,
    dtype: str = "bfloat16",
    offload: OffloadPlan | None = None,
) -> StepTime:
    """Returns the time of one optimizer step of `accumulation` micro-batches.

    Args:
        segments: the whole model, for one micro-batch.
        traffic: the result of `toolkit.planning.time.traffic.traffic` for the same strategy, mesh, accumulation and
            offload.
        dtype: dtype of matrix products: `bfloat16`, `float16` or `float32`.
    """
    job = _Job(tuple(segments), traffic, strategy, mesh, hardware, accumulation, dtype, offload)
    low, mid, high = (job.parts(quantile) for quantile in ("low", "mid", "high"))
    return StepTime(low.total, mid.total, high.total, mid, job.bound_by())


# Collectives


@dataclass(frozen=True)
class _Group:
    """Ranks that run a collective together.

    Attributes:
        ranks: ranks of the group.
        local: ranks of the group on one node.
        beside: groups of this kind that share a node's network.
    """

    ranks: int
    local: int
    beside: int

    def seconds(self, size: float, hardware: Hardware, quantile: Quantile) -> float:
        """Returns the time of an all-gather or a reduce-scatter whose whole tensors have `size` bytes."""
        # Each of N ranks sends (N - 1) / N of the whole around a ring. Of n nodes each passes on (n - 1) / n, and the
        # groups that begin on a node share its cards; both go on at once, so the slower bounds.
        link = hardware.transfer(hardware.link_bandwidth, quantile)
        network = hardware.transfer(hardware.network_bandwidth, quantile)
        nodes = -(-self.ranks // self.local)
        inside = size * (self.ranks - 1) / self.ranks / link if self.local > 1 else 0.0
        between = size * (nodes - 1) / nodes * self.beside / network
        return max(inside, between)


def shard_group(mesh: MeshShape, devices_per_node: int) -> _Group:
    """Returns a shard group: neighbouring ranks."""
    # Shard groups are the inner axis of the mesh: neighbours, on one node as far as it goes.
    # With tensor groups of n neighbours they are each n-th rank, and n of them are on the same nodes.
    devices_per_node = max(1, devices_per_node // mesh.tensor)
    local = min(mesh.shard, devices_per_node)
    on_node = min(mesh.shard * mesh.replicate, devices_per_node)
    return _Group(mesh.shard, local, max(1, on_node // local) * mesh.tensor)


def backward_group(mesh: MeshShape, devices_per_node: int) -> _Group:
    """Returns the ranks among which backward gathers: those of a shard group, or fewer neighbours."""
    replicas = mesh.replicate * mesh.shard // mesh.backward
    return shard_group(MeshShape(replicas, mesh.backward, tensor=mesh.tensor), devices_per_node)


def replica_group(mesh: MeshShape, devices_per_node: int) -> _Group:
    """Returns a replica group: ranks that are `mesh.shard` apart."""
    # It has one rank of each shard group, so two are on one node only if a node holds several groups.
    devices_per_node = max(1, devices_per_node // mesh.tensor)
    local = max(1, min(mesh.replicate, devices_per_node // mesh.shard))
    on_node = min(mesh.shard * mesh.replicate, devices_per_node)
    return _Group(mesh.replicate, local, max(1, on_node // local) * mesh.tensor)


# One job


@dataclass(frozen=True)
class _Communication:
    """Seconds of one optimizer step's collectives.

    Attributes:
        first: the part of a forward's all-gathers that it waits for.
        last: the part of a backward's reductions that is left at its end.
    """

    forward: float
    backward: float
    reduce: float
    all_reduce: float
    first: float
    last: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.reduce + self.all_reduce


@dataclass(frozen=True)
class _Host:
    """Seconds of the offloaded optimizer step.

    Attributes:
        step: reading and writing state in DRAM.
        gradients: copies of gradients to the host, during backward.
        to_host: all copies to the host; `to_device` are those to the device.
        edge: share of the unit that the next forward needs first and whose gradient comes last.
    """

    step: float
    gradients: float
    to_host: float
    to_device: float
    edge: float

    @property
    def busy(self) -> float:
        """The slowest of step and copies, because units pass through them one after the other."""
        return max(self.step, self.to_host - self.gradients, self.to_device)


@dataclass(frozen=True)
class _Job:
    segments: tuple[ModelSegment, ...]
    traffic: Traffic
    strategy: Strategy
    mesh: MeshShape
    hardware: Hardware
    accumulation: int
    dtype: str
    offload: OffloadPlan | None

    def parts(self, quantile: Quantile) -> StepParts:
        """Returns the parts of a step: all `accumulation` micro-batches and the optimizer's step."""
        forward, backward = self.compute(quantile)
        return StepParts(
            compute_forward=self.accumulation * forward,
            compute_backward=self.accumulation * backward,
            communication=self.exposed_communication(forward, backward, quantile),
            exchange=self.exchange(quantile),
            optimizer=self.device_step(quantile),
            host=self.exposed_host(forward, backward, quantile),
        )

    def compute(self, quantile: Quantile) -> tuple[float, float]:
        """Returns the seconds of forward and backward of one micro-batch."""
        forward = sum(s.count * s.forward.seconds(self.hardware, self.dtype, quantile) for s in self.segments)
        backward = sum(s.count * s.backward.seconds(self.hardware, self.dtype, quantile) for s in self.segments)
        return forward, backward

    def communication(self, quantile: Quantile) -> _Communication:
        traffic, hardware = self.traffic, self.hardware
        shard = shard_group(self.mesh, hardware.devices_per_node)
        replica = replica_group(self.mesh, hardware.devices_per_node)
        whole = traffic.whole
        in_backward = whole["all_gather"] - traffic.forward_all_gather
        last = shard.seconds(traffic.last_reduce, hardware, quantile) if traffic.reduce_passes else 0.0
        if whole["all_reduce"] and not self.strategy.sharded:
            # An all-reduce is a reduce-scatter and an all-gather.
            last = 2 * replica.seconds(traffic.last_reduce, hardware, quantile)
        return _Communication(
            forward=shard.seconds(traffic.forward_all_gather, hardware, quantile),
            backward=backward_group(self.mesh, hardware.devices_per_node).seconds(in_backward, hardware, quantile),
            reduce=shard.seconds(whole["reduce_scatter"], hardware, quantile),
            all_reduce=2 * replica.seconds(whole["all_reduce"], hardware, quantile),
            first=shard.seconds(traffic.first_gather, hardware, quantile),
            last=last,
        )

    def exposed_communication(self, forward: float, backward: float, quantile: Quantile) -> float:
        """Returns the communication that forwards and backwards do not hide."""
        sent = self.communication(quantile)
        gathers = self.traffic.gather_passes
        exposed = 0.0
        if gathers:
            # The first gather has nothing to hide behind; of the others, what takes longer than the forward.
            exposed += gathers * (sent.first + _excess(sent.forward / gathers - sent.first, forward))
        gathers_again = gathers if sent.backward else 0
        # The last backwards reduce; under zero1 only the last one does.
        for i in range(1, self.accumulation + 1):  # from the last micro-batch
            is_reduced = i <= self.traffic.reduce_passes
            busy = sent.backward / gathers_again if i <= gathers_again else 0.0
            busy += sent.reduce / self.traffic.reduce_passes if is_reduced else 0.0
            busy += sent.all_reduce if i == 1 else 0.0
            last = sent.last if is_reduced or (i == 1 and sent.all_reduce) else 0.0
            exposed += last + _excess(busy - last, backward)
        return exposed

    def exchange(self, quantile: Quantile) -> float:
        """Returns the time of exchanging tokens for heads, with experts or in tensor groups; the model waits for it."""
        parts, per_node = self.traffic.group, self.hardware.devices_per_node
        if parts == 1:
            return 0.0
        local = min(parts, per_node)
        group = _Group(parts, local, max(1, per_node // local))
        sent = self.traffic.exchanged + self.traffic.partial
        return group.seconds(sent * parts / (parts - 1), self.hardware, quantile)

    def device_step(self, quantile: Quantile) -> float:
        """Returns the time of Adam over the state that is on the device."""
        share = 1.0 if self.offload is None else self.offload.device_share
        # Adam does a dozen FLOPs per 28 bytes: memory bounds it on every device.
        return ADAM_BYTES * share * self.traffic.trainable / self.hardware.memory(quantile)

    def host(self, offload: OffloadPlan, quantile: Quantile) -> _Host:
        hardware, traffic = self.hardware, self.traffic
        ranks_on_node = min(self.mesh.num_ranks, hardware.devices_per_node)
        # The ranks of a node step at the same time, out of the same DRAM.
        dram = hardware.transfer(hardware.host_memory_bandwidth, quantile) / ranks_on_node
        pcie = hardware.transfer(hardware.host_link_bandwidth, quantile)
        in_16_bits = self.mesh.shard * self.mesh.replicate == 1 and self.accumulation == 1 and self.dtype != "float32"
        hosted = traffic.trainable * (1 - offload.device_share)
        state = STATE_BYTES * hosted if offload.executor == "device_stream" else 0
        # State stays on the device for the first units first.
        edge = _excess(traffic.edge_share, offload.device_share) / max(1e-9, 1 - offload.device_share)
        return _Host(
            step=HOST_BYTES[offload.executor][not in_16_bits] * hosted / dram,
            gradients=(traffic.device_to_host - state) / pcie,
            to_host=traffic.device_to_host / pcie,
            to_device=traffic.host_to_device / pcie,
            edge=edge,
        )

    def exposed_host(self, forward: float, backward: float, quantile: Quantile) -> float:
        """Returns the part of the host's step that the next forward, or without clipping the backward, does not hide.

        During backward, units are stepped in its order: the one that the next forward needs first comes last.
        """
        if self.offload is None:
            return 0.0
        host = self.host(self.offload, quantile)
        # The next forward cannot start before its first unit has been stepped and copied back.
        first = host.edge * (host.step + host.to_device)
        if self.offload.during_backward:
            return max(first, max(host.busy, host.to_host) - backward)
        # The gradient that comes last leaves after the end of backward.
        last_copy = host.edge * host.gradients
        return last_copy + _excess(host.gradients - last_copy, backward) + max(first, host.busy - forward)

    def bound_by(self) -> Bound:
        forward, backward = self.compute("mid")
        busy: dict[Bound, float] = {
            "compute": self.accumulation * (forward + backward) + self.device_step("mid"),
            "network": self.communication("mid").total + self.exchange("mid"),
        }
        if self.offload is not None:
            host = self.host(self.offload, "mid")
            busy |= {"PCIe": max(host.to_host, host.to_device), "host": host.step}
        return max(busy, key=busy.__getitem__)


def _excess(busy: float, hidden_by: float) -> float:
    return max(0.0, busy - hidden_by)
