"""Writes the command that runs a row of the plan."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.paths import shipped_folder, shown_path
from toolkit.planning.hardware import Hardware
from toolkit.planning.planner import PlanRow
from toolkit.planning.setup import Setup
from toolkit.planning.table import Plan
from toolkit.recipe.schema import ShardingSection
from toolkit.sharding.accelerate_config import AccelerateConfig, hybrid_options, read_accelerate_config
from toolkit.sharding.plan.strategy import OFFLOAD, parse_strategy


@dataclass(frozen=True)
class LaunchCommand:
    """A command that starts a setup, with notes for the user."""

    command: str
    notes: tuple[str, ...] = field(default=())


def launch_of(found: Plan, row: PlanRow, recipe_name: str, overrides: list[str]) -> LaunchCommand:
    """Returns the command that runs a row: `accelerate launch` in a checkout, elsewhere `toolkit train` if it can."""
    setup, hardware = row.setup, found.hardware
    # The row's own settings come last: they win over what was typed for the plan.
    settings = dict(text.partition("=")[::2] for text in overrides) | _row_settings(found, setup)
    work = shlex.join([recipe_name, *(f"{key}={value}" for key, value in settings.items())])
    nodes = -(-setup.ranks // hardware.devices_per_node)
    path = shipped_folder("accelerate_configs") / f"{_config_name(setup, hardware)}.yaml"
    config, said = shlex.quote(shown_path(path)), read_accelerate_config(path)
    # Given to the launcher, because the recipe must not contradict the config.
    strategy = (
        setup.strategy.name + (OFFLOAD if setup.offload else "") if _names_another_strategy(found, setup, said) else ""
    )
    precision = "" if found.mixed_precision == said.mixed_precision else found.mixed_precision
    is_on_one = nodes == 1 and not setup.strategy.replicated
    if Path(shown_path(path)).is_absolute() and is_on_one and not precision:  # not in a checkout
        device = "cpu" if hardware.device_type == "cpu" else "gpus"
        word = f" --strategy {strategy}" if strategy else ""
        return LaunchCommand(
            f"toolkit train {work} --config {_config_name(setup, hardware)} --{device} {setup.ranks}{word}"
        )
    words = [f"accelerate launch --config_file {config} --num_processes {setup.ranks}"]
    words += [f"--fsdp_sharding_strategy {strategy}"] if strategy else []
    words += [f"--mixed_precision {precision}"] if precision else []
    notes = []
    if nodes > 1:
        words.append(f"--num_machines {nodes} --machine_rank $NODE --main_process_ip $HEAD --main_process_port 29500")
        notes.append("on every node, with its number as NODE and the first node's address as HEAD")
    if setup.strategy.replicated:
        words += hybrid_options(setup.mesh.replicate, setup.mesh.shard)
    script = shlex.quote(shown_path(shipped_folder("recipes") / "finetune.py"))
    return LaunchCommand(" ".join([*words, script, work]), tuple(notes))


def _row_settings(found: Plan, setup: Setup) -> dict[str, str]:
    """Returns the recipe settings that this row needs."""
    section, asked = found.recipe.sharding, setup.checkpointing
    settings = {
        "training.micro_batch_size": str(setup.micro_batch_size),
        "training.gradient_accumulation_steps": str(setup.accumulation),
    }
    if setup.sequence is not None:
        settings["sharding.sequence"] = str(setup.sequence)
    # What neither the row nor the recipe sets is left out. An Accelerate config may have set what the recipe lacks.
    of_row: dict[str, Any] = {
        "tensor": setup.mesh.tensor,
        "activation_checkpointing": None if asked is None else asked.every,
        "offload_checkpoints": asked is not None and asked.offload,
        "accumulate": "by_block" if setup.by_block else "by_micro_batch",
        "reshard_after_forward": setup.mesh.reshard_after_forward,
        # The recipe and the Accelerate config may both name a strategy, but must not differ.
        "strategy": None if section.strategy is None else setup.strategy.name,
        **({} if setup.offload else {"offload_executor": None, "device_state_gib": None}),
    }
    for key, value in of_row.items():
        if (value, getattr(section, key)) != (default := ShardingSection.model_fields[key].default, default):
            settings[f"sharding.{key}"] = value if isinstance(value, str) else json.dumps(value)
    if setup.offload and not _config_name(setup, found.hardware).endswith("offload"):
        settings["sharding.offload"] = "optimizer"
    elif section.offload == "optimizer" and not setup.offload:
        settings["sharding.offload"] = "none"
    return settings


def _names_another_strategy(found: Plan, setup: Setup, said: AccelerateConfig) -> bool:
    """Returns whether an Accelerate config's strategy differs from the setup's and that has an effect."""
    assert said.strategy is not None  # every shipped config names one
    # The configs of one rank serve every strategy, unless the recipe names one.
    matters = setup.ranks > 1 or found.recipe.sharding.strategy is not None
    return matters and parse_strategy(said.strategy, said.origin) != setup.strategy


def _config_name(setup: Setup, hardware: Hardware) -> str:
    """Returns the name of the Accelerate config that a setup starts from."""
    if hardware.device_type == "cpu":
        return "cpu_2"
    # One rank holds every shard, so the strategies don't differ.
    if setup.ranks == 1:
        return "gpu_1_offload" if setup.offload else "gpu_1"
    if setup.strategy.replicated and setup.ranks <= hardware.devices_per_node:
        return "zero3"  # that of hybrid is for two machines, and would wait for the other
    return "zero3_offload" if setup.offload and setup.strategy.name == "zero3" else setup.strategy.name
