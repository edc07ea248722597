"""A table of ways to run a recipe: what each holds, sends and takes, which fits, and which to pick."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from toolkit.errors import BadInputError, UnplannableError, first_line
from toolkit.places import GIB
from toolkit.planning.memory.probe import Probe, Prober
from toolkit.planning.memory.replay import Layout, Memory, replay
from toolkit.planning.memory.units import UnitShape, unit_shapes
from toolkit.planning.time.hardware import Hardware
from toolkit.planning.time.speed import Segment, StepTime, step_time
from toolkit.planning.time.traffic import OffloadPlan, Traffic, traffic
from toolkit.planning.workload import Workload, workload_of
from toolkit.recipe.recipe import Recipe
from toolkit.recipe.schema import AdapterSection
from toolkit.sharding.apply import Checkpointing
from toolkit.sharding.offload.host import plan_host
from toolkit.sharding.offload.state import STAGING_BUFFERS
from toolkit.sharding.strategy import OFFLOAD, STRATEGIES, MeshShape, Strategy

Verdict = Literal["fits", "tight", "no"]

HEADROOM: dict[Verdict, float] = {"fits": 1.25, "tight": 1.05}
"""Times the peak: what CUDA's allocator has reserved was 1.19 to 1.23 times what was allocated in published runs of
eager training, and little more than it with expandable segments, which the toolkit asks for."""

CONTEXT_BYTES = {"cuda": 2 * GIB, "cpu": GIB // 2}
"""Of a rank before it holds anything: CUDA's context and NCCL's buffers; Python and its libraries."""

DTYPES = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}
COMPUTE_BYTES = {"no": None, "bf16": 2, "fp16": 2}

MOMENTS = 2
"""Of AdamW, which alone can be offloaded by a recipe."""

MICRO_BATCHES = 4
"""Sizes of the micro-batch in a table, at most."""

AS_FAST = 1.01
"""Rows within so much of the fastest count as equally fast."""


@dataclass(frozen=True)
class Setup:
    """One way to run a recipe."""

    strategy: Strategy
    mesh: MeshShape
    offload: bool
    checkpointing: Checkpointing | None
    micro_batch_size: int
    accumulation: int

    @property
    def ranks(self) -> int:
        return self.mesh.replicate * self.mesh.shard

    @property
    def name(self) -> str:
        """The strategy as an Accelerate config would say it, with the groups of hybrid."""
        groups = f" {self.mesh.replicate}x{self.mesh.shard}" if self.strategy.replicated else ""
        return self.strategy.name + (OFFLOAD if self.offload else "") + groups

    @property
    def checkpoints(self) -> str:
        """Which activations are checkpointed, in a word or two."""
        if self.checkpointing is None:
            return "none"
        every = "all" if self.checkpointing.every == 1 else f"every {self.checkpointing.every}"
        return f"{every}, offloaded" if self.checkpointing.offload else every

    @property
    def num_levers(self) -> int:
        """How many things it does to save memory, for a choice between equals."""
        return self.offload + (self.checkpointing is not None)


@dataclass(frozen=True)
class Row:
    """What a setup needs and does.

    Attributes:
        peak: the moment in which a rank holds most on its device.
        moments: all of them, in the order of a step.
        need: bytes of the device's memory that the peak asks for, with headroom and context.
        host_bytes: of offloaded state and checkpoints, of all ranks of a node.
        traffic: of one optimizer step.
        time: of one optimizer step.
        tokens: of one optimizer step of all ranks.
        problem: why it does not fit; empty where it does.
    """

    setup: Setup
    peak: Memory
    moments: tuple[Memory, ...]
    need: int
    host_bytes: int
    traffic: Traffic
    time: StepTime
    tokens: int
    verdict: Verdict
    problem: str

    @property
    def tokens_per_second(self) -> tuple[float, float, float]:
        """Of all ranks: low, mid, high."""
        return tuple(self.tokens / seconds for seconds in (self.time.high, self.time.mid, self.time.low))  # type: ignore[return-value]


@dataclass(frozen=True)
class Lever:
    """A single change that makes a setup hold less."""

    change: str
    row: Row


@dataclass(frozen=True)
class Plan:
    """What `plan` found.

    Attributes:
        rows: fitting ones first, the fastest first.
        asked: the recipe as it stands.
        recommended: the row to pick; None where none fits.
        reason: why this one, or what is missing.
        levers: what makes the recipe as it stands hold less, one change each, the fastest first.
        num_parameters, num_trained: of the model.
    """

    recipe: Recipe
    hardware: Hardware
    ranks: int
    mixed_precision: str
    rows: tuple[Row, ...]
    asked: Row
    recommended: Row | None
    reason: str
    levers: tuple[Lever, ...]
    num_parameters: int
    num_trained: int


def plan(
    recipe: Recipe,
    hardware: Hardware,
    ranks: int = 1,
    *,
    mixed_precision: str | None = None,
    strategy: str | None = None,
    offload: bool = False,
    shard_size: int | None = None,
) -> Plan:
    """Plans a recipe on so many ranks.

    Args:
        ranks: one for each device.
        mixed_precision: `no`, `bf16` or `fp16`; None: the recipe's, else bf16 on GPUs and none on CPU ranks.
        strategy: of the recipe as it stands, where the recipe does not say; None: zero3.
        offload: of the recipe as it stands, where the recipe does not say.
        shard_size: ranks of a group, of hybrid; None: those of a node.

    Raises:
        BadInputError: ranks that the nodes or the strategy have no use for, or a recipe without a model.
    """
    _require_ranks(ranks, hardware)
    precision = (
        recipe.training.mixed_precision or mixed_precision or ("bf16" if hardware.device_type == "cuda" else "no")
    )
    planner = Planner(recipe, workload_of(recipe, precision), hardware)
    asked = asked_setup(recipe, ranks, hardware, strategy, offload, shard_size)
    rows = [planner.row(setup) for setup in _setups(recipe, ranks, asked, planner)]
    rows.sort(key=_rank_of)
    asked_row = planner.row(asked)
    recommended, reason = _recommended(rows, hardware)
    levers = () if asked_row.verdict == "fits" else tuple(_levers(planner, asked_row))
    shapes = planner.units
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
        sum(p.numel for unit in shapes for p in unit.parameters),
        sum(p.numel for unit in shapes for p in unit.trainable),
    )


def asked_setup(
    recipe: Recipe, ranks: int, hardware: Hardware, strategy: str | None, offload: bool, shard_size: int | None
) -> Setup:
    """The recipe as it stands."""
    name = recipe.sharding.strategy or strategy or "zero3"
    section, training = recipe.sharding, recipe.training
    every = section.activation_checkpointing
    every = None if every == "auto" else every  # chosen by the memory when the run starts
    return Setup(
        STRATEGIES[name],
        _mesh(STRATEGIES[name], ranks, shard_size or hardware.devices_per_node),
        section.offload == "optimizer" or (section.offload is None and offload),
        None if every is None else Checkpointing(every, section.offload_checkpoints),
        training.micro_batch_size,
        training.gradient_accumulation_steps,
    )


def _mesh(strategy: Strategy, ranks: int, shard: int) -> MeshShape:
    if not strategy.replicated:
        return MeshShape(1, ranks) if strategy.sharded else MeshShape(ranks, 1)
    if ranks % shard or not 1 < shard < ranks:
        raise BadInputError(
            f"strategy hybrid: {ranks} ranks cannot be parted into groups of {shard}; give --shard-size one of "
            f"{', '.join(map(str, _factors(ranks))) or 'none: there are too few ranks'}"
        )
    return MeshShape(ranks // shard, shard)


def _factors(ranks: int) -> list[int]:
    return [size for size in range(2, ranks) if ranks % size == 0]


def _require_ranks(ranks: int, hardware: Hardware) -> None:
    if ranks < 1:
        raise BadInputError(f"--gpus: {ranks}; allowed: 1 or more")
    if ranks > hardware.devices_per_node and ranks % hardware.devices_per_node:
        raise BadInputError(
            f"--gpus: {ranks} are no whole nodes of {hardware.devices_per_node}; give a multiple of it, or another "
            "--gpus-per-node"
        )


class Planner:
    """Rows of one workload; what they share is probed once."""

    def __init__(self, recipe: Recipe, workload: Workload, hardware: Hardware) -> None:
        self.recipe, self.workload, self.hardware = recipe, workload, hardware
        self._probes: dict[tuple[bool, int, Checkpointing | None], Probe] = {}

    @cached_property
    def units(self) -> list[UnitShape]:
        return unit_shapes(self.workload.model, self._sharded.plan, self.workload.mixed_precision)

    @cached_property
    def _sharded(self) -> Prober:
        return Prober(self.workload)

    @cached_property
    def _whole(self) -> Prober:
        return Prober(self.workload, whole=True)

    def probe(self, setup: Setup) -> Probe:
        """Of one micro-batch."""
        key = self._key(setup)
        if key not in self._probes:
            prober = self._whole if key[0] else self._sharded
            try:
                self._probes[key] = prober.probe(setup.micro_batch_size, setup.checkpointing)
            except Exception as error:  # a model may do anything
                raise UnplannableError(
                    f"{type(self.workload.model).__name__} does not run without values, so it cannot be planned: "
                    f"{type(error).__name__}: {first_line(error)}. Experts in float32 are such a case: plan them with "
                    "training.mixed_precision=bf16"
                ) from error
        return self._probes[key]

    def _key(self, setup: Setup) -> tuple[bool, int, Checkpointing | None]:
        """What a probe depends on: whether the model is whole, as DDP has it, the micro-batch, the checkpoints."""
        # Where its states alone do not fit, DDP's activations, a little larger, need no probe of their own.
        whole = not setup.strategy.sharded and self._states <= self.hardware.memory_bytes
        return whole, setup.micro_batch_size, setup.checkpointing

    @cached_property
    def _states(self) -> int:
        """Bytes of a whole model's parameters, gradients and optimizer state."""
        each = 4 + OPTIMIZER_BYTES[self.recipe.optimizer.kind]
        return sum(int(p.numel * (p.held + each * p.trainable)) for unit in self.units for p in unit.parameters)

    def moments(self, setup: Setup) -> list[Memory]:
        """What a rank holds during a step."""
        return replay(self.units, self.probe(setup), setup.strategy, self.layout(setup), setup.accumulation)

    def peak(self, setup: Setup) -> Memory:
        """The moment in which a rank holds most."""
        return max(self.moments(setup), key=lambda moment: moment.total)

    def layout(self, setup: Setup) -> Layout:
        compute = COMPUTE_BYTES[self.workload.mixed_precision] if setup.strategy.sharded else None
        alone = setup.offload and setup.ranks == 1 and setup.strategy.reduce_each_micro_batch
        return Layout(
            shard=setup.mesh.shard,
            compute=compute,
            reduce=compute if alone and compute is not None else 4,
            optimizer=OPTIMIZER_BYTES[self.recipe.optimizer.kind],
            offload=setup.offload,
            residents=self.residents(setup),
        )

    def residents(self, setup: Setup) -> frozenset[int]:
        """Units whose offloaded state `sharding.device_state_gib` keeps on the device: the root's, then the first."""
        size = self.recipe.sharding.device_state_gib
        if not setup.offload or size is None or size == "auto":
            return frozenset()
        room, found = int(size * GIB), set()
        order = [len(self.units) - 1, *range(len(self.units) - 1)]
        for index in order:
            numel = self.units[index].trainable_numel(setup.mesh.shard)
            if not numel:
                continue
            room -= numel * (12 + self._landing_bytes(setup))
            if room < 0:
                break
            found.add(index)
        return frozenset(found)

    def _landing_bytes(self, setup: Setup) -> int:
        """Of a gradient that lands on the host: one backward of one rank is not summed with anything."""
        compute = COMPUTE_BYTES[self.workload.mixed_precision]
        return compute if compute is not None and setup.ranks == 1 and setup.accumulation == 1 else 4

    def host_bytes(self, setup: Setup) -> int:
        """Of the ranks of one node: masters, moments, landing places and staging; checkpoints."""
        ranks = min(setup.ranks, self.hardware.devices_per_node)
        return ranks * (self._offloaded_bytes(setup) + self.probe(setup).host_peak)

    def _offloaded_bytes(self, setup: Setup) -> int:
        if not setup.offload:
            return 0
        residents = self.residents(setup)
        hosted = [unit.trainable_numel(setup.mesh.shard) for i, unit in enumerate(self.units) if i not in residents]
        staged = STAGING_BUFFERS * (COMPUTE_BYTES[self.workload.mixed_precision] or 4)
        return plan_host(hosted, MOMENTS, self._landing_bytes(setup), staged).total

    def offload_plan(self, setup: Setup) -> OffloadPlan | None:
        if not setup.offload:
            return None
        residents = self.residents(setup)
        own = [unit.trainable_numel(setup.mesh.shard) for unit in self.units]
        kept = sum(own[index] for index in residents)
        during_backward = self.recipe.training.max_grad_norm is None
        return OffloadPlan(device_share=kept / max(1, sum(own)), during_backward=during_backward)

    def row(self, setup: Setup) -> Row:
        moments = self.moments(setup)
        peak = max(moments, key=lambda moment: moment.total)
        layout, offload = self.layout(setup), self.offload_plan(setup)
        sent = traffic(
            self.units,
            setup.strategy,
            setup.mesh,
            accumulation=setup.accumulation,
            compute_bytes=layout.compute,
            reduce_bytes=layout.reduce,
            offload=offload,
        )
        probe = self.probe(setup)
        time = step_time(
            [Segment("model", probe.forward, probe.backward)],
            sent,
            setup.strategy,
            setup.mesh,
            self.hardware,
            accumulation=setup.accumulation,
            dtype=DTYPES[self.workload.mixed_precision],
            offload=offload,
        )
        host = self.host_bytes(setup)
        verdict, need, problem = verdict_of(peak.total, host, setup.ranks, self.hardware)
        tokens = setup.micro_batch_size * setup.accumulation * setup.ranks * self.workload.tokens
        return Row(setup, peak, tuple(moments), need, host, sent, time, tokens, verdict, problem)


