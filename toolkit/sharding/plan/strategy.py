"""Defines the strategies as data: what is sharded, and when gradients are reduced.

ZeRO (arXiv 1910.02054) shards optimizer state (stage 1), then gradients (2), then parameters (3).
With FSDP2 the three differ only between the micro-batches of an optimizer step; between steps all of them hold
parameters, gradients and optimizer state sharded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from toolkit.errors import BadInputError
from toolkit.recipe.combinations import refuse
from toolkit.recipe.features import settings_of_backend


@dataclass(frozen=True)
class Strategy:
    """A strategy.

    Attributes:
        name: the word that selects it.
        sharded: False for `ddp`, which leaves the whole model to torch's DistributedDataParallel.
        reduce_each_micro_batch: whether gradients are reduce-scattered after every micro-batch (ZeRO-2 and 3) or once
            per optimizer step (ZeRO-1).
        reshard_each_micro_batch: whether gathered parameters are freed after each unit's forward and backward (ZeRO-3)
            or kept until the optimizer step (ZeRO-1 and 2).
        replicated: whether the model is sharded inside groups of ranks and replicated across them. The mesh is then
            replicate x shard, and gradients are all-reduced over the replicas once per optimizer step.
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
"""Maps stock FSDP words to ours, so that an existing Accelerate config keeps its meaning."""

DEFAULT_STRATEGY = "zero3"


OFFLOAD = "+offload"
"""The suffix of a strategy's word that offloads its optimizer state to host memory."""


def parse_strategy(text: str, origin: str) -> Strategy:
    """Returns the strategy of a word. Ignores case and `+offload`.

    Args:
        text: a strategy's word or a stock FSDP alias.
        origin: the place that holds the word, for the error.

    Raises:
        BadInputError: if the word is unknown; the message lists the allowed ones.
    """
    word = text.strip().lower().removesuffix(OFFLOAD)
    word = ALIASES.get(word, word)
    if word not in STRATEGIES:
        raise BadInputError(
            f"{origin}: unknown strategy {text!r}; allowed: {', '.join(STRATEGIES)}, each but ddp also with {OFFLOAD}"
        )
    return STRATEGIES[word]


def asks_for_offload(text: str | None) -> bool:
    """Returns whether a strategy's text ends with `+offload`."""
    return text is not None and text.strip().lower().endswith(OFFLOAD)


@dataclass(frozen=True)
class MeshShape:
    """The shape of the mesh of ranks, replicate x shard x tensor.

    Attributes:
        replicate: the number of replicas.
        shard: the sharding factor F.
        reshard_after_forward: the number of ranks among which a unit is sharded between forward and backward, or None
            for all F.
        tensor: the number of ranks that cut matrices and have the same rows.
    """

    replicate: int
    shard: int
    reshard_after_forward: int | None = None
    tensor: int = 1

    @property
    def num_ranks(self) -> int:
        """Returns the number of all ranks."""
        return self.replicate * self.shard * self.tensor

    @property
    def backward(self) -> int:
        """Returns the number of ranks among which backward gathers."""
        return self.reshard_after_forward or self.shard


