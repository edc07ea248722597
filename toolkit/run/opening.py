"""The first stage of a run: its ranks meet, and it builds accelerator and sharding plugin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from toolkit import ranks
from toolkit.checkpoint.push import require_login
from toolkit.recipe.recipe import Recipe
from toolkit.run.accelerator import (
    build_accelerator,
    build_plugins,
    grow_segments,
    quiet_libraries,
    released_at_last,
)
from toolkit.run.stages import OpenedRun
from toolkit.sharding.plugin import ShardingPlugin
from toolkit.supervise.parent_death import ended_with_launcher
from toolkit.supervise.rendezvous import timed_rendezvous
from toolkit.terminal import Terminal
from toolkit.training.usage import forget_peaks


@contextmanager
def open_run(recipe: Recipe) -> Iterator[OpenedRun]:
    """Opens a run for the length of the block, and releases its process group, trackers and offload at the end.

    Raises:
        BadInputError: if the recipe contradicts the Accelerate config, the machine or an installed package.
        ToolkitError: if the ranks did not meet in time.
    """
    quiet_libraries()
    # Both before the accelerator: CUDA is not started yet, and a setting that cannot be used ends here.
    grow_segments()
    plugins = build_plugins(recipe)
    plugin: ShardingPlugin = plugins["fsdp_plugin"]
    output_dir = Path(recipe.training.output_dir).expanduser().resolve()
    with timed_rendezvous(recipe.training.stall_minutes):
        accelerator = build_accelerator(recipe, plugins, output_dir)
        if ranks.world_size() > 1:
            # While a group is made, torch waits for a rank that has ended as long as the group may: here for days.
            ranks.patient_group()
    forget_peaks(accelerator.device)
    console = Terminal(quiet=not accelerator.is_main_process)
    with released_at_last(accelerator, plugin), ended_with_launcher():
        ranks.on_first_rank(lambda: require_login(recipe.export))
        yield OpenedRun(recipe, accelerator, plugin, output_dir, console)
