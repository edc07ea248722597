"""The first stage of a run: its ranks meet, and it builds accelerator and sharding plugin."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from toolkit import ranks
from toolkit.checkpoint.push import require_login
from toolkit.errors import BadInputError, first_line
from toolkit.pages.parts.story import Story
from toolkit.recipe.recipe import Recipe
from toolkit.run.stages.accelerator import (
    build_accelerator,
    build_plugins,
    grow_segments,
    quiet_libraries,
    released_at_last,
    settled,
)
from toolkit.run.stages.stages import OpenedRun
from toolkit.sharding.launched import require_launcher
from toolkit.sharding.plugin import ShardingPlugin
from toolkit.supervise.parent_death import ended_with_launcher
from toolkit.supervise.rendezvous import timed_rendezvous
from toolkit.terminal import Terminal, warnings_heard
from toolkit.training.usage import forget_peaks


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
