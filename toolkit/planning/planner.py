"""Computes the memory, traffic and time of a setup, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from toolkit.errors import BadInputError, UnplannableError, in_words
from toolkit.model.attention.positions import num_positions
from toolkit.model.structure.fake_tensors import grouped_products, lacks_products, without_logs
from toolkit.objectives.teacher import teacher_units
from toolkit.optim.build import block_matrices
from toolkit.paths import CHECKPOINT_FILE_BYTES, GIB
from toolkit.planning.memory.answering import Answering, answering
from toolkit.planning.memory.probe import Probe, Prober
from toolkit.planning.memory.replay import OPTIMIZER_STEP, Memory, replay
from toolkit.planning.memory.state_bytes import MemoryLayout
from toolkit.planning.setup import Setup, settings_of
from toolkit.planning.time.hardware import Hardware
from toolkit.planning.time.sampling import Sampling, with_sampling
from toolkit.planning.time.speed import ModelSegment, StepTime, step_time
from toolkit.planning.time.traffic import OffloadPlan, Traffic, traffic, with_teacher
from toolkit.planning.workload.unit_shapes import ParameterShape, UnitShape, teacher_shapes, unit_shapes
from toolkit.planning.workload.workload import Workload, shared_by, with_matrices_of, with_rows_of
from toolkit.recipe.combinations import Refusal, refusals
from toolkit.recipe.features import Settings
from toolkit.recipe.recipe import Recipe, with_tensor
from toolkit.sharding.blocks.checkpointing import Checkpointing, num_in_chunks
from toolkit.sharding.fsdp2.fsdp import autograd_sums_gradients
from toolkit.sharding.offload.executor_probe import STREAM_SHARE
from toolkit.sharding.offload.executors import stream_bytes
from toolkit.sharding.offload.host import plan_host
from toolkit.sharding.offload.state import STAGING_BUFFERS
from toolkit.sharding.parallel.expert_parallel import expert_placement
from toolkit.sharding.plan.units import stacked_experts

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

AS_FAST = 1.01
"""Rows within this factor of the fastest count as equally fast, because times are estimates."""

DTYPES = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}
COMPUTE_BYTES = {"no": None, "bf16": 2, "fp16": 2}

MOMENTS = 2
"""Moments of AdamW, the only optimizer that a recipe can offload."""


@dataclass(frozen=True)
class PlanRow:
    """The needs and the speed of a setup.

    Attributes:
        peak: the moment in which a rank holds most on its device.
        moments: all moments, in the order of a step.
        need: bytes of the device's memory for the peak, with headroom and context.
        host_bytes: host memory for offloaded state and checkpoints, of all ranks of a node.
        traffic: the traffic of one optimizer step.
        time: the time of one optimizer step.
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
    time: StepTime
    tokens: int
    verdict: Verdict
    problem: str
    dealing: str

    @property
    def tokens_per_second(self) -> tuple[float, float, float]:
        """Tokens per second of all ranks: low, mid, high."""
        return tuple(self.tokens / seconds for seconds in (self.time.high, self.time.mid, self.time.low))  # type: ignore[return-value]


