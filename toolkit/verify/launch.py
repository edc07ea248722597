"""Reads the Accelerate config of the sharded side, and computes the environment that its launcher would give ranks.

`_validate_launch_command` is private to Accelerate; tests/unit/sharding/test_private_names.py guards it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate.commands.config.config_args import default_config_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from toolkit.errors import BadInputError, first_line
from toolkit.recipe.recipe import Recipe
from toolkit.sharding.accelerate_config import AccelerateConfig, read_accelerate_config
from toolkit.sharding.parallel.sequence_parallel import require_groups
from toolkit.sharding.plan.strategy import DEFAULT_STRATEGY, MeshShape, agreed_tensor, parse_strategy, tensor_shape

TWO_RANKS: dict[str, Any] = {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": {"fsdp_version": 2}}
"""The Accelerate config if the user names none and `accelerate config` has made none, without its strategy."""


@dataclass(frozen=True)
class Launch:
    """An Accelerate config, for one machine.

    Attributes:
        values: the keys and values of the config.
        origin: the path of the file, for messages.
        num_processes: the number of ranks.
        on_cpu: whether the ranks run on the CPU.
        tensor: the number of ranks that cut matrices, of the config or the recipe.
    """

    values: dict[str, Any]
    origin: str
    num_processes: int
    on_cpu: bool
    tensor: int = 1


def read_launch(path: Path | None, recipe: Recipe, cpu: int | None = None) -> Launch:
    """Reads the config and checks the values that decide about the ranks.

    Args:
        path: the config, or None for the one that `accelerate launch` would read, or else two ranks.
        cpu: the number of ranks on the CPU, whatever the config says; without `path` no file is read.

    Raises:
        BadInputError: if the file is missing, holds no mapping, or cannot launch this recipe.
    """
    # As `accelerate launch` does without --config_file.
    if path is None and cpu is None and Path(default_config_file).is_file():
        path = Path(default_config_file)
    if path is None:
        word = recipe.sharding.strategy or DEFAULT_STRATEGY
        fsdp = {**TWO_RANKS["fsdp_config"], "fsdp_sharding_strategy": word}
        config = AccelerateConfig({**TWO_RANKS, "fsdp_config": fsdp}, f"none; {cpu or 2} ranks under {word}")
    else:
        config = read_accelerate_config(path)
    if cpu is not None:
        config = replace(config, values={**config.values, "num_processes": cpu, "use_cpu": True})
    num_processes = config.num_processes
    if num_processes is None:
        raise config.error("num_processes is not set; needs a number of at least 1")
    tensor = agreed_tensor(recipe.sharding.tensor, config.size("tp"))
    shape = _shape_of(config, num_processes, recipe.changed(sharding={"tensor": tensor}))
    require_groups("sharding.sequence", recipe.sharding.sequence, num_processes)
    require_groups("sharding.experts", recipe.sharding.experts, shape.shard)
    on_cpu = bool(config.values.get("use_cpu")) or torch.cuda.device_count() < num_processes
    return Launch(config.values, config.origin, num_processes, on_cpu, tensor)


def _shape_of(config: AccelerateConfig, num_processes: int, recipe: Recipe) -> MeshShape:
    """Returns the mesh shape of the strategy.

    Raises:
        BadInputError: if the strategy is unknown or does not fit the number of processes.
    """
    word = config.strategy or recipe.sharding.strategy or DEFAULT_STRATEGY
    sizes = {"replicate": config.size("dp_replicate"), "shard": config.size("dp_shard")}
    try:
        strategy = parse_strategy(word, "fsdp_config.fsdp_sharding_strategy")
        return tensor_shape(strategy, num_processes, recipe.sharding.tensor, num_processes, **sizes)
    except BadInputError as error:
        raise config.error(str(error)) from error


def ranks_environment(launch: Launch, folder: Path) -> dict[str, str]:
    """Returns what `accelerate launch` would set for ranks on one machine with all processes, where it is not set yet.

    Raises:
        BadInputError: if Accelerate cannot launch with the config.
    """
    config = folder / "accelerate.yaml"
    one_machine = {"num_machines": 1, "machine_rank": 0, "main_process_port": 0, "rdzv_backend": "static"}
    values = {key: value for key, value in launch.values.items() if key != "main_process_ip"} | one_machine
    config.write_text(yaml.safe_dump(values), encoding="utf-8")
    # The launcher's default is one thread, unless the environment sets another number.
    threads = max(1, (os.cpu_count() or 1) // launch.num_processes)
    arguments = ["--config_file", str(config), "--num_cpu_threads_per_process", str(threads), "verify"]
    try:
        settings, _, _ = _validate_launch_command(launch_command_parser().parse_args(arguments))
        found: dict[str, str] = prepare_multi_gpu_env(settings)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise BadInputError(f"--config: {launch.origin}: {first_line(error)}") from error
    if launch.on_cpu:
        # Hide the GPUs that exist, or several ranks would share one.
        found |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    return {name: value for name, value in found.items() if os.environ.get(name) != value}
