"""Computes the memory and the traffic of a setup, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from toolkit.paths import CHECKPOINT_FILE_BYTES, GIB
from toolkit.planning.hardware import Hardware
from toolkit.planning.memory.replay import OPTIMIZER_STEP, Memory, replay
from toolkit.planning.memory.state_bytes import COMPUTE_BYTES, OPTIMIZER_BYTES, MemoryLayout
from toolkit.planning.probed import ProbedModel
from toolkit.planning.setup import Setup, settings_of
from toolkit.planning.traffic import OffloadPlan, Traffic, traffic, with_teacher
from toolkit.planning.workload.workload import Workload, with_matrices_of, with_rows_of
from toolkit.recipe.combinations import Refusal, refusals
from toolkit.recipe.features import Surroundings
from toolkit.recipe.recipe import Recipe
from toolkit.sharding.fsdp2.fsdp import autograd_sums_gradients
from toolkit.sharding.offload.executors import stream_bytes
from toolkit.sharding.offload.host import plan_host
from toolkit.sharding.offload.state import STAGING_BUFFERS
from toolkit.sharding.parallel.expert_parallel import expert_placement

Verdict = Literal["fits", "tight", "no"]

HEADROOM: dict[Verdict, float] = {"fits": 1.25, "tight": 1.05}
"""Factor on the peak: CUDA's allocator reserved 1.19 to 1.23 times the allocated bytes in published runs of eager
training, and little more than the allocated bytes with expandable segments, which the toolkit sets."""

CONTEXT_BYTES = {"cuda": 2 * GIB, "cpu": GIB // 2}
"""Bytes of a rank before it holds anything: CUDA's context and NCCL's buffers; Python and its libraries."""

WORKSPACE_BYTES = 32 * 2**20
"""cuBLAS's workspace for each thread that multiplies on a stream (Hopper; less on older devices); never freed."""

ANSWERS = "answers to held-out prompts"
"""Name of the moment of an evaluation in which answers are written."""

ROLLOUT = "sampling of completions"
"""Name of the moment before a step in which the model samples what the step learns from."""

SAVE = "save"
"""Name of the moment between two steps in which a CPU rank writes a checkpoint."""

FORWARDS = ("gather", "forward")
"""Prefixes of the moments in which units are gathered for a forward."""


@dataclass(frozen=True)
class PlanRow:
    """The needs and the traffic of a setup.

    Attributes:
        peak: the moment in which a rank holds most on its device.
        moments: all moments, in the order of a step.
        need: bytes of the device's memory for the peak, with headroom and context.
        host_bytes: host memory for offloaded state and checkpoints, of all ranks of a node.
        traffic: the traffic of one optimizer step of a rank.
        between_nodes: bytes that a node sends to others in a step.
        tokens: tokens of one optimizer step of all ranks.
        dealing: how ranks that do not divide a layer's experts share them, or empty.
        problem: why the setup does not fit, or empty.
    """

    setup: Setup
    peak: Memory
    moments: tuple[Memory, ...]
    need: int
    host_bytes: int
    traffic: Traffic
    between_nodes: int
    tokens: int
    verdict: Verdict
    problem: str
    dealing: str


