"""The strategies as data: what is sharded, and when gradients are reduced.

ZeRO (arXiv 1910.02054) shards optimizer state (stage 1), then gradients (2), then parameters (3).
On FSDP2 the three differ inside the accumulation window; between optimizer steps all of them hold
parameters, gradients and optimizer state sharded.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.errors import BadInputError
from toolkit.recipe.combinations import refuse
from toolkit.recipe.features import Settings


@dataclass(frozen=True)
class Strategy:
    """One word of the strategy table.

    Attributes:
        name: the word itself.
        sharded: False for `ddp`, which leaves the model whole to torch's DistributedDataParallel.
        reduce_each_micro_batch: reduce-scatter after every micro-batch (ZeRO-2 and 3) or once per
            optimizer step (ZeRO-1).
        reshard_each_micro_batch: free the gathered parameters after each unit's forward and backward
            (ZeRO-3) or keep them over the accumulation window (ZeRO-1 and 2).
        replicated: sharded inside groups of ranks, whole across them: the mesh is replicate x shard, and
            gradients are all-reduced over the replicas once per optimizer step.
        summary: one line for tables.
    """

    name: str
    sharded: bool
    reduce_each_micro_batch: bool
    reshard_each_micro_batch: bool
    replicated: bool
    summary: str


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("ddp", False, False, False, False, "nothing is sharded; torch's DistributedDataParallel"),
        Strategy("zero1", True, False, False, False, "sharded; gathered, and reduced once, per optimizer step"),
        Strategy("zero2", True, True, False, False, "sharded; gathered per optimizer step, reduced per micro-batch"),
        Strategy("zero3", True, True, True, False, "sharded; gathered unit by unit, reduced per micro-batch"),
        Strategy("hybrid", True, True, True, True, "zero3 inside groups of ranks, replicated across them"),
    )
}

ALIASES = {"full_shard": "zero3", "shard_grad_op": "zero2", "no_shard": "ddp", "hybrid_shard": "hybrid"}
"""Stock FSDP words, so that an existing Accelerate config keeps its meaning."""

DEFAULT_STRATEGY = "zero3"


OFFLOAD = "+offload"
"""Behind a strategy's word: its optimizer state is offloaded to host memory."""


def parse_strategy(text: str, origin: str) -> Strategy:
    """The strategy of a word, in any case, with or without `+offload`.

    Args:
        text: a strategy's word or a stock FSDP alias.
        origin: the place that holds the word, for the error.

    Raises:
        BadInputError: with the known words.
    """
    word = text.strip().lower().removesuffix(OFFLOAD)
    word = ALIASES.get(word, word)
    if word not in STRATEGIES:
        raise BadInputError(
            f"{origin}: unknown strategy {text!r}; allowed: {', '.join(STRATEGIES)}, each but ddp also with {OFFLOAD}"
        )
    return STRATEGIES[word]


def asks_for_offload(text: str | None) -> bool:
    """Whether a strategy's text ends with `+offload`."""
    return text is not None and text.strip().lower().endswith(OFFLOAD)


@dataclass(frozen=True)
class MeshShape:
    """Ranks as replicate x shard; `shard` is the sharding factor F.

    Attributes:
        node: ranks among which a unit is sharded from its forward to its backward; None: among all F.
    """

    replicate: int
    shard: int
    node: int | None = None

    @property
    def backward(self) -> int:
        """Ranks among which backward gathers."""
        return self.node or self.shard


def mesh_shape(strategy: Strategy, world_size: int, *, replicate: int | None, shard: int | None) -> MeshShape:
    """The two sizes of the mesh for a number of ranks.

    Args:
        replicate: asked number of replicas; `hybrid` needs this or `shard`. 1 counts as not asked.
        shard: asked sharding factor; 1 counts as not asked.

    Raises:
        BadInputError: sizes that do not make up the ranks, or that the strategy has no use for.
    """
    # 1 is what Accelerate takes where nobody has set a size.
    replicate = replicate if replicate != 1 else None
    shard = shard if shard != 1 else None
    if strategy.replicated:
        return _hybrid_shape(world_size, replicate, shard)
    shape = MeshShape(1, world_size) if strategy.sharded else MeshShape(world_size, 1)
    _refuse_size("dp_replicate_size", replicate, shape.replicate, strategy)
    _refuse_size("dp_shard_size", shard, shape.shard, strategy)
    return shape


def _refuse_size(key: str, asked: int | None, size: int, strategy: Strategy) -> None:
    if asked not in (None, size):
        raise BadInputError(
            f"{key} is {asked}, but with strategy {strategy.name} it is {size}; remove it, or choose hybrid"
        )


def _hybrid_shape(world_size: int, replicate: int | None, shard: int | None) -> MeshShape:
    # Not 1, which would be ddp, and not all ranks, which is zero3.
    factors = [size for size in range(2, world_size) if world_size % size == 0]
    if not factors:
        raise BadInputError(
            f"strategy hybrid needs equal groups of at least 2 ranks, and at least 2 groups; "
            f"{world_size} ranks cannot be parted so. Choose zero3"
        )
    asked = f"dp_replicate_size {replicate or 'unset'} and dp_shard_size {shard or 'unset'}"
    if shard is None and replicate is not None and world_size % replicate == 0:
        shard = world_size // replicate
    if shard not in factors or replicate not in (None, world_size // shard):
        raise BadInputError(
            f"strategy hybrid: {asked} do not part {world_size} ranks into equal groups; "
            f"set dp_shard_size, the ranks of a group, to one of {', '.join(map(str, factors))}"
        )
    return MeshShape(world_size // shard, shard)


def with_node(shape: MeshShape, strategy: Strategy, node: int | None, ranks_per_node: int) -> MeshShape:
    """The mesh with units sharded among `node` neighbouring ranks from forward to backward; None: as it is.

    Known as hpZ, the hierarchical partitioning of ZeRO++ (arXiv 2306.10209).

    Raises:
        BadInputError: a strategy that has no use for it, or groups that do not divide the ranks or span nodes.
    """
    if node is None:
        return shape
    refuse(Settings(strategy=strategy.name, node=node))
    # Not all ranks, where it would change nothing.
    sizes = range(2, min(ranks_per_node, shape.shard - 1) + 1)
    allowed = [size for size in sizes if shape.shard % size == 0 == ranks_per_node % size]
    if node not in allowed:
        raise BadInputError(
            f"sharding.reshard_after_forward: {node} is not a group inside the nodes of {ranks_per_node} ranks that "
            f"{shape.shard} ranks have several of; allowed: {', '.join(map(str, allowed)) or 'none here; remove it'}"
        )
    return MeshShape(shape.replicate, shape.shard, node)
