"""The command that starts a run again, for its report."""

from __future__ import annotations

import os
import shlex

from toolkit.paths import shipped_folder, shown_path
from toolkit.run.stages.stages import OpenedRun


def own_command(opened: OpenedRun) -> str:
    """Returns the command line for the recipe in the run's folder, as many ranks, strategy and precision.

    Empty for a run on several hosts, which each have a command of their own.
    """
    ranks, on_cpu = opened.accelerator.num_processes, opened.device.type == "cpu"
    if int(os.environ.get("LOCAL_WORLD_SIZE", str(ranks))) < ranks:
        return ""
    recipe = shown_path(opened.output_dir / "recipe.yaml")
    strategy, precision = opened.plugin.text, opened.accelerator.mixed_precision
    # Without an option `toolkit train` takes the config of this precision.
    if opened.recipe.training.mixed_precision is not None or precision == ("no" if on_cpu else "bf16"):
        number = f"--{'cpu' if on_cpu else 'gpus'}={ranks}"
        return shlex.join(["toolkit", "train", recipe, number, f"--strategy={strategy}"])
    config = shown_path(shipped_folder("accelerate_configs") / f"{'cpu_2' if on_cpu else 'zero3'}.yaml")
    words = ["accelerate", "launch", f"--config_file={config}", f"--num_processes={ranks}"]
    words += [f"--fsdp_sharding_strategy={strategy}", f"--mixed_precision={precision}"]
    return shlex.join([*words, shown_path(shipped_folder("recipes") / "finetune.py"), recipe])
