"""Computes the bytes that collectives and the host link carry in one optimizer step, from numbers alone.

FSDP2 sends (ZeRO, arXiv 1910.02054, section 7; F ranks of a shard group, k micro-batches, parameters
padded to a multiple of F rows):

- all-gather, in the compute dtype: `zero1` and `zero2` once per optimizer step; `zero3` and `hybrid` in
  every forward, and in every backward of the units that were resharded after it; only among the ranks of
  a node if these keep a copy.
- reduce-scatter of the trainable parameters, in the type of the reduction: `zero1` once per optimizer
  step; the others after every micro-batch.
- expert parallel over n ranks (`sharding.experts`): groups of F / n ranks, and the parameters of E / n experts.
- tensor parallel over n ranks (`sharding.tensor`): an all-reduce in float32 of each unit's partial gradients before
  it is reduced. Activations are counted where the model runs.
- all-reduce once per optimizer step: `ddp` of the whole gradients, `hybrid` of each rank's shard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from toolkit.planning.workload.unit_shapes import UnitShape
from toolkit.sharding.plan.strategy import MeshShape, Strategy
from toolkit.sharding.plan.unit_plan import UnitKind

STATE_BYTES = 12
"""Master and two moments in float32 (B per parameter)."""

PARTIAL, PARTIAL_BYTES = "all_reduce_in_tensor_groups", 4
"""Kind of the sums of partial gradients, and bytes of an element in them, whatever the type of the computation."""

DDP_BUCKET_BYTES = 25 * 2**20
"""torch's `bucket_cap_mb`; only the number of calls depends on it."""


@dataclass(frozen=True)
class OffloadPlan:
    """Optimizer state in host memory, as `toolkit.sharding.OffloadSettings` set it.

    Attributes:
        device_share: share of the trainable parameters whose state stays on the device.
        streams: whether the state on the host is stepped on the device, through which it streams.
    """

    device_share: float = 0.0
    streams: bool = False