class Planner:
    """Plans rows of one workload: what a model takes and what it keeps becomes the moments of a step, and a verdict."""

    def __init__(self, recipe: Recipe, workload: Workload, hardware: Hardware) -> None:
        self.recipe, self.workload, self.hardware = recipe, workload, hardware
        self.model = ProbedModel(recipe, workload, hardware)
        self._others: dict[tuple[int, int], Planner] = {}

    @cached_property
    def state(self) -> HostState:
        return HostState(self.model)

    def on_groups(self, sequence: int, tensor: int) -> Planner:
        """Returns the planner of the same model with rows that `sequence` ranks share, and matrices that `tensor` cut.

        Raises:
            BadInputError: if so many ranks cannot share or cut them.
        """
        if (sequence, tensor) == (self.workload.sequence, self.workload.tensor):
            return self
        if (sequence, tensor) not in self._others:
            recipe = self.recipe.changed(sharding={"sequence": sequence, "tensor": tensor})
            workload = with_matrices_of(with_rows_of(self.workload, recipe), recipe)
            self._others[sequence, tensor] = Planner(recipe, workload, self.hardware)
        return self._others[sequence, tensor]

    @cached_property
    def surroundings(self) -> Surroundings:
        """What decides, besides settings, which of them can go together."""
        first = next((unit.name for unit in self.model.units if unit.trains_float32), None)
        torch_sums, device = autograd_sums_gradients(), self.hardware.device_type
        return Surroundings(
            device, keeps_float32=first, sums_in_autograd=torch_sums, has_images=self.workload.has_images
        )

    def settings(self, setup: Setup) -> Recipe:
        """Returns the recipe as it runs with this setup."""
        return settings_of(self.recipe, setup, self.workload.mixed_precision)

    def refusals(self, setup: Setup) -> list[Refusal]:
        """Returns why a run refuses a setup; empty if it does not."""
        return refusals(self.settings(setup), self.surroundings)

    def moments(self, setup: Setup) -> list[Memory]:
        """Returns what a rank holds during a step, over all batches of the workload, while it saves and answers."""
        found = [
            moment for planner in (self, *self._planners_of_other_batches) for moment in planner._of_own_batch(setup)
        ]
        between = next(moment for moment in found if moment.moment == OPTIMIZER_STEP)
        # DDP's buckets stay; other gradients are freed when the step is done.
        between = replace(between, gradients=0 if setup.strategy.sharded else between.gradients)
        if self.state.pauses_to_save:
            saved = replace(between, moment=SAVE, optimizer=between.optimizer + self.state.saving_bytes(setup))
            found = [*found, saved] if saved.total > between.total else found
        return [*found, *self._written(setup, found, between)]

    def _written(self, setup: Setup, step: Sequence[Memory], between: Memory) -> Iterator[Memory]:
        """Yields the moments in which text is written: state between steps, gathered units, and the cache."""
        shapes: dict[str, tuple[int, int, int]] = {}  # rows, and the most tokens of a prompt and of what follows it
        section, length = self.recipe.answers, self.recipe.data.max_length
        if section.file is not None:
            shapes[ANSWERS] = section.batch_size, length, section.max_new_tokens
        if self.recipe.objective.spec.samples_itself:
            objective, training = self.recipe.objective, self.recipe.training
            assert objective.max_new_tokens is not None
            rows = objective.rollout_batch_size or training.micro_batch_size
            shapes[ROLLOUT] = rows, length - objective.max_new_tokens, objective.max_new_tokens
        forwards = [moment for moment in step if moment.moment.startswith(FORWARDS)]
        gathered = max(moment.gathered + moment.communication for moment in forwards)
        for name, shape in shapes.items():
            taken = self.model.writing(not setup.strategy.sharded, *shape).peak
            yield replace(between, moment=name, gathered=gathered, activations=taken)

    def rollout(self, setup: Setup) -> Memory | None:
        """Returns what a rank holds while the model samples with all units gathered; None if it does not sample.

        Raises:
            UnplannableError: if the model cannot run on tensors without values.
        """
        found = next((moment for moment in self.moments(setup) if moment.moment == ROLLOUT), None)
        if found is None or not setup.strategy.sharded:
            return found
        return replace(found, gathered=max(found.gathered, sum(self.model.whole_bytes)))

    def _of_own_batch(self, setup: Setup) -> list[Memory]:
        shapes, layout = [*self.model.teacher_units, *self.model.units], self.state.layout(setup)
        probe = self.model.probe(setup)
        found = replay(shapes, probe, setup.strategy, layout, setup.accumulation, setup.by_block)
        beside = self.state.beside_step(setup)
        return [replace(moment, optimizer=moment.optimizer + beside) for moment in found]

    def peak(self, setup: Setup) -> Memory:
        """Returns the moment in which a rank holds most."""
        return max(self.moments(setup), key=lambda moment: moment.total)

    @cached_property
    def _planners_of_other_batches(self) -> list[Planner]:
        others = (replace(self.workload, batch=batch, also=()) for batch in self.workload.also)
        return [Planner(self.recipe, other, self.hardware) for other in others]

    def traffic(self, setup: Setup) -> Traffic:
        """Returns the traffic of one optimizer step."""
        layout, probe = self.state.layout(setup), self.model.probe(setup)
        sent = traffic(
            self.model.units,
            setup.strategy,
            setup.mesh,
            accumulation=setup.gathering_batches,
            compute_bytes=layout.compute,
            reduce_bytes=layout.reduce,
            offload=self.state.offload_plan(setup),
        )
        if self.workload.teacher is not None:
            head = self.model.sharded_prober.teacher_head if probe.gathers_head else None
            sent = with_teacher(sent, self.model.teacher_units, head, setup.mesh, setup.accumulation, layout.compute)
        # Tokens are sent to experts as if all experts got the same number.
        return replace(sent, exchanged=probe.exchanged * setup.accumulation, sequence=self.workload.sequence)

    def row(self, setup: Setup) -> PlanRow:
        planner = self.on_groups(setup.sequence or self.workload.sequence, setup.mesh.tensor)
        if planner is not self:
            return planner.row(setup)
        moments, sent, host = self.moments(setup), self.traffic(setup), self.state.of_node(setup)
        peak = max(moments, key=lambda moment: moment.total)
        verdict, need, problem = verdict_of(peak.total, host, self.hardware, setup)
        between = sent.between_nodes(setup.mesh, self.hardware.devices_per_node)
        samples = setup.micro_batch_size * setup.accumulation * setup.ranks
        tokens = samples // (self.workload.sequence * setup.mesh.tensor) * self.workload.tokens
        dealing = expert_placement(self.workload.model, setup.mesh.shard)
        return PlanRow(setup, peak, tuple(moments), need, host, sent, between, tokens, verdict, problem, dealing)


