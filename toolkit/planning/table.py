"""Makes a table of ways to run a recipe: which fit, what each sends, and which to pick."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from toolkit.data.kinds.registry import kind_for
from toolkit.errors import BadInputError
from toolkit.model.adapters.adapters import trainable_share
from toolkit.model.attention.positions import require_positions
from toolkit.model.part_sizes import PartSize, part_sizes
from toolkit.paths import GIB
from toolkit.planning.hardware import Hardware
from toolkit.planning.planner import Planner, PlanRow
from toolkit.planning.setup import Setup, asked_setup, factors, mesh_of, require_ranks, smaller_setups
from toolkit.planning.workload.workload import Workload, with_rows_of, workload_on_rows
from toolkit.recipe.combinations import refuse
from toolkit.recipe.recipe import Recipe
from toolkit.recipe.schema import ShardingSection, TrainingSection
from toolkit.sharding.blocks.checkpointing import Checkpointing
from toolkit.sharding.parallel.expert_parallel import require_experts
from toolkit.sharding.parallel.sequence_parallel import require_groups
from toolkit.sharding.plan.strategy import STRATEGIES, MeshShape, Strategy
from toolkit.sharding.plan.units import stacked_experts

SHARED_BY = (2, 4, 8)
"""Numbers of ranks that share a row, in a table of long rows."""

LONG_ROW = 8192
"""Tokens of a row from which a table has shared rows: each number of ranks takes a probe of its own."""

CUT_BY = (2, 4, 8)
"""Numbers of ranks that cut matrices, in a table of a model that zero3 cannot make small."""

LARGE_UNIT = 0.05
"""Share of a device's memory that a gathered unit takes from which on a table has tensor groups. Up to five such
buffers are alive at once, however many ranks there are: the unit and the next one, its gradient, and both of what is
reduced."""

AS_MUCH = 1.01
"""Rows that send up to this factor of the least count as sending as much: padding differs between strategies."""

MICRO_BATCHES = 4
"""The most micro-batch sizes in a table."""


@dataclass(frozen=True)
class Lever:
    """A single change that makes a setup need less memory."""

    change: str
    row: PlanRow


@dataclass(frozen=True)
class Plan:
    """The result of `plan`.

    Attributes:
        rows: fitting rows first, those that send least first.
        asked: the recipe as it is written.
        recommended: the row to pick, or None if none fits.
        reason: why this row, or what is missing.
        levers: single changes with which the recipe needs less memory, fitting ones first.
        num_parameters, num_trained: parameters of the model.
        parts: the same by part, of a model that reads more than text.
        has_images: whether the micro-batches are of the recipe's rows with images.
    """

    recipe: Recipe
    hardware: Hardware
    ranks: int
    mixed_precision: str
    rows: tuple[PlanRow, ...]
    asked: PlanRow
    recommended: PlanRow | None
    reason: str
    levers: tuple[Lever, ...]
    num_parameters: int
    num_trained: int
    has_images: bool = False
    parts: Mapping[str, PartSize] = field(default_factory=dict)


def plan(
    recipe: Recipe,
    hardware: Hardware,
    ranks: int = 1,
    *,
    mixed_precision: str | None = None,
    strategy: str | None = None,
    offload: bool = False,
    shard_size: int | None = None,
    with_levers: bool = True,
) -> Plan:
    """Plans a recipe on a number of ranks.

    Args:
        ranks: one for each device.
        mixed_precision: `no`, `bf16` or `fp16`. If it is None, the recipe decides, else it is bf16 on GPUs and none on
            CPU ranks.
        strategy: strategy of the recipe as written if the recipe names none; zero3 if this is None.
        offload: whether the recipe as written offloads, if it does not say.
        shard_size: ranks of a shard group of hybrid, or None for those of a node.
        with_levers: whether to look for changes with which a recipe that does not fit would, which doubles the time.

    Raises:
        BadInputError: if ranks do not fill nodes or suit the strategy, the recipe has no model, or settings of recipe
            and Accelerate config cannot go together.
    """
    require_ranks(ranks, hardware)
    precision = precision_of(recipe.training, mixed_precision, hardware)
    planner = Planner(recipe, workload_on_rows(recipe, precision), hardware)
    require_positions(planner.workload.model, recipe.data, kind_for(recipe.objective.kind).documents)
    asked = asked_setup(recipe, ranks, hardware, strategy, offload, shard_size)
    settings = planner.settings(asked)
    # Without an Accelerate config, one that has offload may come later.
    if strategy is not None and not asked.offload:
        settings = settings.changed(sharding={"offload": "none"})
    refuse(settings, planner.surroundings)
    _require_spreadable(planner, asked)
    rows = [planner.row(setup) for setup in _setups(planner, ranks, asked)]
    if _may_need_tensor_groups(planner, rows, asked):
        rows += [planner.row(setup) for setup in _in_tensor_groups(planner, ranks, asked)]
    rows.sort(key=_sort_key)
    asked_row = planner.row(asked)
    recommended, reason = recommend(rows, hardware, asked)
    # Each takes a probe or a model of its own.
    levers = tuple(_levers(planner, asked_row)) if with_levers and asked_row.verdict != "fits" else ()
    num_trained, num_parameters = trainable_share(planner.workload.model)
    return Plan(
        recipe,
        hardware,
        ranks,
        precision,
        tuple(rows),
        asked_row,
        recommended,
        reason,
        levers,
        num_parameters,
        num_trained,
        planner.workload.has_images,
        part_sizes(planner.workload.model),
    )


def precision_of(training: TrainingSection, configured: str | None, hardware: Hardware) -> str:
    """Returns the recipe's precision, else the Accelerate config's, else bf16 on GPUs and none on CPU ranks."""
    return training.mixed_precision or configured or ("bf16" if hardware.device_type == "cuda" else "no")


def _require_spreadable(planner: Planner, asked: Setup) -> None:
    """Raises BadInputError if the ranks cannot run expert parallel as the recipe asks."""
    size = planner.recipe.sharding.experts
    if size > 1:
        require_groups("sharding.experts", size, asked.mesh.shard)
        require_experts(planner.workload.model, asked.mesh.shard)


def _is_spreadable(planner: Planner, mesh: MeshShape) -> bool:
    """Returns whether these ranks can run expert parallel as the recipe asks, if it does."""
    size, stacks = planner.recipe.sharding.experts, stacked_experts(planner.workload.model).values()
    is_dealt = mesh.shard % size == 0 and not any(int(stack.num_experts) % mesh.shard for stack in stacks)  # type: ignore[arg-type]
    return size == 1 or is_dealt


# The table


def _setups(planner: Planner, ranks: int, asked: Setup) -> Iterator[Setup]:
    """Yields every strategy with and without offload, every checkpointing, several micro-batches of the same step."""
    # `dict.fromkeys` and not a set: rows that tie keep this order.
    checkpointings = list(dict.fromkeys([None, Checkpointing(1), asked.checkpointing]))
    section = planner.recipe.sharding
    offloads = (False,) if section.offload == "none" else (False, True)
    for strategy, mesh in _strategies(ranks, asked):
        if not _is_spreadable(planner, mesh):
            continue
        for offload in offloads:
            if offload and strategy.replicated and mesh.shard < min(ranks, planner.hardware.devices_per_node):
                continue  # each replica of a node would hold all of the state
            for checkpointing in checkpointings:
                for size, accumulation in _micro_batches(asked):
                    setup = Setup(strategy, mesh, offload, checkpointing, size, accumulation)
                    yield from (found for found in _with_by_block(section, setup) if not planner.refusals(found))
    yield from _on_shared_rows(planner, ranks, asked)


def _on_shared_rows(planner: Planner, ranks: int, asked: Setup) -> Iterator[Setup]:
    """Yields zero3 on rows that ranks share."""
    if planner.recipe.data.max_length < LONG_ROW or planner.recipe.sharding.experts > 1:
        return
    for sequence in SHARED_BY:
        if ranks % sequence == 0 and sequence != planner.workload.sequence:
            yield from _on_groups(planner, ranks, asked, sequence, 1)


def _may_need_tensor_groups(planner: Planner, rows: Sequence[PlanRow], asked: Setup) -> bool:
    """Returns whether nothing fits, or a unit is so large that its buffers matter: each number of ranks takes a probe.

    Where the recipe asks for some, it is compared with others and with none.
    """
    is_large = max(planner.model.whole_bytes) > LARGE_UNIT * planner.hardware.memory_bytes
    return asked.mesh.tensor > 1 or is_large or all(row.verdict == "no" for row in rows)


def _in_tensor_groups(planner: Planner, ranks: int, asked: Setup) -> Iterator[Setup]:
    """Yields zero3 in groups of ranks that cut matrices, on rows that no ranks share."""
    ranks_of_node = min(ranks, planner.hardware.devices_per_node)
    for tensor in (1, *CUT_BY):
        if ranks_of_node % tensor == 0 and tensor != asked.mesh.tensor:
            yield from _on_groups(planner, ranks, asked, 1, tensor)


def _on_groups(planner: Planner, ranks: int, asked: Setup, sequence: int, tensor: int) -> Iterator[Setup]:
    """Yields zero3 with every block checkpointed, one row at a time, if the model can; a step keeps its samples."""
    zero3, every_block = STRATEGIES["zero3"], Checkpointing(1)
    if asked.checkpointing is not None and asked.checkpointing.every == 1:
        every_block = asked.checkpointing
    samples = asked.micro_batch_size * asked.accumulation * sequence * tensor
    accumulation, rest = divmod(samples, planner.workload.sequence * planner.workload.tensor)
    mesh = mesh_of(zero3, ranks, 1, tensor)
    shared = None if sequence == planner.workload.sequence else sequence
    grouped = Setup(zero3, mesh, False, every_block, 1, accumulation, sequence=shared)
    if rest or not accumulation or planner.refusals(grouped):
        return
    try:
        planner.on_groups(sequence, tensor)
    except BadInputError:  # the model's rows cannot be shared, or its matrices not be cut, or not by so many
        return
    offloads = (False,) if planner.recipe.sharding.offload == "none" else (False, True)
    setups = (replace(grouped, offload=offload) for offload in offloads)
    yield from (setup for setup in setups if not planner.refusals(setup))


def _with_by_block(section: ShardingSection, setup: Setup) -> Iterator[Setup]:
    """Yields the setup by micro-batch, and by block if the recipe allows it."""
    yield setup
    if section.accumulate != "by_micro_batch":
        yield replace(setup, by_block=True)


def _strategies(ranks: int, asked: Setup) -> Iterator[tuple[Strategy, MeshShape]]:
    if ranks == 1:
        yield from ((STRATEGIES[name], mesh_of(STRATEGIES[name], 1, 1)) for name in ("ddp", "zero3"))
        return
    tensor = asked.mesh.tensor
    for name in ("ddp", "zero1", "zero2", "zero3"):
        yield STRATEGIES[name], mesh_of(STRATEGIES[name], ranks, 1, tensor)
    if asked.mesh.reshard_after_forward is not None:
        yield asked.strategy, asked.mesh
    # Powers of two, the sizes of NVLink groups and nodes; others only if there is none, or the recipe asks.
    ranks //= tensor
    sizes = {2**power for power in range(1, 14)} & set(factors(ranks))
    for shard in sorted(
        sizes | ({asked.mesh.shard} if asked.strategy.replicated else set()) or set(factors(ranks)[:3])
    ):
        yield STRATEGIES["hybrid"], MeshShape(ranks // shard, shard, tensor=tensor)


def _micro_batches(asked: Setup) -> list[tuple[int, int]]:
    """Returns micro-batch sizes 1, 2, 4 ... and the recipe's own, with accumulations that keep a step's samples."""
    samples = asked.micro_batch_size * asked.accumulation
    sizes = [size for size in (2**power for power in range(12)) if samples % size == 0]
    # Each size is another probe.
    nearest = sorted(sizes, key=lambda size: abs(size - asked.micro_batch_size))[: MICRO_BATCHES - 1]
    return [(size, samples // size) for size in sorted({*nearest, asked.micro_batch_size})]


def _sort_key(row: PlanRow) -> tuple[int, ...]:
    # Links between nodes are slower than those inside of one. What sends nothing more but saves memory costs time.
    return ("fits", "tight", "no").index(row.verdict), row.between_nodes, row.traffic.sent, row.setup.num_levers


def recommend(rows: Sequence[PlanRow], hardware: Hardware, asked: Setup) -> tuple[PlanRow | None, str]:
    """Returns the row to pick, or None if none fits, and the reason. `toolkit init` writes what this returns.

    Of those that fit it is the one that sends least, first between nodes and then in all; of rows that send as much,
    the one that saves memory in the fewest ways, then the recipe as it is written, then the one with the fewest
    micro-batches, then the one that needs least.
    """
    # A row that may run out of memory is worth less than one that sends more and won't.
    for verdict in ("fits", "tight"):
        fitting = _worth_picking([row for row in rows if row.verdict == verdict], hardware, asked)
        if not fitting:
            continue
        least = _least(_least(fitting, lambda row: row.between_nodes), lambda row: row.traffic.sent)
        best = min(
            least,
            key=lambda row: (row.setup.num_levers, row.setup != asked, row.setup.accumulation, row.peak.total),
        )
        words = "with room to spare" if verdict == "fits" else "only just; watch the first steps"
        sends = "sends the least of what fits" if best.traffic.sent else "fits"
        return best, f"{sends}, {words}: {best.need / GIB:.1f} of {hardware.memory_bytes / GIB:.0f} GiB"
    smallest = min(rows, key=lambda row: row.need)
    needs = f"{smallest.need / GIB:.1f} GiB of {hardware.memory_bytes / GIB:.0f}"
    return None, f"nothing fits; {smallest.setup.name} needs the least, {needs}"


def _least(rows: Sequence[PlanRow], num_bytes: Callable[[PlanRow], int]) -> list[PlanRow]:
    most = AS_MUCH * min(map(num_bytes, rows))
    return [row for row in rows if num_bytes(row) <= most]


def _worth_picking(fitting: Sequence[PlanRow], hardware: Hardware, asked: Setup) -> list[PlanRow]:
    """Leaves out offload that is not needed, and on one node groups of hybrid, which a recipe alone cannot set."""
    # Offload is for memory. On CPU ranks it saves nothing, so the same row without it always fits.
    whole = {row.setup for row in fitting if not row.setup.offload}
    on_one_node = asked.ranks <= hardware.devices_per_node and not asked.strategy.replicated
    return [
        row
        for row in fitting
        if not (row.setup.offload and replace(row.setup, offload=False) in whole)
        and not (row.setup.strategy.replicated and on_one_node)
    ]


# Levers


def _levers(planner: Planner, asked: PlanRow) -> list[Lever]:
    """Returns single changes with which the recipe as written needs less memory, in the order of rows."""
    found = [Lever(change, make()) for change, make in _single_changes(planner, asked.setup)]
    useful = [lever for lever in found if lever.row.need < asked.need or asked.verdict == "no" != lever.row.verdict]
    return sorted(useful, key=lambda lever: _sort_key(lever.row))


def _single_changes(planner: Planner, setup: Setup) -> Iterator[tuple[str, Callable[[], PlanRow]]]:
    for change, changed in smaller_setups(planner.recipe, setup, planner.workload.mixed_precision):
        yield change, functools.partial(planner.row, changed)
    yield from _other_recipes(planner, setup)


def _other_recipes(planner: Planner, setup: Setup) -> Iterator[tuple[str, Callable[[], PlanRow]]]:
    recipe = planner.recipe

    def with_recipe(changed: Recipe, workload: Workload) -> Callable[[], PlanRow]:
        return lambda: Planner(changed, workload, planner.hardware).row(setup)

    if recipe.adapter.kind == "none" and not recipe.objective.spec.has_classes:
        adapted = recipe.changed(adapter={"kind": "lora"})
        yield "adapter.kind=lora", with_recipe(adapted, workload_on_rows(adapted, planner.workload.mixed_precision))
    if recipe.answers.file is not None and recipe.answers.batch_size > 1:
        fewer = recipe.changed(answers={"batch_size": 1})
        yield "answers.batch_size=1", with_recipe(fewer, planner.workload)
    half = recipe.data.max_length // 2
    if half >= 8 and not planner.workload.has_images:  # a row with an image is never cut
        shorter = recipe.changed(data={"max_length": half})
        yield f"data.max_length={half}", with_recipe(shorter, with_rows_of(planner.workload, shorter))
