"""Where a run comes from: two files in its export, to train it again, and the command that starts it again."""

from __future__ import annotations

import json
import os
import platform
import shlex
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import torch

from toolkit.checkpoint.manifest import DIGESTS
from toolkit.pages.card import recipe_for_readers
from toolkit.pages.run_page import RunSummary
from toolkit.paths import ORIGIN, shipped_folder, shown_path
from toolkit.published import for_readers
from toolkit.run.stages.stages import OpenedRun

PACKAGES = ("finetune-toolkit", "torch", "accelerate", "transformers", "datasets")


OF_STORY = ("starts", "limits", "outcome", "best", "last", "exported")
"""What an export has of the record of its run, as it is; warnings may have paths."""


def write_origin(export: Path, opened: OpenedRun, summary: RunSummary) -> None:
    """Writes the recipe into an export, and what it was trained from: ranks, versions, and hashes of all that it read.

    Folders and files are named without their paths, as in the model card. A hash is null for what the run did not have:
    `content` that of a stream's files, `base` that of the weights, `code` those of all that fields name.
    """
    reads = opened.digests
    (export / "recipe.yaml").write_text(recipe_for_readers(opened.recipe), encoding="utf-8")
    origin = {
        "ranks": opened.accelerator.num_processes,
        "device": "cpu" if opened.device.type == "cpu" else "cuda",
        "strategy": opened.plugin.text,
        "precision": opened.accelerator.mixed_precision,
        "versions": summary.versions,
        **{name: reads.get(name) for name in DIGESTS},
        **{name: value for name, value in asdict(opened.story).items() if name in OF_STORY},
        "warnings": [for_readers(text) for text in summary.doubts],
        "code": {name: digest for name, digest in reads.items() if name not in DIGESTS},
    }
    (export / ORIGIN).write_text(json.dumps(origin, indent=1) + "\n", encoding="utf-8")


def versions() -> dict[str, str]:
    """Returns the versions of the packages, and the machine."""
    machine = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    if torch.cuda.is_available():
        machine += f", {torch.cuda.get_device_name()}"
    return {**{package: version(package) for package in PACKAGES}, "machine": machine}


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