def standing_bytes(device_type: str, setup: Setup | None) -> int:
    """Returns a rank's bytes on top of its peak: the context and, by block, cuBLAS's workspaces of micro-batch threads.

    The workspaces of the main thread and of autograd's thread are small compared with the context.
    """
    threads = setup.accumulation if setup is not None and setup.by_block and device_type == "cuda" else 0
    return CONTEXT_BYTES[device_type] + threads * WORKSPACE_BYTES


def verdict_of(peak: int, host_bytes: int, hardware: Hardware, setup: Setup | None = None) -> tuple[Verdict, int, str]:
    """Returns whether a peak fits, what it needs, and what is wrong if it does not.

    Args:
        host_bytes: host memory of a node apart from the devices; 0 for CPU ranks, whose peak holds everything.
    """
    # Fragments grow with the peak, the context does not: hence a factor and a sum.
    context = standing_bytes(hardware.device_type, setup)
    needs = {verdict: int(peak * factor) + context for verdict, factor in HEADROOM.items()}
    if hardware.host_memory_bytes is not None and host_bytes > hardware.host_memory_bytes:
        found = f"{host_bytes / GIB:.0f} GiB of host memory a node, of {hardware.host_memory_bytes / GIB:.0f}"
        return "no", needs["fits"], found
    for verdict, need in needs.items():
        if need <= hardware.memory_bytes:
            return verdict, need, ""
    return "no", needs["tight"], f"{needs['tight'] / GIB:.1f} GiB of {hardware.memory_bytes / GIB:.0f}"


# ---- What a rank keeps besides parameters and gradients: offloaded state, averages, copies and files of a save ----

MOMENTS = 2
"""Moments of AdamW, the only optimizer that a recipe can offload."""