class Planner:
    """Plans rows of one workload; what they share is probed once."""

    def __init__(self, recipe: Recipe, workload: Workload, hardware: Hardware) -> None:
        self.recipe, self.workload, self.hardware = recipe, workload, hardware
        self._probes: dict[tuple[bool, int, Checkpointing | None], Probe] = {}
        self._writings: dict[tuple[bool, int, int, int], Answering] = {}
        self._others: dict[tuple[int, int], Planner] = {}

    def on_groups(self, sequence: int, tensor: int) -> Planner:
        """Returns the planner of the same model with rows that `sequence` ranks share, and matrices that `tensor` cut.

        Raises:
            BadInputError: if so many ranks cannot share or cut them.
        """
        if (sequence, tensor) == (self.workload.sequence, self.workload.tensor):
            return self
        if (sequence, tensor) not in self._others:
            recipe = with_tensor(shared_by(self.recipe, sequence), tensor)
            workload = with_matrices_of(with_rows_of(self.workload, recipe), recipe)
            self._others[sequence, tensor] = Planner(recipe, workload, self.hardware)
        return self._others[sequence, tensor]

    @cached_property
    def units(self) -> list[UnitShape]:
        plan, is_cut = self._sharded_prober.plan, self.workload.tensor > 1
        model = self.workload.model_copy() if is_cut else self.workload.model
        stepped_by_muon = block_matrices(model, plan) if self.recipe.optimizer.kind == "muon" else []
        return unit_shapes(model, plan, self.workload.mixed_precision, stepped_by_muon, self.workload.experts)

    @property
    def largest_gather(self) -> int:
        """Bytes of the largest unit when it is gathered."""
        return max(self._whole_bytes_of(unit) for unit in self.units)

    def settings(self, setup: Setup) -> Settings:
        """Returns what the table of combinations checks if the recipe runs with this setup."""
        settings = settings_of(self.recipe, setup, self.workload.mixed_precision)
        first = next((unit.name for unit in self.units if unit.trains_float32), None)
        torch_sums, device = autograd_sums_gradients(), self.hardware.device_type
        seen = self.workload.has_images
        return replace(settings, device=device, keeps_float32=first, sums_in_autograd=torch_sums, has_images=seen)

    def refusals(self, setup: Setup) -> list[Refusal]:
        """Returns why a run refuses a setup; empty if it does not."""
        return refusals(self.settings(setup))

    @cached_property
    def teacher_units(self) -> list[UnitShape]:
        """Units of the teacher, if there is one."""
        teacher = self.workload.teacher
        if teacher is None:
            return []
        plan = teacher_units(teacher, self.workload.unit_classes)
        return teacher_shapes(teacher, plan, self.workload.mixed_precision, self.workload.tensor)

    @cached_property
    def _sharded_prober(self) -> Prober:
        return Prober(self.workload)

    @cached_property
    def _whole_prober(self) -> Prober:
        return Prober(self.workload, whole=True)

    @cached_property
    def can_chunk(self) -> bool:
        """Whether the blocks have parts that may run for a few tokens at a time."""
        return num_in_chunks(self.workload.model, self._sharded_prober.plan) > 0

    def probe(self, setup: Setup) -> Probe:
        """Probes one micro-batch of a setup.

        Raises:
            BadInputError: if the recipe cannot run so.
            UnplannableError: if the model cannot run on tensors without values.
        """
        key = self._probe_key(setup)
        if key not in self._probes:
            prober = self._whole_prober if key[0] else self._sharded_prober
            with self._without_values():
                self._probes[key] = prober.probe(setup.micro_batch_size, setup.checkpointing)
        return self._probes[key]

    @contextmanager
    def _without_values(self) -> Iterator[None]:
        """Lets models run inside; raises UnplannableError if they need the values of tensors."""
        try:
            with without_logs(), grouped_products():
                yield
        except BadInputError:
            raise
        except Exception as error:  # a model may do anything
            hampered = lacks_products() and stacked_experts(self.workload.model)
            cure = "; experts in float32 are planned with transformers 5.23 or later" if hampered else ""
            raise UnplannableError(
                f"{type(self.workload.model).__name__} cannot run on tensors without values, so it cannot be "
                f"planned: {in_words(error)}{cure}"
            ) from error

    def _probe_key(self, setup: Setup) -> tuple[bool, int, Checkpointing | None]:
        """Returns what a probe depends on: whether the model is whole, as under DDP, micro-batch and checkpoints."""
        # If its state alone does not fit, DDP's activations, which are a little larger, need no probe of their own.
        whole = not setup.strategy.sharded and self._whole_state_bytes <= self.hardware.memory_bytes
        return whole, setup.micro_batch_size, setup.checkpointing

    @cached_property
    def _whole_state_bytes(self) -> int:
        """Bytes of the whole model's parameters, gradients and optimizer state."""
        parameters = [p for unit in (*self.teacher_units, *self.units) for p in unit.parameters]
        return sum(int(p.numel * (p.held + (4 + self._kept_bytes(p)) * p.trainable)) for p in parameters)

    def _kept_bytes(self, parameter: ParameterShape) -> float:
        """Returns the bytes kept for each trained element: the optimizer's state and the weights' average."""
        state = OPTIMIZER_BYTES[self.recipe.optimizer.kind] * parameter.moments / 2
        return state + 4 * (self.recipe.training.ema is not None)

    def _average_bytes(self, setup: Setup) -> int:
        """Returns the bytes of a rank's part of the averaged weights."""
        if self.recipe.training.ema is None:
            return 0
        return 4 * sum(unit.trainable_numel(setup.mesh.shard) for unit in self.units)

    def moments(self, setup: Setup) -> list[Memory]:
        """Returns what a rank holds during a step, over all batches of the workload, while it saves and answers."""
        found = [
            moment
            for planner in (self, *self._planners_of_other_batches)
            for moment in planner._moments_of_own_batch(setup)
        ]
        between = next(moment for moment in found if moment.moment == OPTIMIZER_STEP)
        # DDP's buckets stay; other gradients are freed when the step is done.
        between = replace(between, gradients=0 if setup.strategy.sharded else between.gradients)
        if self._pauses_to_save:
            saved = replace(between, moment=SAVE, optimizer=between.optimizer + self._saving_bytes(setup))
            found = [*found, saved] if saved.total > between.total else found
        written = []
        if self.recipe.answers.file is not None:
            section, length = self.recipe.answers, self.recipe.data.max_length
            written.append(
                self._written(setup, found, between, ANSWERS, (section.batch_size, length, section.max_new_tokens))
            )
        if self.recipe.objective.spec.samples_itself:
            written.append(self._written(setup, found, between, ROLLOUT, self._rollout_shape))
        return [*found, *written]

    @property
    def _rollout_shape(self) -> tuple[int, int, int]:
        """Rows of a batch that is sampled, and the most tokens of a prompt and of a completion."""
        section, training = self.recipe.objective, self.recipe.training
        assert section.max_new_tokens is not None
        rows = section.rollout_batch_size or training.micro_batch_size
        return rows, self.recipe.data.max_length - section.max_new_tokens, section.max_new_tokens

    def rollout(self, setup: Setup, whole: bool) -> Memory | None:
        """Returns what a rank holds while the model samples, with all units gathered if `whole`; None if it does not.

        Raises:
            UnplannableError: if the model cannot run on tensors without values.
        """
        found = next((moment for moment in self.moments(setup) if moment.moment == ROLLOUT), None)
        return self._gathered_whole(found, setup) if found is not None and whole else found

    def _gathered_whole(self, rollout: Memory, setup: Setup) -> Memory:
        """Returns the moment of sampling with all units gathered, if they are sharded."""
        if not setup.strategy.sharded:
            return rollout
        return replace(rollout, gathered=max(rollout.gathered, self._whole_bytes))

    @property
    def _whole_bytes(self) -> int:
        """Bytes of all units when they are gathered."""
        return sum(self._whole_bytes_of(unit) for unit in self.units)

    def _whole_bytes_of(self, unit: UnitShape) -> int:
        compute = COMPUTE_BYTES[self.workload.mixed_precision]
        return sum(int(p.numel * (compute or p.held)) for p in unit.parameters)

    def _sampling(self, setup: Setup, moments: Sequence[Memory]) -> Sampling:
        rows, prompt, completion = self._rollout_shape
        written = self._writing(not setup.strategy.sharded, rows, prompt, completion)
        # As a run decides it, from the room that it finds.
        whole = self._gathered_whole(next(moment for moment in moments if moment.moment == ROLLOUT), setup)
        return Sampling(
            written.first,
            prompt / (prompt + completion),
            written.last,
            completion,
            -(-setup.micro_batch_size * setup.accumulation // rows),
            self._whole_bytes if setup.strategy.sharded else 0,
            verdict_of(whole.total, 0, self.hardware, setup)[0] == "fits",
        )

    @property
    def _pauses_to_save(self) -> bool:
        """Whether a save is over before the next step takes memory for itself."""
        return self.hardware.device_type == "cpu" and not self.recipe.checkpoint.copies_from("cpu")

    def _written(
        self, setup: Setup, step: Sequence[Memory], between: Memory, name: str, shape: tuple[int, int, int]
    ) -> Memory:
        """Returns the moment in which a batch is written: state between steps, gathered units, and the cache.

        Args:
            shape: rows, and the most tokens of a prompt and of what is written behind it.
        """
        forwards = [moment for moment in step if moment.moment.startswith(FORWARDS)]
        return replace(
            between,
            moment=name,
            gathered=max(moment.gathered + moment.communication for moment in forwards),
            activations=self._writing(not setup.strategy.sharded, *shape).peak,
        )

    def _writing(self, whole: bool, rows: int, prompt: int, answer: int) -> Answering:
        """Probes completions behind prompts of this length, by a whole model, as under DDP, or a sharded one."""
        key = whole, rows, prompt, answer
        if key not in self._writings:
            positions = num_positions(self.workload.model)
            if positions is not None:  # an encoder-decoder's target may use all positions
                before = 0 if self.recipe.objective.spec.encoder_decoder else prompt
                answer = max(2, min(answer, positions - before))
            with self._without_values():
                self._writings[key] = answering(self.workload, rows, prompt, answer, whole)
        return self._writings[key]

    def _moments_of_own_batch(self, setup: Setup) -> list[Memory]:
        shapes, layout = [*self.teacher_units, *self.units], self.layout(setup)
        found = replay(shapes, self.probe(setup), setup.strategy, layout, setup.accumulation, setup.by_block)
        beside = self._streamed_bytes(setup) if setup.offload else self._average_bytes(setup)
        if self.hardware.device_type == "cpu":
            # Host and device are one memory: what is offloaded or copied stays in it.
            beside += self.rank_host_bytes(setup) - (self._saving_bytes(setup) if self._pauses_to_save else 0)
        return [replace(moment, optimizer=moment.optimizer + beside) for moment in found]

    def peak(self, setup: Setup) -> Memory:
        """Returns the moment in which a rank holds most."""
        return max(self.moments(setup), key=lambda moment: moment.total)

    @cached_property
    def _planners_of_other_batches(self) -> list[Planner]:
        others = (replace(self.workload, batch=batch, also=()) for batch in self.workload.also)
        return [Planner(self.recipe, other, self.hardware) for other in others]

    def uneven_peak(self, setup: Setup) -> Memory | None:
        """Returns the peak if a rank's experts get twice their even share of tokens; None without expert parallel."""
        if self.workload.experts == 1:
            return None
        return Planner(self.recipe, replace(self.workload, skew=2), self.hardware).peak(setup)

    def layout(self, setup: Setup) -> MemoryLayout:
        compute = COMPUTE_BYTES[self.workload.mixed_precision] if setup.strategy.sharded else None
        # One rank reduces nothing: the offload engine takes the gradient as backward made it.
        alone = (
            setup.offload
            and setup.ranks == 1
            and setup.strategy.reduce_each_micro_batch
            and self._gradients_have_one_dtype
        )
        return MemoryLayout(
            shard=setup.mesh.shard,
            compute=compute,
            reduce=compute if alone and compute is not None else 4,
            optimizer=OPTIMIZER_BYTES[self.recipe.optimizer.kind],
            offload=setup.offload,
            residents=frozenset(len(self.teacher_units) + number for number in self.residents(setup)),
            node=setup.mesh.node,
        )

    def residents(self, setup: Setup) -> frozenset[int]:
        """Returns the units whose offloaded state `sharding.device_state_gib` keeps on the device: root first."""
        size = self.recipe.sharding.device_state_gib
        # `auto` is chosen by what is free when the run starts. The plan counts none, the least that it may hold.
        if not setup.offload or size is None or size == "auto":
            return frozenset()
        room, found = int(size * GIB), set()
        # The engine's order: the units with no time to hide come first in the forward, experts behind their block.
        places = {path: place for place, (path, _) in enumerate(self.workload.model.named_modules())}
        units = self._sharded_prober.plan.units
        order = sorted(range(len(units)), key=lambda index: min(places[path] for path in units[index].modules))
        for index in order:
            numel = self.units[index].trainable_numel(setup.mesh.shard)
            if not numel:
                continue
            room -= numel * (12 + self._landing_bytes(setup))
            # In order and without gaps: a later, smaller unit is not taken instead.
            if room < 0:
                break
            found.add(index)
        return frozenset(found)

    def _landing_bytes(self, setup: Setup) -> int:
        """Returns the bytes of a gradient's element on the host: a single backward of one rank sums nothing."""
        compute = COMPUTE_BYTES[self.workload.mixed_precision]
        is_exact = setup.ranks == 1 and setup.accumulation == 1 and self._gradients_have_one_dtype
        return compute if compute is not None and is_exact else 4

    @property
    def _gradients_have_one_dtype(self) -> bool:
        return not any(unit.trains_float32 for unit in self.units)

    def host_bytes(self, setup: Setup) -> int:
        """Returns the host memory that the ranks of one node hold beside their devices; 0 for CPU ranks."""
        if self.hardware.device_type == "cpu":
            return 0
        # Each rank pins its own memory; nothing is shared between processes.
        ranks = min(setup.ranks, self.hardware.devices_per_node)
        return ranks * self.rank_host_bytes(setup)

    def rank_host_bytes(self, setup: Setup) -> int:
        """Returns one rank's host memory: masters, moments, buffers for gradients; offloaded activations; a save."""
        return (
            self._offloaded_bytes(setup)
            + self.probe(setup).host_peak * (setup.accumulation if setup.by_block else 1)
            + self._saving_bytes(setup)
        )

    def _saving_bytes(self, setup: Setup) -> int:
        """Returns the bytes of a save: the copy that is written while training goes on, and one file at a time."""
        section = self.recipe.checkpoint
        if section.every_steps is None and section.minutes is None:
            return 0
        is_adapted = self.recipe.adapter.kind != "none"  # then the base is not saved
        averages = 4 * (self.recipe.training.ema is not None)
        # Moments of few bits are saved in float32.
        state = sum(
            parameter.shard_numel(setup.mesh.shard)
            * (parameter.held + (4 * parameter.moments + averages) * parameter.trainable)
            for unit in self.units
            for parameter in unit.parameters
            if parameter.trainable or not is_adapted
        )
        copied = state if section.copies_from(self.hardware.device_type) else 0
        return int(copied + min(state, CHECKPOINT_FILE_BYTES))

    def _hosted_elements(self, setup: Setup) -> list[int]:
        """Returns the trainable elements of each unit whose state is on the host."""
        residents = self.residents(setup)
        return [unit.trainable_numel(setup.mesh.shard) for i, unit in enumerate(self.units) if i not in residents]

    def _streamed_bytes(self, setup: Setup) -> int:
        """Returns the device buffers through which offloaded state streams, if it does or `auto` may choose so."""
        executor = self.recipe.sharding.offload_executor or "auto"
        if not setup.offload or executor not in ("auto", "device_stream"):
            return 0
        taken = stream_bytes(max(self._hosted_elements(setup), default=0))
        # `auto` measures on the machine of the run, so the plan counts what it may choose.
        chosen = executor == "device_stream" or self._auto_may_take(taken)
        return taken if chosen else 0

    def _auto_may_take(self, num_bytes: int) -> bool:
        is_cpu = self.hardware.device_type == "cpu"
        return not is_cpu and num_bytes <= STREAM_SHARE * self.hardware.memory_bytes

    def _offloaded_bytes(self, setup: Setup) -> int:
        if not setup.offload:
            return 0
        streamed = self.recipe.sharding.offload_executor == "device_stream"
        staged = 0 if streamed else STAGING_BUFFERS * (COMPUTE_BYTES[self.workload.mixed_precision] or 4)
        hosted = plan_host(self._hosted_elements(setup), MOMENTS, self._landing_bytes(setup), staged).total
        # Averages, and the copy of the masters that an evaluation keeps while it uses the averages.
        return hosted + 2 * self._average_bytes(setup)

    def offload_plan(self, setup: Setup) -> OffloadPlan | None:
        if not setup.offload:
            return None
        residents = self.residents(setup)
        own = [unit.trainable_numel(setup.mesh.shard) for unit in self.units]
        kept = sum(own[index] for index in residents)
        during_backward = self.recipe.training.max_grad_norm is None
        return OffloadPlan(device_share=kept / max(1, sum(own)), during_backward=during_backward)

    def row(self, setup: Setup) -> PlanRow:
        planner = self.on_groups(setup.sequence or self.workload.sequence, setup.mesh.tensor)
        if planner is not self:
            return planner.row(setup)
        moments = self.moments(setup)
        peak = max(moments, key=lambda moment: moment.total)
        layout, offload = self.layout(setup), self.offload_plan(setup)
        sent = traffic(
            self.units,
            setup.strategy,
            setup.mesh,
            accumulation=setup.gathering_batches,
            compute_bytes=layout.compute,
            reduce_bytes=layout.reduce,
            offload=offload,
        )
        probe, parts = self.probe(setup), self.workload.sequence
        if self.workload.teacher is not None:
            head = self._sharded_prober.teacher_head if probe.gathers_head else None
            sent = with_teacher(sent, self.teacher_units, head, setup.mesh, setup.accumulation, layout.compute)
        dtype = DTYPES[self.workload.mixed_precision]
        # Tokens are sent to experts as if all experts got the same number.
        exchanged = (probe.forward.exchanged + probe.backward.exchanged) * setup.accumulation
        sent = replace(
            sent, exchanged=exchanged, group=max(parts, self.workload.experts, self.workload.tensor), sequence=parts
        )
        time = step_time(
            # One segment: which unit an operator belongs to makes no difference to a sum.
            [ModelSegment("model", probe.forward, probe.backward, setup.accumulation // setup.gathering_batches)],
            sent,
            setup.strategy,
            setup.mesh,
            self.hardware,
            accumulation=setup.gathering_batches,
            dtype=dtype,
            offload=offload,
        )
        if self.recipe.objective.spec.samples_itself:
            time = with_sampling(time, self._sampling(setup, moments), setup.mesh, self.hardware, dtype)
        host = self.host_bytes(setup)
        verdict, need, problem = verdict_of(peak.total, host, self.hardware, setup)
        tokens = (
            setup.micro_batch_size
            * setup.accumulation
            * (setup.ranks // (parts * setup.mesh.tensor))
            * self.workload.tokens
        )
        dealing = expert_placement(self.workload.model, setup.mesh.shard)
        return PlanRow(setup, peak, tuple(moments), need, host, sent, time, tokens, verdict, problem, dealing)


OPTIMIZER_BYTES = {"adamw": 8.0, "adamw_8bit": 2.03125, "adamw_4bit": 1.0625, "adamw_fp8": 2.03125, "muon": 8.0}
"""State of a trainable element on the device: two moments, with torchao's float32 scales of blocks of 256, or of 128
for 4 bits. muon keeps one moment of the blocks' matrices, half of this."""


def standing_bytes(device_type: str, setup: Setup | None) -> int:
    """Returns a rank's bytes beside its peak: the context and, by block, cuBLAS's workspaces of micro-batch threads.

    The workspaces of the main thread and of autograd's thread are small beside the context.
    """
    threads = setup.accumulation if setup is not None and setup.by_block and device_type == "cuda" else 0
    return CONTEXT_BYTES[device_type] + threads * WORKSPACE_BYTES


def verdict_of(peak: int, host_bytes: int, hardware: Hardware, setup: Setup | None = None) -> tuple[Verdict, int, str]:
    """Returns whether a peak fits, what it needs, and what is wrong if it does not.

    Args:
        host_bytes: host memory of a node beside the devices; 0 for CPU ranks, whose peak holds everything.
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