def mesh_shape(strategy: Strategy, world_size: int, *, replicate: int | None, shard: int | None) -> MeshShape:
    """Returns the shape of the mesh for a number of ranks.

    Args:
        strategy: decides which sizes are allowed.
        world_size: the number of ranks.
        replicate: the requested number of replicas. `hybrid` needs this or `shard`. 1 counts as not set.
        shard: the requested sharding factor. 1 counts as not set.

    Raises:
        BadInputError: if the sizes do not divide the ranks, or the strategy fixes another size.
    """
    # 1 is Accelerate's default for a size that is not set.
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
            f"{world_size} ranks cannot form such groups. Choose zero3"
        )
    asked = f"dp_replicate_size {replicate or 'unset'} and dp_shard_size {shard or 'unset'}"
    if shard is None and replicate is not None and world_size % replicate == 0:
        shard = world_size // replicate
    if shard not in factors or replicate not in (None, world_size // shard):
        raise BadInputError(
            f"strategy hybrid: {asked} do not part {world_size} ranks into equal groups; "
            "set the ranks of a group (parallelism_config_dp_shard_size in an Accelerate config, shard_size in Python) "
            f"to one of {', '.join(map(str, factors))}"
        )
    return MeshShape(world_size // shard, shard)


def agreed_tensor(asked: int | None, configured: int | None) -> int:
    """Returns the ranks of a tensor group, of the recipe or an argument, or of the Accelerate config; else 1.

    Args:
        asked, configured: None and 1 leave it to the other.

    Raises:
        BadInputError: if they contradict each other.
    """
    if asked in (None, 1) or configured in (None, 1, asked):
        return max(asked or 1, configured or 1)
    raise BadInputError(
        f"sharding.tensor is {asked}, but the Accelerate config's parallelism_config_tp_size is {configured}; "
        "remove one of them or make them agree"
    )


def require_tensor_groups(tensor: int, on_node: int) -> None:
    """Checks that groups of `tensor` ranks can be formed.

    Args:
        on_node: the ranks on a node.

    Raises:
        BadInputError: if groups do not divide the ranks of a node.
    """
    if on_node % tensor:
        allowed = [size for size in range(1, on_node + 1) if on_node % size == 0]
        raise BadInputError(
            f"sharding.tensor: {tensor} does not divide the {on_node} ranks of a node; the ranks of a group exchange "
            f"several times a layer and must share a node. Set it to one of {', '.join(map(str, allowed))}"
        )


def tensor_shape(
    strategy: Strategy, world_size: int, tensor: int, ranks_per_node: int, *, replicate: int | None, shard: int | None
) -> MeshShape:
    """Returns the shape of the mesh for a number of ranks, of which neighbours form tensor groups.

    Args:
        tensor: the ranks of a group; 1 forms none.
        ranks_per_node: the ranks that the launcher starts on each node.
        strategy, world_size, replicate, shard: see `mesh_shape`; the sizes are those of the ranks with the same part.

    Raises:
        BadInputError: if groups do not divide the ranks of a node, or as `mesh_shape`.
    """
    require_tensor_groups(tensor, min(ranks_per_node, world_size))
    return replace(mesh_shape(strategy, world_size // tensor, replicate=replicate, shard=shard), tensor=tensor)


def with_reshard_after_forward(
    shape: MeshShape, strategy: Strategy, num_ranks: int | None, ranks_per_node: int
) -> MeshShape:
    """Returns the mesh with units sharded among `num_ranks` neighbouring ranks between forward and backward.

    FSDP2's `reshard_after_forward`, and the hierarchical partitioning of ZeRO++ (arXiv 2306.10209).

    Args:
        shape: the shape of the mesh.
        strategy: only `zero3` allows it.
        num_ranks: those of a group. None returns `shape` unchanged.
        ranks_per_node: the ranks that the launcher starts on each node.

    Raises:
        BadInputError: if the strategy does not allow it, or groups do not divide the ranks or would span nodes.
    """
    if num_ranks is None:
        return shape
    refuse(settings_of_backend(strategy=strategy.name, reshard_after_forward=num_ranks))
    # Not all ranks: that would change nothing.
    sizes = range(2, min(ranks_per_node, shape.shard - 1) + 1)
    allowed = [size for size in sizes if shape.shard % size == 0 == ranks_per_node % size]
    if num_ranks not in allowed:
        mend = f"set it to one of {', '.join(map(str, allowed))}" if allowed else "no size is; remove it"
        raise BadInputError(
            f"sharding.reshard_after_forward: {num_ranks} is not a group inside of the {ranks_per_node} ranks of a "
            f"node of which {shape.shard} ranks have several; {mend}"
        )
    return replace(shape, reshard_after_forward=num_ranks)
