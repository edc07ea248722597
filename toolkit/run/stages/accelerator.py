"""Opens a run: its ranks meet, and the `Accelerator` is built from recipe and Accelerate config, and released."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers

from toolkit import ranks
from toolkit.checkpoint.push import require_login
from toolkit.errors import BadInputError, first_line
from toolkit.pages.parts.story import Story
from toolkit.recipe.combinations import refuse
from toolkit.recipe.features import Surroundings
from toolkit.recipe.recipe import Recipe
from toolkit.run.stages.stages import OpenedRun
from toolkit.sharding.accelerate_config import refuse_dynamo
from toolkit.sharding.apply import PRECISIONS
from toolkit.sharding.blocks.checkpointing import Checkpointing
from toolkit.sharding.blocks.compiling import Compilation
from toolkit.sharding.launched import (
    accumulation_plugin,
    require_launcher,
    resolve_offload,
    resolve_strategy,
    resolve_tensor,
)
from toolkit.sharding.loss_scale import share_overflows
from toolkit.sharding.offload import OffloadSettings
from toolkit.sharding.plugin import ShardingPlugin, reset_accelerate, sharding_kwargs
from toolkit.supervise.launched_ranks import timed_rendezvous
from toolkit.supervise.parent_death import ended_with_launcher
from toolkit.terminal import Terminal, warnings_heard
from toolkit.training.usage import forget_peaks


def settled(recipe: Recipe) -> Recipe:
    """Returns the recipe with the tensor groups of the Accelerate config, if only that has some.

    Raises:
        BadInputError: if the recipe and the Accelerate config contradict each other.
    """
    tensor = resolve_tensor(recipe.sharding.tensor)
    return recipe.changed(sharding={"tensor": tensor})


def build_plugins(recipe: Recipe) -> dict[str, Any]:
    """Returns the sharding that the recipe and the Accelerate config ask for, as arguments of `Accelerator`."""
    section = recipe.sharding
    # `accelerate launch` passes on its config in such variables.
    refuse_dynamo(os.environ.get("ACCELERATE_DYNAMO_BACKEND"), "dynamo_backend of the Accelerate config")
    strategy = resolve_strategy(section.strategy)
    sharded = strategy.sharded
    offload = resolve_offload(section.strategy, section.offload) is not None
    refuse(_resolved(recipe, strategy.name, offload))
    return sharding_kwargs(
        section.strategy,
        unit_classes=section.unit_classes,
        checkpointing=checkpointing_of(recipe) if sharded else None,
        offload=offload_of(recipe) if offload else section.offload,
        compilation=compilation_of(recipe) if sharded else None,
        experts=section.experts,
        reshard_after_forward=section.reshard_after_forward,
        tensor=section.tensor,
    )


def _resolved(recipe: Recipe, strategy: str, offload: bool) -> Recipe:
    """Returns the recipe with what the Accelerate config says."""
    return recipe.changed(sharding={"strategy": strategy, "offload": "optimizer" if offload else "none"})


def compilation_of(recipe: Recipe) -> Compilation | None:
    """Returns how blocks are compiled, or None if they are not."""
    return Compilation() if recipe.training.compile else None


def offload_of(recipe: Recipe) -> OffloadSettings:
    """Returns how optimizer state is offloaded, if it is."""
    section = recipe.sharding
    return OffloadSettings(
        executor=section.offload_executor or "auto",
        device_state_gib=section.device_state_gib if section.device_state_gib is not None else 0.0,
        # Clipping needs the norm of all gradients before the first parameter is stepped.
        during_backward=recipe.training.max_grad_norm is None,
    )


def checkpointing_of(recipe: Recipe) -> Checkpointing | None:
    """Returns the checkpointing that the recipe asks for, or None for none, and for `auto` before there is a plan."""
    section = recipe.sharding
    if section.activation_checkpointing in (None, "auto"):
        return None
    return Checkpointing(int(section.activation_checkpointing), section.offload_checkpoints)


def quiet_libraries() -> None:
    """Hides the progress bars and some warnings of libraries, because the run shows its own progress."""
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    # A resumed run steps its schedule to its place before the optimizer's first step.
    warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*before.*optimizer.step.*")
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing. is deprecated.*")  # by peft
    # FSDP2 warns of outputs that are views, in case they are changed in place; no loss does that.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    # By torch.distributed.checkpoint on one rank, which is intended.
    warnings.filterwarnings("ignore", message=".*assuming the intent is to (save|load) in a single process.*")


def grow_segments() -> None:
    """Lets CUDA's allocator grow its segments, which avoids fragmentation, unless the environment says otherwise."""
    # The allocator reads its settings once, when CUDA starts; PYTORCH_CUDA_ALLOC_CONF is their older name.
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if torch.cuda.is_available() and not started and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def build_accelerator(recipe: Recipe, plugins: dict[str, Any], output_dir: Path) -> Accelerator:
    for tracker in recipe.logging.trackers:
        if tracker not in [str(available) for available in get_available_trackers()]:
            raise BadInputError(
                f"logging.trackers: {tracker} is not installed; pip install {tracker}, or remove it from the recipe"
            )
    # An `Accelerator` from earlier in this process, in a cell of a notebook, would pass on its settings.
    reset_accelerate()
    accelerator = Accelerator(
        mixed_precision=_mixed_precision(recipe),
        gradient_accumulation_plugin=accumulation_plugin(recipe.training.gradient_accumulation_steps),
        log_with=list(recipe.logging.trackers) or None,
        project_dir=str(output_dir),
        **plugins,
    )
    share_overflows(accelerator.scaler)
    precision, device = accelerator.mixed_precision, accelerator.device.type
    if precision not in PRECISIONS:
        raise BadInputError(f"mixed_precision {precision} is not possible; allowed: {', '.join(PRECISIONS)}")
    plugin = plugins["fsdp_plugin"]
    settings = _resolved(recipe, plugin.strategy.name, plugin.offload is not None)
    refuse(settings.changed(training={"mixed_precision": precision}), Surroundings(device))
    if precision == "bf16" and device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        Terminal(quiet=ranks.rank() != 0).warn(
            f"mixed_precision bf16: {torch.cuda.get_device_name()} has no bf16 and emulates it, which is slow; "
            "set training.mixed_precision=fp16"
        )
    return accelerator