OPTIMIZER_BYTES = {"adamw": 8.0, "adamw_8bit": 2.0625, "adamw_4bit": 1.0625, "adamw_fp8": 2.0156, "muon": 8.0}
"""State of a trainable element on the device: two moments, with torchao's scales of a block of 256 or 128; for muon,
which has one moment for the matrices of the blocks, an upper bound."""


def verdict_of(peak: int, host_bytes: int, ranks: int, hardware: Hardware) -> tuple[Verdict, int, str]:
    """Whether a peak fits, what it needs, and what is wrong if it does not."""
    on_node = min(ranks, hardware.devices_per_node)
    context = CONTEXT_BYTES[hardware.device_type]
    # A CPU rank's device is its host.
    beside = host_bytes // on_node if hardware.device_type == "cpu" else 0
    needs = {verdict: int(peak * factor) + context + beside for verdict, factor in HEADROOM.items()}
    if (
        hardware.device_type == "cuda"
        and hardware.host_memory_bytes is not None
        and host_bytes > hardware.host_memory_bytes
    ):
        found = f"{host_bytes / GIB:.0f} GiB of host memory a node, of {hardware.host_memory_bytes / GIB:.0f}"
        return "no", needs["fits"], found
    for verdict, need in needs.items():
        if need <= hardware.memory_bytes:
            return verdict, need, ""
    return "no", needs["tight"], f"{needs['tight'] / GIB:.1f} GiB of {hardware.memory_bytes / GIB:.0f}"


