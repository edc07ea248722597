"""Where a run comes from: two files in its export, to train it again, and the command that starts it again."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

from toolkit.checkpoint.manifest import DIGESTS
from toolkit.pages.card import recipe_for_readers
from toolkit.paths import ORIGIN, shipped_folder, shown_path
from toolkit.run.stages.stages import OpenedRun, PreparedRun


def write_origin(
    export: Path, opened: OpenedRun, run: PreparedRun, reads: dict[str, str | None], versions: dict[str, str]
) -> None:
    """Writes the recipe into an export, and what it was trained from: ranks, versions, and hashes of all that it read.

    Folders and files are named without their paths, as in the model card. A hash is null for what the run did not have:
    `content` that of a stream's files, `base` that of the weights, `code` those of all that fields name.
    """
    (export / "recipe.yaml").write_text(recipe_for_readers(opened.recipe), encoding="utf-8")
    origin = {
        "ranks": opened.accelerator.num_processes,
        "device": "cpu" if opened.device.type == "cpu" else "cuda",
        "strategy": opened.plugin.text,
        "precision": opened.accelerator.mixed_precision,
        "versions": versions,
        **{name: reads.get(name) for name in DIGESTS},
        "base": run.fit.origin,
        "code": {name: digest for name, digest in reads.items() if name not in DIGESTS},
    }
    (export / ORIGIN).write_text(json.dumps(origin, indent=1) + "\n", encoding="utf-8")


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
