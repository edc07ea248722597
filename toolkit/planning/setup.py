"""One way to run a recipe: strategy, ranks, offload, checkpoints and micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from toolkit.errors import BadInputError
from toolkit.planning.hardware import Hardware
from toolkit.recipe.combinations import refusals
from toolkit.recipe.recipe import Recipe
from toolkit.recipe.schema import ShardingSection
from toolkit.sharding.blocks.checkpointing import Checkpointing
from toolkit.sharding.plan.strategy import (
    OFFLOAD,
    STRATEGIES,
    MeshShape,
    Strategy,
    mesh_shape,
    require_tensor_groups,
    with_reshard_after_forward,
)


@dataclass(frozen=True)
class Setup:
    """One way to run a recipe.

    Attributes:
        sequence: ranks that share a row, or None for the recipe's number.
    """

    strategy: Strategy
    mesh: MeshShape
    offload: bool
    checkpointing: Checkpointing | None
    micro_batch_size: int
    accumulation: int
    by_block: bool = False
    sequence: int | None = None

    @property
    def ranks(self) -> int:
        return self.mesh.num_ranks

    @property
    def name(self) -> str:
        """The strategy's name in an Accelerate config, with the groups of hybrid."""
        groups = f" {self.mesh.replicate}x{self.mesh.shard}" if self.strategy.replicated else ""
        node = f" backward in {self.mesh.reshard_after_forward}" if self.mesh.reshard_after_forward else ""
        by_block = " by block" if self.by_block else ""
        tensor = f" tensor {self.mesh.tensor}" if self.mesh.tensor > 1 else ""
        return self.strategy.name + (OFFLOAD if self.offload else "") + groups + tensor + node + by_block

    @property
    def gathering_batches(self) -> int:
        """Number of times that a step gathers and reduces: once by block, else for each micro-batch."""
        return 1 if self.by_block else self.accumulation

    @property
    def checkpoints(self) -> str:
        """Which activations are checkpointed, in a word or two."""
        if self.checkpointing is None:
            return "none"
        every = "all" if self.checkpointing.every == 1 else f"every {self.checkpointing.every}"
        return every + (", offloaded" if self.checkpointing.offload else "")

    @property
    def num_levers(self) -> int:
        """Number of ways in which it saves memory, to choose between setups that send as much."""
        in_groups = (self.sequence not in (None, 1)) + (self.mesh.tensor > 1)
        return self.offload + (self.checkpointing is not None) + in_groups


