"""Options of `accelerate launch` for ranks on this machine. Imports torch to count GPUs alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.cli.shared.arguments import DEFAULT_CPU_CONFIG, DEFAULT_GPU_CONFIG
from toolkit.cli.shared.shipped import find_config
from toolkit.errors import BadInputError, counted
from toolkit.paths import shipped_folder, shown_path
from toolkit.recipe.recipe import Recipe

ON_CPU = "ACCELERATE_USE_CPU"
"""Accelerate's variable: the launcher does not hand `use_cpu` of a config to the ranks."""


@dataclass(frozen=True)
class Machines:
    """The machines of a run; `toolkit train` starts as many ranks on each.

    Attributes:
        count: the number of machines.
        rank: the number of this one, from 0.
        address: the address of the first, where launchers and ranks meet.
        port: a port there that is free.
    """

    count: int = 1
    rank: int = 0
    address: str | None = None
    port: int = 29500

    def require(self) -> None:
        """Raises BadInputError if this machine is not one of them, or does not know where they meet."""
        if self.rank >= self.count:
            raise BadInputError(
                f"--machine-rank: {self.rank}; allowed: 0 to {self.count - 1}, of --num-machines {self.count}"
            )
        if self.count > 1 and not self.address:
            raise BadInputError(
                f"--main-process-ip is missing: with --num-machines {self.count}, give each machine the first one's "
                "address"
            )

    def options(self) -> list[str]:
        """Returns options of `accelerate launch`; none for a single machine."""
        if self.count == 1:
            return []
        options = ["--num_machines", str(self.count), "--machine_rank", str(self.rank)]
        return [*options, "--main_process_ip", str(self.address), "--main_process_port", str(self.port)]


ONE_MACHINE = Machines()


def shown_script() -> str:
    """Returns the script that ranks run, as a command line names it."""
    return shown_path(shipped_folder("recipes") / "finetune.py")


def launcher_options(
    recipe: Recipe | None,
    gpus: int | None,
    cpu: int | None,
    strategy: str | None,
    config: str | None,
    machines: Machines = ONE_MACHINE,
) -> list[str]:
    """Returns options of `accelerate launch`: config file, number of processes, strategy, machines.

    Args:
        recipe: the recipe to train, or None if nothing is trained.
        gpus, cpu: ranks on this machine, and on each other one.

    Raises:
        BadInputError: if the options contradict each other, or this machine has too few GPUs.
    """
    if gpus is not None and cpu is not None:
        raise BadInputError("--gpus and --cpu exclude each other; leave one of them out")
    word = _strategy_word(recipe, strategy, config)
    path = find_config(config if config is not None else DEFAULT_CPU_CONFIG if cpu is not None else DEFAULT_GPU_CONFIG)
    values = _checked_config(path)
    machines_of_config = values.get("num_machines", 1)
    if isinstance(machines_of_config, int) and machines_of_config > 1:
        raise BadInputError(
            f"--config {config}: it is for {machines_of_config} machines, but toolkit train starts the ranks of one; "
            f"give --num-machines and --machine-rank instead, as `toolkit help multi_node` shows"
        )
    machines.require()
    if machines.count > 1 and gpus is None and cpu is None and config is not None:
        raise BadInputError(f"--num-machines {machines.count}: how many ranks has each? Give --gpus or --cpu")
    # What is typed is checked first, so that it is on a machine without GPUs, too.
    if gpus is None and cpu is None and config is None:
        gpus = count_gpus() or None
        if gpus is None:
            raise BadInputError(f"{_why_no_gpu()}; --cpu 2 trains on the CPU with two ranks")
    elif gpus is not None and (found := count_gpus()) < gpus:
        raise BadInputError(f"--gpus {gpus}: this machine has {found}; --cpu {gpus} runs the same ranks on the CPU")
    elif gpus is None and cpu is None:
        _require_gpus(values, f"--config {config}")
    options = ["--config_file", shown_path(path)]
    processes = cpu if cpu is not None else gpus
    if processes is not None:
        options += ["--num_processes", str(processes * machines.count), *machines.options()]
        options += _hybrid_groups(word, recipe, processes, machines.count)
    return options if word is None else [*options, "--fsdp_sharding_strategy", word]


def _require_gpus(values: Mapping[str, Any], given: str) -> None:
    """Raises BadInputError if a config for GPUs starts more processes than this machine has."""
    on_cpu = values.get("use_cpu") or values.get("distributed_type") == "MULTI_CPU" or os.environ.get(ON_CPU) == "true"
    asked = values.get("num_processes", 1)
    if not on_cpu and (found := count_gpus()) < asked:
        fewer = f"--gpus {found} starts as many, " if found else ""
        raise BadInputError(
            f"{given}: it starts {counted(asked, 'rank')}, and this machine has {counted(found, 'GPU')}; "
            f"{fewer}--cpu {asked} runs the same ranks on the CPU"
        )


def _hybrid_groups(word: str | None, recipe: Recipe | None, ranks: int, machines: int) -> list[str]:
    """Returns options for hybrid on several machines: sharded inside a machine, replicated across them."""
    if machines == 1 or word is None or not word.startswith("hybrid"):
        return []
    from toolkit.sharding.accelerate_config import hybrid_options

    return hybrid_options(machines, ranks // (1 if recipe is None else recipe.sharding.tensor))


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
