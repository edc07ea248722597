"""Plans a run that is about to start, compares the plan with the memory there is, and keeps it for the report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import psutil
import torch

from toolkit.errors import BadInputError, UnplannableError, first_line
from toolkit.planning.hardware import Hardware, presets
from toolkit.planning.memory.replay import Memory
from toolkit.planning.planner import ANSWERS, HEADROOM, ROLLOUT, Planner, standing_bytes
from toolkit.planning.setup import Setup, smaller_setups
from toolkit.planning.workload.workload import Workload
from toolkit.recipe.recipe import Recipe
from toolkit.sharding.blocks.checkpointing import Checkpointing
from toolkit.sharding.offload.host import free_host_bytes
from toolkit.sharding.plan.strategy import MeshShape, Strategy
from toolkit.terminal import format_bytes

KERNEL_BYTES = 24 * 2**20
"""Bytes of torch's own code that a CPU rank reads from its file in the first step."""


@dataclass(frozen=True)
class Planned:
    """The memory that a run is expected to hold on each device.

    Attributes:
        peak: the moment in which it holds most, or None if the model cannot be probed.
        room: bytes of the device's memory; for a CPU rank, what it holds and its share of the host's free memory.
        checkpointing: of activations, as the user set it or, for `auto`, as the memory needs it.
        by_block: whether the micro-batches of a step go through each unit together.
        problem: why the model cannot be probed.
        process: bytes of a CPU rank's process besides its tensors: Python, libraries and data; 0 for a device.
        gathers_whole: whether completions are sampled with the whole model on each rank, as there is room for it.
    """

    peak: Memory | None
    room: int
    checkpointing: Checkpointing | None
    by_block: bool = False
    problem: str = ""
    process: int = 0
    gathers_whole: bool = False

    @property
    def peak_bytes(self) -> int | None:
        """The planned figure to compare with the measured one: the device's, or a CPU rank's whole process."""
        if self.peak is None:
            return None
        # malloc keeps freed pages between tensors of other sizes, as CUDA's allocator reserves more than it hands out.
        return self.process + int(self.peak.total * (HEADROOM["fits"] if self.process else 1))

    def describe(self) -> str:
        """Describes the peak, its largest part and the room."""
        if self.peak is None or self.peak_bytes is None:
            return f"not planned: {self.problem}"
        kind, num_bytes = self.peak.largest
        most = f"in {self.peak.moment} ({kind} {format_bytes(num_bytes)})"
        process = f"; {format_bytes(self.process)} of it Python, libraries and data" if self.process else ""
        return f"peak {format_bytes(self.peak_bytes)} of {format_bytes(self.room)} a rank, {most}{process}"


def plan_run(
    recipe: Recipe,
    workload: Workload,
    strategy: Strategy,
    mesh: MeshShape,
    offload: bool,
    checkpointings: Sequence[Checkpointing | None],
    device: torch.device,
) -> Planned:
    """Plans this run.

    Args:
        workload: has the model on the meta device that the run trains: nothing is loaded twice.
        checkpointings: the first with which the run fits well is taken, or else the last.

    Raises:
        BadInputError: if the peak alone exceeds the memory, or the host's memory cannot hold what is offloaded.
    """
    planner, training = Planner(recipe, workload, _hardware_of_device(device)), recipe.training
    *others, last = checkpointings
    size, accumulation = training.micro_batch_size, training.gradient_accumulation_steps
    setup = Setup(strategy, mesh, offload, last, size, accumulation, recipe.sharding.accumulate == "by_block")
    room = _room_bytes(device)
    try:
        # Fewest checkpoints first: with every n-th block checkpointed a step takes up to 1 / 3n longer.
        for checkpointing in others:
            lighter = replace(setup, checkpointing=checkpointing)
            if _fits_well(planner.peak(lighter), lighter, room, device):
                setup = lighter
                break
        whole = planner.rollout(setup)
        gathers_whole = whole is not None and _fits_well(whole, setup, room, device)
        peak = max(
            [planner.peak(setup), *([whole] if whole and gathers_whole else [])], key=lambda moment: moment.total
        )
        if device.type != "cpu":
            _require_host_memory(planner.state.of_rank(setup))
    except UnplannableError as error:  # a model that cannot be planned may still train
        return Planned(None, room, last, setup.by_block, first_line(error))
    # After the probe, which loads what a step needs.
    process = psutil.Process().memory_info().rss + KERNEL_BYTES if device.type == "cpu" else 0
    planned = Planned(
        peak, process + room, setup.checkpointing, setup.by_block, process=process, gathers_whole=gathers_whole
    )
    # Without headroom: only what is impossible is refused; a tight run is reported and tried.
    if peak.total > room:
        raise BadInputError(f"this run cannot fit: {planned.describe()}. {_advice(planner, setup, room)}")
    return planned


def _require_host_memory(num_bytes: int) -> None:
    """Raises BadInputError if this host's ranks need more memory for offload and saves than it has free."""
    needed, free = num_bytes * int(os.environ.get("LOCAL_WORLD_SIZE", "1")), free_host_bytes()
    if needed > free:
        raise BadInputError(
            f"this run cannot fit: its ranks would need {format_bytes(needed)} of this host's memory for offloaded "
            f"state and for saves, but {format_bytes(free)} is free; set checkpoint.asynchronous=false or "
            "checkpoint.every_minutes=never, keep state on the device (sharding.device_state_gib), or use more hosts"
        )


def _fits_well(peak: Memory, setup: Setup, room: int, device: torch.device) -> bool:
    standing = standing_bytes("cuda", setup) if device.type == "cuda" else 0  # a CPU rank has allocated it already
    return peak.total * HEADROOM["fits"] + standing <= room


def _hardware_of_device(device: torch.device) -> Hardware:
    """Returns the device's memory with this run's devices per node."""
    known = presets()["cpu" if device.type == "cpu" else "h100_sxm"]
    memory = known.memory_bytes if device.type == "cpu" else _room_bytes(device)
    return replace(known, memory_bytes=memory, devices_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _room_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    # CPU ranks of a machine share what it has.
    return free_host_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _advice(planner: Planner, setup: Setup, room: int) -> str:
    """Names the single changes after which the run would fit."""
    if planner.peak(setup).moment == ANSWERS:
        return "Lower answers.batch_size or answers.max_new_tokens"
    if planner.peak(setup).moment == ROLLOUT:
        return "Lower objective.rollout_batch_size or objective.max_new_tokens"
    changes = smaller_setups(planner.recipe, setup, planner.workload.mixed_precision)
    fitting = [change for change, changed in changes if planner.peak(changed).total <= room]
    if fitting:
        return f"It would with: {', or '.join(fitting)}; `toolkit plan` shows all ways"
    return "No single change makes it fit; `toolkit plan` shows what several together do"