@dataclass(frozen=True)
class Traffic:
    """The traffic of one optimizer step of one rank.

    Attributes:
        all_gather: bytes that this rank sends in a ring, (N - 1) / N of the whole tensors; so is `reduce_scatter`.
        all_reduce: twice that share, because a ring reduces and then gathers.
        host_to_device: bytes over the host link; gradients, state and weights of the offloaded optimizer.
        whole: bytes of the whole tensors by kind, as counted where the collective is called: an
            all-gather's output, the others' input.
        calls: number of collectives by kind.
        forward_all_gather: the part of `whole` that forwards gather; backwards gather the rest.
        exchanged: bytes of activations that this rank sends to the ranks with which it shares rows or experts.
        partial: bytes that this rank sends in a ring to sum partial gradients in its tensor group.
        sequence: ranks that share a row.
    """

    all_gather: int
    reduce_scatter: int
    all_reduce: int
    host_to_device: int
    device_to_host: int
    whole: dict[str, int] = field(hash=False)
    calls: dict[str, int] = field(hash=False)
    forward_all_gather: int
    exchanged: int = 0
    sequence: int = 1
    partial: int = 0

    @property
    def sent(self) -> int:
        """Bytes that this rank sends to other ranks."""
        return self.all_gather + self.reduce_scatter + self.all_reduce + self.exchanged + self.partial

    def between_nodes(self, mesh: MeshShape, devices_per_node: int) -> int:
        """Returns the bytes of FSDP2's and DDP's collectives that a node sends to the others."""
        per_node = max(1, devices_per_node // mesh.tensor)

        def ring(num_bytes: int, ranks: int, local: int) -> int:
            # Of n nodes each passes on (n - 1) / n of the whole, for each of the groups that begin on it.
            nodes, groups = -(-ranks // local), max(1, min(mesh.shard * mesh.replicate, per_node) // local)
            return num_bytes * (nodes - 1) * groups * mesh.tensor // nodes

        # Shard groups are neighbours; a replica group has one rank of each.
        shard, backward = min(mesh.shard, per_node), min(mesh.backward, per_node)
        replica = max(1, min(mesh.replicate, per_node // mesh.shard))
        in_backward = self.whole["all_gather"] - self.forward_all_gather
        return (
            ring(self.forward_all_gather + self.whole["reduce_scatter"], mesh.shard, shard)
            + ring(in_backward, mesh.backward, backward)
            + 2 * ring(self.whole["all_reduce"], mesh.replicate, replica)
        )


def traffic(
    units: Sequence[UnitShape],
    strategy: Strategy,
    mesh: MeshShape,
    *,
    accumulation: int = 1,
    compute_bytes: int | None = 2,
    reduce_bytes: int = 4,
    offload: OffloadPlan | None = None,
) -> Traffic:
    """Returns the traffic of one optimizer step.

    Args:
        units: units of the whole model.
        accumulation: micro-batches per optimizer step.
        compute_bytes: bytes of a gathered element: 2 under bf16 and fp16, or None without mixed precision, when each
            parameter keeps its own.
        reduce_bytes: bytes of a reduced element.
        offload: how optimizer state is offloaded, or None if it stays on the device.
    """
    # Numbers alone, so that the tests can compare with counts of the real collectives, byte by byte.
    shard, replicate = mesh.shard, mesh.replicate
    sizes = [_sent_unit(unit, shard, compute_bytes) for unit in units]
    own = sum(unit.trainable // unit.num_shards for unit in sizes)
    moved = [unit for unit in sizes if unit.num_shards > 1]
    reduced = sum(unit.trainable for unit in moved)
    gathers = _gathers(moved, strategy, mesh, accumulation)
    backwards = accumulation if strategy.reduce_each_micro_batch else 1
    reduce_passes = backwards if moved else 0
    whole = {
        "all_gather": gathers.forward + gathers.backward,
        "reduce_scatter": reduce_bytes * reduced * reduce_passes,
        "all_reduce": reduce_bytes * own if replicate > 1 else 0,
    }
    calls = _calls(sizes, strategy, gathers, reduce_passes, whole["all_reduce"])
    if mesh.tensor > 1:
        partial = [unit.partial_numel for unit in units if unit.partial_numel]
        whole[PARTIAL], calls[PARTIAL] = PARTIAL_BYTES * sum(partial) * backwards, len(partial) * backwards
    # A gradient that is reduced or summed over micro-batches is float32; otherwise it has backward's dtype.
    is_summed = shard * replicate > 1 or accumulation > 1 or any(unit.trains_float32 for unit in units)
    weights = sum(p.shard_numel(shard) * p.gathered(compute_bytes) for unit in units for p in unit.trainable)
    to_device, to_host = _host_link(own, weights, 4 if is_summed else compute_bytes or 4, offload)
    return Traffic(
        all_gather=gathers.sent,
        reduce_scatter=reduce_bytes * sum(unit.sent(unit.trainable, shard) for unit in moved) * reduce_passes,
        all_reduce=2 * whole["all_reduce"] * (replicate - 1) // replicate,
        host_to_device=to_device,
        device_to_host=to_host,
        whole=whole,
        calls=calls,
        forward_all_gather=gathers.forward,
        partial=2 * whole.get(PARTIAL, 0) * (mesh.tensor - 1) // mesh.tensor,
    )


def with_teacher(
    sent: Traffic,
    units: Sequence[UnitShape],
    head: int | None,
    mesh: MeshShape,
    accumulation: int,
    compute_bytes: int | None,
) -> Traffic:
    """Adds the gathers of a teacher, or of a reference: each unit for each forward.

    Args:
        units: its units.
        head: number of the unit that has its head, if that is gathered once more for the loss.
    """
    ranks = mesh.shard * mesh.tensor
    if ranks == 1:
        return sent
    gathered = units if head is None else (*units, units[head])
    sizes = [size for size in (_sent_unit(unit, mesh.shard, compute_bytes).gathered for unit in gathered) if size]
    whole = accumulation * sum(sizes)
    return replace(
        sent,
        all_gather=sent.all_gather + whole * (ranks - 1) // ranks,
        whole={**sent.whole, "all_gather": sent.whole["all_gather"] + whole},
        calls={**sent.calls, "all_gather": sent.calls["all_gather"] + accumulation * len(sizes)},
        forward_all_gather=sent.forward_all_gather + whole,
    )


# Units


@dataclass(frozen=True)
class _SentUnit:
    """Sizes of a unit's collectives over all ranks of a shard group, with rows padded to a multiple of the ranks.

    Attributes:
        gathered: bytes that are gathered.
        trainable: elements that have gradients, and so are reduced.
        num_shards: ranks among which it is sharded; a single rank gathers and reduces nothing.
    """

    name: str
    kind: UnitKind
    gathered: int
    trainable: int
    reshard_after_forward: bool
    num_shards: int

    def sent(self, whole: int, group: int) -> int:
        """Returns what a rank sends of `whole` among its ranks, or among `group` of them if that is fewer."""
        ranks = min(self.num_shards, group)
        return whole * (ranks - 1) // ranks


def _sent_unit(unit: UnitShape, shard: int, compute_bytes: int | None) -> _SentUnit:
    gathered = sum(p.shard_numel(shard) * p.gathered(compute_bytes) for p in unit.parameters)
    ranks = unit.num_shards(shard)
    trainable = ranks * unit.trainable_numel(shard)
    return _SentUnit(unit.name, unit.kind, ranks * gathered, trainable, unit.reshard_after_forward, ranks)


# All-gathers


@dataclass(frozen=True)
class _Gathers:
    """Bytes that the all-gathers of one optimizer step gather.

    Attributes:
        sent: bytes that a rank sends in all of them.
    """

    forward: int
    backward: int
    calls: int
    sent: int


def _gathers(units: Sequence[_SentUnit], strategy: Strategy, mesh: MeshShape, accumulation: int) -> _Gathers:
    """Returns the gathers of the units that are sharded among several ranks."""
    # zero1 and zero2 keep what the first micro-batch gathered until the step.
    forward = [unit for unit in units if unit.gathered]
    passes = (accumulation if strategy.reshard_each_micro_batch else 1) if units else 0
    again = _gathered_in_backward(forward) if strategy.reshard_each_micro_batch else []
    return _Gathers(
        forward=passes * sum(unit.gathered for unit in forward),
        backward=passes * sum(unit.gathered for unit in again),
        calls=passes * (len(forward) + len(again)),
        sent=passes
        * (
            sum(unit.sent(unit.gathered, mesh.shard) for unit in forward)
            + sum(unit.sent(unit.gathered, mesh.backward) for unit in again)
        ),
    )


def _gathered_in_backward(units: Sequence[_SentUnit]) -> list[_SentUnit]:
    """Returns the resharded units that backward reaches, and the one before them, which FSDP2 prefetches in vain."""
    order = _forward_order(units)
    # Backward ends at the first unit that is trained: with LoRA or frozen layers the ones before it are not gathered.
    first = next((i for i, unit in enumerate(order) if unit.trainable), len(order))
    # Most trained parameters of a block are before its experts, so backward has to go through these.
    first -= 0 < first < len(order) and _is_inside(order[first - 1], order[first])
    return [unit for unit in order[max(0, first - 1) :] if unit.reshard_after_forward]


def _forward_order(units: Sequence[_SentUnit]) -> list[_SentUnit]:
    """Returns units in the order in which the forward ends them.

    A tied tail holds the embeddings; the root's own parameters come last.
    """
    first = [unit for unit in _edge_units(units) if unit.kind != "root"]
    inside = {each: unit for unit in units for each in units if _is_inside(each, unit)}
    ordered = list(first)
    for unit in units:
        if unit not in first and unit not in inside:
            ordered += [*(each for each in inside if inside[each] == unit), unit]
    return ordered


def _is_inside(experts: _SentUnit, block: _SentUnit) -> bool:
    return experts.kind == "experts" and experts.name.startswith(f"{block.name}.")


def _edge_units(units: Sequence[_SentUnit]) -> list[_SentUnit]:
    """Returns the units that a forward needs first and whose gradients a backward gives last."""
    first: UnitKind = "embeddings" if any(unit.kind == "embeddings" for unit in units) else "tail"
    return [unit for unit in units if unit.kind in (first, "root")]


# The others


def _calls(
    units: Sequence[_SentUnit], strategy: Strategy, gathers: _Gathers, reduce_passes: int, all_reduce: int
) -> dict[str, int]:
    reduced = [unit for unit in units if unit.trainable]
    # DDP reduces by buckets, FSDP2 a replica group's shards by units.
    buckets = math.ceil(all_reduce / DDP_BUCKET_BYTES)
    return {
        "all_gather": gathers.calls,
        "reduce_scatter": sum(unit.num_shards > 1 for unit in reduced) * reduce_passes,
        "all_reduce": buckets if not strategy.sharded else len(reduced) if all_reduce else 0,
    }


def _host_link(trainable: int, weights: int, gradient: int, offload: OffloadPlan | None) -> tuple[int, int]:
    """Returns the bytes copied to and from the device.

    Args:
        weights: bytes of all trainable elements as they are sent to the device.
        gradient: bytes of a gradient's element; one that is not summed is copied in the compute dtype.
    """
    if offload is None:
        return 0, 0
    on_host = 1 - offload.device_share
    hosted = round(trainable * on_host)
    if offload.streams:
        return (STATE_BYTES + gradient) * hosted, (STATE_BYTES + gradient) * hosted
    return round(weights * on_host), gradient * hosted
