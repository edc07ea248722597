"""Options of `accelerate launch` for ranks on this machine. Imports torch to count GPUs alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolkit.cli.shared.arguments import DEFAULT_CPU_CONFIG, DEFAULT_GPU_CONFIG
from toolkit.cli.shared.shipped import find_config
from toolkit.errors import BadInputError
from toolkit.paths import shipped_folder, shown_path
from toolkit.recipe.recipe import Recipe

ON_CPU = "ACCELERATE_USE_CPU"
"""Accelerate's variable: the launcher does not hand `use_cpu` of a config to the ranks."""


def shown_script() -> str:
    """Returns the script that ranks run, as a command line names it."""
    return shown_path(shipped_folder("recipes") / "finetune.py")


def launcher_options(
    recipe: Recipe | None, gpus: int | None, cpu: int | None, strategy: str | None, config: str | None
) -> list[str]:
    """Returns options of `accelerate launch`: config file, number of processes, strategy.

    Args:
        recipe: the recipe to train, or None if nothing is trained.

    Raises:
        BadInputError: if the options contradict each other, or this machine has too few GPUs.
    """
    if gpus is not None and cpu is not None:
        raise BadInputError("--gpus and --cpu exclude each other; leave one of them out")
    word = _strategy_word(recipe, strategy, config)
    path = find_config(config if config is not None else DEFAULT_CPU_CONFIG if cpu is not None else DEFAULT_GPU_CONFIG)
    machines = _checked_config(path).get("num_machines", 1)
    if isinstance(machines, int) and machines > 1:
        raise BadInputError(
            f"--config {config}: it is for {machines} machines, but toolkit train starts the ranks of one; "
            f"run accelerate launch on each machine, as docs/multi_node.md shows"
        )
    # What is typed is checked first, so that it is on a machine without GPUs, too.
    if gpus is None and cpu is None and config is None:
        gpus = count_gpus() or None
        if gpus is None:
            raise BadInputError(f"{_why_no_gpu()}; --cpu 2 trains on the CPU with two processes")
    elif gpus is not None and (found := count_gpus()) < gpus:
        raise BadInputError(f"--gpus {gpus}: this machine has {found}; --cpu {gpus} runs the same ranks on the CPU")
    options = ["--config_file", shown_path(path)]
    processes = cpu if cpu is not None else gpus
    if processes is not None:
        options += ["--num_processes", str(processes)]
    return options if word is None else [*options, "--fsdp_sharding_strategy", word]


def _strategy_word(recipe: Recipe | None, strategy: str | None, config: str | None) -> str | None:
    """Returns the strategy that the option or else the recipe names; None leaves it to the config."""
    word = strategy
    if word is None and recipe is not None and config is None:
        word = recipe.sharding.strategy
    if word is not None:
        from toolkit.sharding.plan.strategy import parse_strategy

        parse_strategy(word, "--strategy" if strategy is not None else "sharding.strategy")
    return word


def _checked_config(path: Path) -> dict[str, Any]:
    """Reads an Accelerate config. Raises BadInputError for values that no run can have, before ranks start."""
    from toolkit.sharding.accelerate_config import read_accelerate_config

    config = read_accelerate_config(path)
    config.check()
    return config.values


def _why_no_gpu() -> str:
    from toolkit.ranks import unused_accelerator

    unused = unused_accelerator()
    if unused is None:
        return "this machine has no GPU"
    return f"the toolkit does not run on this machine's accelerator ({unused})"


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count()
