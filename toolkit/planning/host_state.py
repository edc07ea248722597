"""What a rank keeps besides parameters and gradients: offloaded state, averages, copies and files of a save."""

from __future__ import annotations

from toolkit.paths import CHECKPOINT_FILE_BYTES, GIB
from toolkit.planning.memory.state_bytes import COMPUTE_BYTES, OPTIMIZER_BYTES, MemoryLayout
from toolkit.planning.probed import ProbedModel
from toolkit.planning.setup import Setup
from toolkit.planning.traffic import OffloadPlan
from toolkit.sharding.offload.executors import stream_bytes
from toolkit.sharding.offload.host import plan_host
from toolkit.sharding.offload.state import STAGING_BUFFERS

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