def asked_setup(
    recipe: Recipe, ranks: int, hardware: Hardware, strategy: str | None, offload: bool, shard_size: int | None
) -> Setup:
    """Returns the setup of the recipe as it is written."""
    name = recipe.sharding.strategy or strategy or "zero3"
    section, training = recipe.sharding, recipe.training
    every = section.activation_checkpointing
    every = None if every == "auto" else every  # chosen by the memory when the run starts
    ranks_per_node = min(ranks, hardware.devices_per_node)
    require_tensor_groups(section.tensor, ranks_per_node)
    mesh = mesh_of(STRATEGIES[name], ranks, shard_size or ranks_per_node // section.tensor, section.tensor)
    return Setup(
        STRATEGIES[name],
        with_reshard_after_forward(mesh, STRATEGIES[name], section.reshard_after_forward, ranks_per_node),
        section.offload == "optimizer" or (section.offload is None and offload),
        None if every is None else Checkpointing(every, section.offload_checkpoints),
        training.micro_batch_size,
        training.gradient_accumulation_steps,
        section.accumulate == "by_block",
    )


def mesh_of(strategy: Strategy, ranks: int, shard: int, tensor: int = 1) -> MeshShape:
    """Returns the number of replicas and the ranks of a shard group; only hybrid uses `shard`.

    Args:
        tensor: the ranks of a tensor group, which divide `ranks`.

    Raises:
        BadInputError: for hybrid, if groups of `shard` ranks do not divide the ranks, or there is only one group.
    """
    # ddp is all replicas and no shards; zero1 to zero3 shard over all ranks.
    ranks //= tensor
    if not strategy.replicated:
        shape = MeshShape(1, ranks) if strategy.sharded else MeshShape(ranks, 1)
    else:
        shape = mesh_shape(strategy, ranks, replicate=None, shard=shard)
    return replace(shape, tensor=tensor)


def factors(ranks: int) -> list[int]:
    """Returns the sizes of equal groups of ranks, except 1 and all ranks."""
    return [size for size in range(2, ranks) if ranks % size == 0]


MOST_RANKS = 2**20
"""The most ranks of a plan, which tries every size of a group that divides them."""


def require_ranks(ranks: int, hardware: Hardware) -> None:
    """Checks that the ranks fill whole nodes, and are not too many.

    Raises:
        BadInputError: if they do not, or are.
    """
    if not 1 <= ranks <= MOST_RANKS:
        raise BadInputError(f"--gpus: {ranks}; allowed: 1 to {MOST_RANKS:,}")
    if ranks > hardware.devices_per_node and ranks % hardware.devices_per_node:
        raise BadInputError(
            f"--gpus: {ranks} is not a multiple of the {hardware.devices_per_node} devices per node; give a multiple, "
            "or another --gpus-per-node"
        )


def settings_of(recipe: Recipe, setup: Setup, mixed_precision: str) -> Recipe:
    """Returns the recipe as it runs with this setup, for the table of combinations."""
    checkpointing = setup.checkpointing
    return recipe.changed(
        sharding={
            "strategy": setup.strategy.name,
            # The launch command removes the details of an offload that a row does not use.
            "offload": "optimizer" if setup.offload else None,
            "accumulate": "by_block" if setup.by_block else "by_micro_batch",
            "activation_checkpointing": None if checkpointing is None else checkpointing.every,
            "offload_checkpoints": checkpointing is not None and checkpointing.offload,
            "sequence": setup.sequence or recipe.sharding.sequence,
            "reshard_after_forward": setup.mesh.reshard_after_forward,
            "tensor": setup.mesh.tensor,
        },
        training={"gradient_accumulation_steps": setup.accumulation, "mixed_precision": mixed_precision},
    )


def smaller_setups(recipe: Recipe, setup: Setup, mixed_precision: str) -> Iterator[tuple[str, Setup]]:
    """Yields setups of the recipe that need less memory and may run, each with its single change as an override."""
    for change, smaller in _smaller_setups(recipe.sharding, setup):
        if not refusals(settings_of(recipe, smaller, mixed_precision)):
            yield change, smaller


def _smaller_setups(section: ShardingSection, setup: Setup) -> Iterator[tuple[str, Setup]]:
    if setup.checkpointing is None:
        yield "sharding.activation_checkpointing=1", replace(setup, checkpointing=Checkpointing(1))
    elif not setup.checkpointing.offload:
        offloaded = replace(setup.checkpointing, offload=True)
        yield "sharding.offload_checkpoints=true", replace(setup, checkpointing=offloaded)
    # The step keeps its number of samples, so that what is learned stays the same.
    if setup.micro_batch_size > 1:
        samples = setup.micro_batch_size * setup.accumulation
        change = f"training.micro_batch_size=1 training.gradient_accumulation_steps={samples}"
        yield change, replace(setup, micro_batch_size=1, accumulation=samples)
    zero3 = STRATEGIES["zero3"]
    # The launch names the strategy, not the recipe, so "strategy zero3" is not an override.
    if setup.mesh.reshard_after_forward is not None:
        yield (
            "sharding.reshard_after_forward=null",
            replace(setup, mesh=mesh_of(zero3, setup.ranks, 1, setup.mesh.tensor)),
        )
    if setup.strategy != zero3 and setup.ranks > 1:
        yield "strategy zero3", replace(setup, strategy=zero3, mesh=mesh_of(zero3, setup.ranks, 1, setup.mesh.tensor))
    if not setup.offload and section.offload != "none":
        yield "sharding.offload=optimizer", replace(setup, offload=True)
    if setup.strategy == zero3 and section.experts == 1:  # twice the ranks may not divide the experts
        yield f"{2 * setup.ranks} devices", replace(setup, mesh=replace(setup.mesh, shard=2 * setup.mesh.shard))