# The table


def _setups(recipe: Recipe, ranks: int, asked: Setup, planner: Planner) -> Iterator[Setup]:
    """Every strategy with and without offload, every checkpointing, several micro-batches of the same step."""
    checkpointings = list(dict.fromkeys([None, Checkpointing(1), asked.checkpointing]))
    for strategy, mesh in _strategies(ranks, asked):
        for offload in (False, True) if strategy.sharded and can_offload(recipe, planner.workload) else (False,):
            if offload and strategy.replicated and mesh.shard < min(ranks, planner.hardware.devices_per_node):
                continue  # each replica of a node would hold all of the state
            for checkpointing in checkpointings:
                for size, accumulation in _micro_batches(asked):
                    yield Setup(strategy, mesh, offload, checkpointing, size, accumulation)


def can_offload(recipe: Recipe, workload: Workload) -> bool:
    """Whether optimizer state of this recipe can be offloaded."""
    is_plain = workload.mixed_precision != "fp16" and recipe.optimizer.kind == "adamw"
    return is_plain and recipe.sharding.offload != "none"


def _strategies(ranks: int, asked: Setup) -> Iterator[tuple[Strategy, MeshShape]]:
    if ranks == 1:
        yield from ((STRATEGIES[name], _mesh(STRATEGIES[name], 1, 1)) for name in ("ddp", "zero3"))
        return
    for name in ("ddp", "zero1", "zero2", "zero3"):
        yield STRATEGIES[name], _mesh(STRATEGIES[name], ranks, 1)
    sizes = {2**power for power in range(1, 14)} & set(_factors(ranks))
    for shard in sorted(
        sizes | ({asked.mesh.shard} if asked.strategy.replicated else set()) or set(_factors(ranks)[:3])
    ):
        yield STRATEGIES["hybrid"], MeshShape(ranks // shard, shard)


def _micro_batches(asked: Setup) -> list[tuple[int, int]]:
    """Micro-batch sizes and accumulations of as many samples a step: 1, 2, 4 ... and the recipe's own."""
    samples = asked.micro_batch_size * asked.accumulation
    sizes = [size for size in (2**power for power in range(12)) if samples % size == 0]
    nearest = sorted(sizes, key=lambda size: abs(size - asked.micro_batch_size))[: MICRO_BATCHES - 1]
    return [(size, samples // size) for size in sorted({*nearest, asked.micro_batch_size})]


def _rank_of(row: Row) -> tuple[int, float]:
    return ("fits", "tight", "no").index(row.verdict), row.time.mid


def _recommended(rows: list[Row], hardware: Hardware) -> tuple[Row | None, str]:
    """The fastest that fits; among those as fast, the one that does least to save memory and then holds least."""
    for verdict in ("fits", "tight"):
        fitting = [row for row in rows if row.verdict == verdict]
        if not fitting:
            continue
        fastest = min(row.time.mid for row in fitting)
        best = min(
            (row for row in fitting if row.time.mid <= AS_FAST * fastest),
            key=lambda row: (row.setup.num_levers, row.peak.total),
        )
        words = "with room to spare" if verdict == "fits" else "only just; watch the first steps"
        which = "as fast as the fastest that fits" if best.time.mid > fastest else "the fastest that fits"
        return best, f"{which}, {words}: {best.need / GIB:.1f} of {hardware.memory_bytes / GIB:.0f} GiB"
    least = min(rows, key=lambda row: row.need)
    needs = f"{least.need / GIB:.1f} GiB of {hardware.memory_bytes / GIB:.0f}"
    return None, f"nothing fits; {least.setup.name} needs least, {needs}"


# Levers


def _levers(planner: Planner, asked: Row) -> list[Lever]:
    """Single changes of the recipe as it stands that make it hold less; those that fit first, the fastest first."""
    found = [Lever(change, make()) for change, make in _changes(planner, asked.setup)]
    useful = [lever for lever in found if lever.row.need < asked.need or asked.verdict == "no" != lever.row.verdict]
    return sorted(useful, key=lambda lever: (*_rank_of(lever.row)[:1], lever.row.time.mid / lever.row.tokens))


def _changes(planner: Planner, setup: Setup) -> Iterator[tuple[str, Callable[[], Row]]]:
    for change, changed in smaller_setups(planner, setup):
        yield change, functools.partial(planner.row, changed)
    yield from _other_recipes(planner, setup)


def smaller_setups(planner: Planner, setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Setups of the same recipe that hold less, one change each, in the recipe's words."""
    if setup.checkpointing is None:
        yield "sharding.activation_checkpointing=1", replace(setup, checkpointing=Checkpointing(1))
    elif not setup.checkpointing.offload:
        offloaded = replace(setup.checkpointing, offload=True)
        yield "sharding.offload_checkpoints=true", replace(setup, checkpointing=offloaded)
    if setup.micro_batch_size > 1:
        samples = setup.micro_batch_size * setup.accumulation
        change = f"training.micro_batch_size=1 training.gradient_accumulation_steps={samples}"
        yield change, replace(setup, micro_batch_size=1, accumulation=samples)
    zero3 = STRATEGIES["zero3"]
    if setup.strategy != zero3 and setup.ranks > 1:
        yield "strategy zero3", replace(setup, strategy=zero3, mesh=_mesh(zero3, setup.ranks, 1))
    if not setup.offload and setup.strategy.sharded and can_offload(planner.recipe, planner.workload):
        yield "sharding.offload=optimizer", replace(setup, offload=True)
    if setup.strategy == zero3:
        yield f"{2 * setup.ranks} devices", replace(setup, mesh=MeshShape(1, 2 * setup.ranks))


def _other_recipes(planner: Planner, setup: Setup) -> Iterator[tuple[str, Callable[[], Row]]]:
    recipe = planner.recipe

    def with_recipe(changed: Recipe) -> Callable[[], Row]:
        workload = workload_of(changed, planner.workload.mixed_precision)
        return lambda: Planner(changed, workload, planner.hardware).row(setup)

    if recipe.adapter.kind == "none" and recipe.objective.kind != "sequence_classification":
        adapted = recipe.model_copy(update={"adapter": AdapterSection(kind="lora")})
        yield "adapter.kind=lora", with_recipe(adapted)
    half = recipe.data.max_length // 2
    if half >= 8:
        shorter = recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_length": half})})
        yield f"data.max_length={half}", with_recipe(shorter)


@dataclass(frozen=True)
class Launch:
    """What starts a setup."""

    command: str
    notes: tuple[str, ...] = field(default=())


def launch_of(found: Plan, row: Row, recipe_name: str, overrides: list[str]) -> Launch:
    """The command that runs a row."""
    setup, hardware = row.setup, found.hardware
    nodes = -(-setup.ranks // hardware.devices_per_node)
    parts = ["accelerate launch", f"--config_file accelerate_configs/{_config(setup, hardware)}.yaml"]
    parts.append(f"--num_processes {setup.ranks}")
    notes = []
    if nodes > 1:
        parts.append(f"--num_machines {nodes} --machine_rank $NODE --main_process_ip $HEAD --main_process_port 29500")
        notes.append("on every node, with its number as NODE and the first node's address as HEAD")
    if setup.strategy.replicated:
        sizes = {"replicate": setup.mesh.replicate, "shard": setup.mesh.shard}
        parts += [f"--parallelism_config_dp_{axis}_size {size}" for axis, size in sizes.items()]
    parts.append(f"recipes/finetune.py --recipe {recipe_name}")
    settings = dict(text.partition("=")[::2] for text in overrides)
    settings |= {
        "training.micro_batch_size": str(setup.micro_batch_size),
        "training.gradient_accumulation_steps": str(setup.accumulation),
    }
    if setup.checkpointing is not None:
        settings["sharding.activation_checkpointing"] = str(setup.checkpointing.every)
        if setup.checkpointing.offload:
            settings["sharding.offload_checkpoints"] = "true"
    elif found.recipe.sharding.activation_checkpointing is not None:
        settings["sharding.activation_checkpointing"] = "null"
    if found.recipe.sharding.strategy is not None:
        settings["sharding.strategy"] = setup.strategy.name
    if setup.offload and not _config(setup, hardware).endswith("offload"):
        settings["sharding.offload"] = "optimizer"
    return Launch(" ".join([*parts, *(shlex.quote(f"{key}={value}") for key, value in settings.items())]), tuple(notes))


def _config(setup: Setup, hardware: Hardware) -> str:
    """Name of the Accelerate config that a setup starts from."""
    if hardware.device_type == "cpu":
        return "cpu_2"
    if setup.ranks == 1:
        return "gpu_1_offload" if setup.offload else "gpu_1"
    return "zero3_offload" if setup.offload and setup.strategy.name == "zero3" else setup.strategy.name
