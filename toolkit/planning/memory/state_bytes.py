"""Computes the bytes that a rank holds of one unit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.planning.memory.fake import GRANULE
from toolkit.planning.workload.unit_shapes import ParameterShape, UnitShape
from toolkit.sharding.fsdp2.fsdp import autograd_sums_gradients, frees_all_gradients_before_reducing

COMPUTE_BYTES = {"no": None, "bf16": 2, "fp16": 2}
"""Bytes of an element in the compute dtype, by mixed precision; None if each parameter keeps its own."""

OPTIMIZER_BYTES = {"adamw": 8.0, "adamw_8bit": 2.03125, "adamw_4bit": 1.0625, "adamw_fp8": 2.03125, "muon": 8.0}
"""State of a trainable element on the device: two moments, with torchao's float32 scales of blocks of 256, or of 128
for 4 bits. muon keeps one moment of the blocks' matrices, half of this."""


@dataclass(frozen=True)
class MemoryLayout:
    """How a rank shards and stores parameters, gradients and optimizer state.

    Attributes:
        shard: ranks among which one copy of the model is sharded, F.
        compute: bytes of an element in the compute dtype, or None if each parameter keeps its own.
        reduce: bytes of an element in which gradients are reduced.
        optimizer: bytes of optimizer state for each trainable element, half of them a moment's.
        offload: whether optimizer state and masters are on the host; shards are then held in the compute dtype.
        residents: indices of units whose offloaded state stays on the device.
        reshard_after_forward: ranks among which a unit is sharded from forward to backward, or None for all.
    """

    shard: int
    compute: int | None
    reduce: int
    optimizer: float
    offload: bool = False
    residents: frozenset[int] = frozenset()
    reshard_after_forward: int | None = None


def rounded(num_bytes: float) -> int:
    """Returns the bytes rounded up as CUDA's allocator does."""
    return math.ceil(num_bytes / GRANULE) * GRANULE


@dataclass
class HeldUnit:
    """Bytes of one unit's tensors, and what FSDP2 holds of it at present.

    Attributes:
        sharded: its shards between steps.
        whole: its parameters when gathered, padding included.
        gather_input: the cast copy of the shards, or 0 if they are gathered without a cast.
        gather_output: the output of the all-gather, or 0 if a single rank gathers nothing.
        cast_alone: the cast copy of one parameter, if a single rank casts them one by one.
        reduce_input: the input of the reduce-scatter.
        reduce_output: this rank's part of its output.
        quotient: gradients of experts that only one rank holds, which FSDP2 divides into a new tensor.
        last_gradient: the gradient that the reduction's loop variable keeps alive; `last_sum` if micro-batches were
            summed.
        whole_sums: gradients summed over micro-batches, in the type of the reduction.
        cast_gradient: the reduced gradient in the type of the shards, if that differs.
        optimizer: optimizer state on the device.
        copied: what the ranks of a node keep of it from forward to backward, or 0 if they keep nothing.
        assembled: temporaries of a gather, for stacks that are sharded along their matrices' rows.
        turned: the largest of these stacks' gradients, which is copied before it is reduced (elements).
        last_turned: the last one's, which the reduction keeps alive (elements).
        gradient: bytes of a gradient's element as backward makes it.
        copying: the most of `whole` and `copied` together while each parameter is copied and then freed.
        made_alike: the most of its whole gradients while two types are cast to that of the reduction, or 0 for one
            type.
    """

    sharded: int
    whole: int
    gather_input: int
    gather_output: int
    cast_alone: int
    reduce_input: int
    reduce_output: int
    quotient: int
    last_gradient: int
    last_sum: int
    whole_sums: int
    cast_gradient: int
    optimizer: int
    made_alike: int
    copied: int
    copying: int
    assembled: int
    turned: int
    last_turned: int
    gradient: int
    is_copied: bool = False
    is_gathered: bool = False
    is_prefetched: bool = False
    sharded_gradients: int = 0
    whole_gradients: int = 0