class HostState:
    """Counts the bytes of a probed model's state, on the host and in what a device keeps or streams of it."""

    def __init__(self, model: ProbedModel) -> None:
        self._model, self._recipe, self._on_cpu = model, model.recipe, model.hardware.device_type == "cpu"
        self._compute = COMPUTE_BYTES[model.workload.mixed_precision]
        self._has_one_dtype = not any(unit.trains_float32 for unit in model.units)
        """Whether all gradients have the dtype of compute."""

    def layout(self, setup: Setup) -> MemoryLayout:
        """Returns how a rank shards and stores its state."""
        compute = self._compute if setup.strategy.sharded else None
        # One rank reduces nothing: the offload engine takes the gradient as backward made it.
        alone = setup.offload and setup.ranks == 1 and setup.strategy.reduce_each_micro_batch and self._has_one_dtype
        return MemoryLayout(
            shard=setup.mesh.shard,
            compute=compute,
            reduce=compute if alone and compute is not None else 4,
            optimizer=OPTIMIZER_BYTES[self._recipe.optimizer.kind],
            offload=setup.offload,
            residents=frozenset(len(self._model.teacher_units) + number for number in self.residents(setup)),
            reshard_after_forward=setup.mesh.reshard_after_forward,
        )

    def residents(self, setup: Setup) -> frozenset[int]:
        """Returns the units whose offloaded state `sharding.device_state_gib` keeps on the device: root first."""
        size = self._recipe.sharding.device_state_gib
        if not setup.offload or size is None:
            return frozenset()
        room, found = int(size * GIB), set()
        # The engine's order: the units with no time to hide come first in the forward, experts after their block.
        places = {path: place for place, (path, _) in enumerate(self._model.workload.model.named_modules())}
        units = self._model.sharded_prober.plan.units
        order = sorted(range(len(units)), key=lambda index: min(places[path] for path in units[index].modules))
        for index in order:
            numel = self._model.units[index].trainable_numel(setup.mesh.shard)
            if not numel:
                continue
            room -= numel * (12 + self._landing_bytes(setup))
            # In order and without gaps: a later, smaller unit is not taken instead.
            if room < 0:
                break
            found.add(index)
        return frozenset(found)

    def offload_plan(self, setup: Setup) -> OffloadPlan | None:
        """Returns what of the state is on the host, or None without offload."""
        if not setup.offload:
            return None
        residents = self.residents(setup)
        own = [unit.trainable_numel(setup.mesh.shard) for unit in self._model.units]
        return OffloadPlan(sum(own[index] for index in residents) / max(1, sum(own)), self._streams)

    def of_node(self, setup: Setup) -> int:
        """Returns the host memory that the ranks of one node hold in addition to their devices; 0 for CPU ranks."""
        # Each rank pins its own memory; nothing is shared between processes.
        ranks = min(setup.ranks, self._model.hardware.devices_per_node)
        return 0 if self._on_cpu else ranks * self.of_rank(setup)

    def of_rank(self, setup: Setup) -> int:
        """Returns one rank's host memory: masters, moments, buffers for gradients; offloaded activations; a save."""
        activations = self._model.probe(setup).host_peak * (setup.accumulation if setup.by_block else 1)
        return self._offloaded_bytes(setup) + activations + self.saving_bytes(setup)

    def beside_step(self, setup: Setup) -> int:
        """Returns the bytes of the device's memory that the state takes at every moment of a step."""
        beside = self._streamed_bytes(setup) if setup.offload else self._average_bytes(setup)
        if self._on_cpu:
            # Host and device are one memory: what is offloaded or copied stays in it.
            beside += self.of_rank(setup) - (self.saving_bytes(setup) if self.pauses_to_save else 0)
        return beside

    @property
    def pauses_to_save(self) -> bool:
        """Whether a save is over before the next step takes memory for itself."""
        return self._on_cpu and not self._recipe.checkpoint.copies_from("cpu")

    def saving_bytes(self, setup: Setup) -> int:
        """Returns the bytes of a save: the copy that is written while training goes on, and one file at a time."""
        section = self._recipe.checkpoint
        if section.every_steps is None and section.minutes is None:
            return 0
        is_adapted = self._recipe.adapter.kind != "none"  # then the base is not saved
        averages = 4 * (self._recipe.training.ema is not None)
        # Moments of few bits are saved in float32.
        state = sum(
            parameter.shard_numel(setup.mesh.shard)
            * (parameter.held + (4 * parameter.moments + averages) * parameter.trainable)
            for unit in self._model.units
            for parameter in unit.parameters
            if parameter.trainable or not is_adapted
        )
        copied = state if section.copies_from(self._model.hardware.device_type) else 0
        return int(copied + min(state, CHECKPOINT_FILE_BYTES))

    @property
    def _streams(self) -> bool:
        return self._recipe.sharding.offload_executor == "device_stream"

    def _average_bytes(self, setup: Setup) -> int:
        """Returns the bytes of a rank's part of the averaged weights."""
        if self._recipe.training.ema is None:
            return 0
        return 4 * sum(unit.trainable_numel(setup.mesh.shard) for unit in self._model.units)

    def _landing_bytes(self, setup: Setup) -> int:
        """Returns the bytes of a gradient's element on the host: a single backward of one rank sums nothing."""
        is_exact = setup.ranks == 1 and setup.accumulation == 1 and self._has_one_dtype
        return self._compute if self._compute is not None and is_exact else 4

    def _hosted_elements(self, setup: Setup) -> list[int]:
        """Returns the trainable elements of each unit whose state is on the host."""
        residents, units = self.residents(setup), self._model.units
        return [unit.trainable_numel(setup.mesh.shard) for i, unit in enumerate(units) if i not in residents]

    def _streamed_bytes(self, setup: Setup) -> int:
        """Returns the device buffers through which offloaded state streams, if it does."""
        return stream_bytes(max(self._hosted_elements(setup), default=0)) if setup.offload and self._streams else 0

    def _offloaded_bytes(self, setup: Setup) -> int:
        if not setup.offload:
            return 0
        staged = 0 if self._streams else STAGING_BUFFERS * (self._compute or 4)
        hosted = plan_host(self._hosted_elements(setup), MOMENTS, self._landing_bytes(setup), staged).total
        # Averages, and the copy of the masters that an evaluation keeps while it uses the averages.
        return hosted + 2 * self._average_bytes(setup)