def _mixed_precision(recipe: Recipe) -> str | None:
    """Returns the recipe's precision, or None to leave it to the Accelerate config; raises if they contradict."""
    asked = recipe.training.mixed_precision
    configured = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if configured not in PRECISIONS:
        raise BadInputError(
            f"mixed_precision: the Accelerate config says {configured!r}; allowed: {', '.join(PRECISIONS)}"
        )
    # The launcher exports "no" if its config says nothing, so "no" is not a contradiction.
    if asked is not None and configured not in ("no", asked):
        raise BadInputError(
            f"training.mixed_precision is {asked}, but the Accelerate config's mixed_precision is {configured}; "
            "remove one of them or make them agree"
        )
    return asked


def finish_trackers(accelerator: Accelerator) -> None:
    """Ends each tracker, whatever another one does."""
    for tracker in accelerator.trackers:
        try:
            tracker.finish()
        except Exception as error:
            Terminal().warn(f"{tracker.name} could not be ended: {type(error).__name__}: {first_line(error)}")
    accelerator.trackers.clear()


def release(accelerator: Accelerator, plugin: ShardingPlugin) -> None:
    """Ends trackers, offload and the process group, so that this process can start another run."""
    plugin.close()
    finish_trackers(accelerator)
    accelerator.end_training()
    if dist.is_initialized():
        dist.destroy_process_group()
    reset_accelerate()


@contextmanager
def released_at_last(accelerator: Accelerator, plugin: ShardingPlugin) -> Iterator[None]:
    """Releases what the run holds, unless this rank alone fails.

    Then the other ranks may be inside a collective, and destroying NCCL's group waits for them, for ten minutes
    (torchtitan#1342): the error would be seen after that, or never. The launcher ends them instead.
    """
    try:
        yield
    except BaseException as error:
        if not ranks.fails_alone(error):
            release(accelerator, plugin)
        raise
    release(accelerator, plugin)


# ---- The first stage of a run ----


def _require_usable_fork() -> None:
    """Raises BadInputError in a forked process that cannot train, because its parent has started torch's threads.

    `toolkit train` forks from a process that has only imported; somebody else's `notebook_launcher` may not.
    """
    if multiprocessing.parent_process() is None:
        return
    mend = "restart the notebook, or use finetune(recipe, num_processes=N), which forks no process"
    # A CUDA build says so without a GPU, too, once its parent has asked for the number of GPUs.
    if torch.cuda._is_in_bad_fork() and torch.cuda.device_count() > 0:
        raise BadInputError(f"this process was forked from one that has used CUDA; {mend}")
    try:
        torch.ones(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise BadInputError(
            f"this process was forked from one that has trained ({first_line(error)}); {mend}"
        ) from None


@contextmanager
def open_run(recipe: Recipe) -> Iterator[OpenedRun]:
    """Opens a run for the length of the block, and releases its process group, trackers and offload at the end.

    Raises:
        BadInputError: if the recipe contradicts the Accelerate config, the machine or an installed package.
        ToolkitError: if the ranks did not meet in time.
    """
    _require_usable_fork()
    require_launcher()
    quiet_libraries()
    # Both before the accelerator: CUDA is not started yet, and a setting that cannot be used ends here.
    grow_segments()
    recipe = settled(recipe)
    plugins = build_plugins(recipe)
    plugin: ShardingPlugin = plugins["fsdp_plugin"]
    output_dir = Path(recipe.training.output_dir).expanduser().resolve()
    hook = sys.excepthook
    story = Story()
    with warnings_heard(story.warn), timed_rendezvous(recipe.training.stall_minutes):
        accelerator = build_accelerator(recipe, plugins, output_dir)
        if ranks.world_size() > 1:
            # While a group is made, torch waits for a rank that has ended as long as the group may: here for days.
            ranks.patient_group()
        else:
            # With each group torch puts one more "[rank0]: " before the lines of uncaught errors, for good.
            sys.excepthook = hook
    forget_peaks(accelerator.device)
    console = Terminal(quiet=not accelerator.is_main_process)
    with released_at_last(accelerator, plugin), ended_with_launcher():
        ranks.on_first_rank(lambda: require_login(recipe.export))
        with warnings_heard(story.warn):
            yield OpenedRun(recipe, accelerator, plugin, output_dir, console, story=story)