def held_unit(shape: UnitShape, layout: MemoryLayout, resident: bool) -> HeldUnit:
    f, trainable = shape.num_shards(layout.shard), shape.trainable
    # FSDP2 pads each parameter to F equal shards of whole rows; a table of 3 rows on 8 ranks takes 8 rows.
    computed = [p.gathered(layout.compute) for p in shape.parameters]
    # Bytes of an element between steps.
    kept = [p.gathered(layout.compute) if layout.offload and p.trainable else p.held for p in shape.parameters]
    whole = [p.shard_numel(layout.shard) * f * size for p, size in zip(shape.parameters, computed, strict=True)]
    cast_whole = sum(size for size, c, k in zip(whole, computed, kept, strict=True) if c != k)
    own = shape.trainable_numel(layout.shard)
    # With offload, gradients of parameters that stay in float32 are also cast to the compute dtype.
    cast = sum(p.shard_numel(layout.shard) * ((layout.offload and layout.compute) or p.held) for p in trainable)
    # One rank gathers nothing: FSDP2 casts parameter after parameter, so one copy is alive next to its source.
    casts = [p.numel * c for p, c, k in zip(shape.parameters, computed, kept, strict=True) if c != k]
    # Otherwise FSDP2 reduces two types as they are.
    is_mixed = layout.compute is not None and shape.is_mixed and not autograd_sums_gradients()
    each, group = layout.reduce if is_mixed else layout.compute, layout.reshard_after_forward
    # `foreach_reduce` frees its list of gradients, but the name of its loop still holds the last.
    outlives = trainable and f > 1 and not frees_all_gradients_before_reducing()
    last = trainable[-1].numel * (each or trainable[-1].held) if outlives else 0
    turned = [p.numel for p in trainable if p.dim(layout.shard)]
    return HeldUnit(
        sharded=sum(
            rounded(p.shard_numel(layout.shard) * size) for p, size in zip(shape.parameters, kept, strict=True)
        ),
        whole=sum(map(rounded, whole)),
        # Shards that are held in the compute dtype are gathered without a copy.
        gather_input=rounded(cast_whole / f),
        gather_output=rounded(sum(whole)) if f > 1 else 0,
        cast_alone=rounded(max(casts, default=0)),
        reduce_input=rounded(layout.reduce * own * f),
        reduce_output=rounded(layout.reduce * own),
        quotient=rounded(layout.reduce * own) if f == 1 < layout.shard else 0,
        last_gradient=rounded(last),
        last_sum=rounded(trainable[-1].numel * layout.reduce) if outlives else 0,
        # FSDP2 sums whole gradients of several micro-batches in the type of the reduction, not of compute.
        whole_sums=sum(rounded(p.numel * layout.reduce) for p in trainable),
        # FSDP2 reduces in float32 and hands the optimizer the shard's own type.
        cast_gradient=rounded(cast) if cast != layout.reduce * own else 0,
        optimizer=optimizer_bytes(trainable, layout, resident),
        made_alike=_peak_of_dtype_change(trainable, layout) if is_mixed else 0,
        copied=sum(rounded(size / group) for size in whole) if group else 0,
        copying=_peak_while_copying(whole, group) if group else 0,
        assembled=sum(rounded(n) for p, n in zip(shape.parameters, whole, strict=True) if p.dim(layout.shard)),
        turned=max(turned, default=0),
        last_turned=turned[-1] if turned and outlives else 0,
        gradient=each or max((p.held for p in trainable), default=0),
    )


def _peak_while_copying(whole: Sequence[int], num_ranks: int) -> int:
    held, copies = [rounded(size) for size in whole], [rounded(size / num_ranks) for size in whole]
    return max((sum(held[i:]) + sum(copies[: i + 1]) for i in range(len(whole))), default=0)


def _peak_of_dtype_change(trainable: Sequence[ParameterShape], layout: MemoryLayout) -> int:
    before = [rounded(p.numel * p.gathered(layout.compute)) for p in trainable]
    after = [rounded(p.numel * layout.reduce) for p in trainable]
    return max(sum(after[: i + 1]) + sum(before[i:]) for i in range(len(trainable)))


def optimizer_bytes(trainable: Sequence[ParameterShape], layout: MemoryLayout, resident: bool) -> int:
    # Padding is included, because the optimizer steps the local shards with it.
    own = [(parameter.shard_numel(layout.shard), parameter.moments) for parameter in trainable]
    if layout.offload:  # master, two moments and the gradient's landing place, flat
        numel = sum(count for count, _ in own)
        return (3 * rounded(4 * numel) + rounded(layout.reduce * numel)) if resident else 0
    # The moments of each parameter and, if there are two, its step count, which muon does not keep.
    return sum(moments * rounded(numel * layout.optimizer / 2) + GRANULE * (moments == 2) for numel, moments in own)
