"""Computes the memory and the traffic of a setup, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from toolkit.paths import GIB
from toolkit.planning.hardware import Hardware
from toolkit.planning.host_state import HostState
from toolkit.planning.memory.replay import OPTIMIZER_STEP, Memory, replay
from toolkit.planning.probed import ProbedModel
from toolkit.planning.setup import Setup, settings_of
from toolkit.planning.traffic import Traffic, traffic, with_teacher
from toolkit.planning.workload.workload import Workload, with_matrices_of, with_rows_of
from toolkit.recipe.combinations import Refusal, refusals
from toolkit.recipe.features import Surroundings
from toolkit.recipe.recipe import Recipe
from toolkit.sharding.fsdp2.fsdp import autograd_sums_gradients
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
