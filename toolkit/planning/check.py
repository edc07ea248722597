"""The plan of a run that is about to start: told, held against what there is, and kept beside what is measured."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import psutil
import torch
from torch import nn

from toolkit.data.picture_samples import PictureSamples
from toolkit.errors import BadInputError, UnplannableError, first_line
from toolkit.paths import GIB
from toolkit.planning.accumulation import settle
from toolkit.planning.memory.replay import Memory
from toolkit.planning.pictured import with_pictures
from toolkit.planning.planner import ANSWERS, HEADROOM, Planner, standing_bytes
from toolkit.planning.setup import Setup, smaller_setups
from toolkit.planning.time.hardware import Hardware, preset_of_device, presets
from toolkit.planning.workload import workload_of_model
from toolkit.recipe.recipe import Recipe
from toolkit.sharding.checkpointing import Checkpointing
from toolkit.sharding.offload.host import free_host_bytes
from toolkit.sharding.strategy import MeshShape, Strategy


@dataclass(frozen=True)
class Planned:
    """What a run is expected to hold on each device.

    Attributes:
        peak: the moment in which it holds most; None where the model cannot be probed.
        room: bytes of the device's memory; of a CPU rank, what it holds and its share of what the host has free.
        checkpointing: of activations: what was asked for, or for `auto` what the memory needs.
        by_block: whether the micro-batches of a step go through each unit together: what was asked for, or for `auto`
            what is faster and fits.
        why: of `auto`.
        problem: why it cannot be probed.
        process: bytes that a CPU rank's process held before the run's state: Python, libraries and data.
    """

    peak: Memory | None
    room: int
    checkpointing: Checkpointing | None
    by_block: bool = False
    why: str = ""
    problem: str = ""
    process: int = 0

    @property
    def peak_bytes(self) -> int | None:
        """What is measured beside it: of the device, or on CPU ranks of the whole process."""
        return None if self.peak is None else self.process + self.peak.total

    def describe(self) -> str:
        """For people: the peak, what is largest in it, and the room."""
        if self.peak is None:
            return f"not planned: {self.problem}"
        kind, num_bytes = self.peak.largest
        most = f"in {self.peak.moment} ({kind} {_gib(num_bytes)})"
        process = f"; {_gib(self.process)} of it Python, libraries and data" if self.process else ""
        return f"peak {_gib(self.process + self.peak.total)} of {_gib(self.room)} a rank, {most}{process}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"


def plan_run(
    recipe: Recipe,
    model: nn.Module,
    strategy: Strategy,
    mesh: MeshShape,
    offload: bool,
    checkpointings: Sequence[Checkpointing | None],
    mixed_precision: str,
    label_counts: dict[str, int] | None,
    device: torch.device,
    teacher: nn.Module | None = None,
    pictures: PictureSamples | None = None,
) -> Planned:
    """The plan of this run, from the model on the meta device that it will train.

    Args:
        checkpointings: the first with which it fits well is taken, or else the last.
        teacher: of a distillation.
        pictures: the rows, if they have pictures.

    Raises:
        BadInputError: where the peak alone is more than the memory there is: it cannot fit.
    """
    # The run's own model on the meta device: nothing is loaded twice, and what is planned is what is trained.
    workload = workload_of_model(recipe, model, mixed_precision, label_counts, teacher)
    if pictures is not None:
        workload = with_pictures(workload, pictures)
    known, training = _hardware(device), recipe.training
    # Only memory counts for an unknown GPU, whose times are not asked for.
    planner = Planner(recipe, workload, known or presets()["h100_sxm"])
    *others, last = checkpointings
    size, accumulation = training.micro_batch_size, training.gradient_accumulation_steps
    setup, why = Setup(strategy, mesh, offload, last, size, accumulation, recipe.sharding.accumulate == "by_block"), ""
    process = psutil.Process().memory_info().rss if device.type == "cpu" else 0
    room = process + _room(device)
    try:
        # From the fastest: with each n-th block checkpointed a step takes up to 1 / 3n longer.
        for checkpointing in others:
            lighter = replace(setup, checkpointing=checkpointing)
            if _fits_well(planner.peak(lighter), lighter, room - process, device):
                setup = lighter
                break
        if recipe.sharding.accumulate == "auto" and known is None:
            why = "the speed of this device is not known"
        elif recipe.sharding.accumulate == "auto":
            setup, why = settle(planner, setup, lambda row: _fits_well(row.peak, row.setup, room - process, device))
        peak = planner.peak(setup)
        if device.type != "cpu":
            _require_host_memory(planner.rank_host_bytes(setup))
    except UnplannableError as error:  # no reason not to train it
        return Planned(None, room, last, setup.by_block, "not planned", first_line(error))
    planned = Planned(peak, room, setup.checkpointing, setup.by_block, why, process=process)
    # Without headroom: this refuses only what is impossible; what is tight is told and tried.
    if process + peak.total > room:
        raise BadInputError(f"this run cannot fit: {planned.describe()}. {_advice(planner, setup, room - process)}")
    return planned


def _require_host_memory(num_bytes: int) -> None:
    """Raises BadInputError where the ranks of this host need more than it has free, for offload and saves together."""
    needed, free = num_bytes * int(os.environ.get("LOCAL_WORLD_SIZE", "1")), free_host_bytes()
    if needed > free:
        raise BadInputError(
            f"this run cannot fit: its ranks would need {_gib(needed)} of this host's memory for offloaded state and "
            f"for saves, but {_gib(free)} is free; set checkpoint.asynchronous=false or "
            "checkpoint.every_minutes=never, keep state on the device (sharding.device_state_gib), or use more hosts"
        )


def _fits_well(peak: Memory, setup: Setup, room: int, device: torch.device) -> bool:
    standing = standing_bytes("cuda", setup) if device.type == "cuda" else 0  # a CPU rank has taken it already
    return peak.total * HEADROOM["fits"] + standing <= room


def _hardware(device: torch.device) -> Hardware | None:
    """The device's data sheet, with as many devices a node as this run has there; None: it is not known."""
    known = preset_of_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else presets()["cpu"]
    return known and replace(known, devices_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _room(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    # CPU ranks of a machine share what it has.
    return free_host_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _advice(planner: Planner, setup: Setup, room: int) -> str:
    """The single changes after which it would fit."""
    if planner.peak(setup).moment == ANSWERS:
        return "Lower answers.batch_size or answers.max_new_tokens"
    changes = smaller_setups(planner.recipe, setup, planner.workload.mixed_precision, planner.can_chunk)
    fitting = [change for change, changed in changes if planner.peak(changed).total <= room]
    if fitting:
        return f"It would with: {', or '.join(fitting)}; `toolkit plan` shows all ways"
    return "No single change makes it fit; `toolkit plan` shows what several together do"
