"""Writes the command that runs a row of the plan."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path

from toolkit.paths import shipped_folder, shown_path
from toolkit.planning.hardware import Hardware
from toolkit.planning.planner import PlanRow
from toolkit.planning.setup import Setup
from toolkit.planning.table import Plan
from toolkit.recipe.schema import ShardingSection
from toolkit.sharding.accelerate_config import AccelerateConfig, hybrid_options, read_accelerate_config
from toolkit.sharding.blocks.checkpointing import Checkpointing
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
    section = found.recipe.sharding
    settings = {
        "training.micro_batch_size": str(setup.micro_batch_size),
        "training.gradient_accumulation_steps": str(setup.accumulation),
    }
    if setup.sequence is not None:
        settings["sharding.sequence"] = str(setup.sequence)
    if (setup.mesh.tensor, section.tensor) != (1, 1):
        settings["sharding.tensor"] = str(setup.mesh.tensor)
    settings |= _checkpoint_settings(section, setup.checkpointing)
    if section.accumulate != "by_micro_batch":
        settings["sharding.accumulate"] = "by_block" if setup.by_block else "by_micro_batch"
    if section.reshard_after_forward is not None:
        settings["sharding.reshard_after_forward"] = (
            "null" if setup.mesh.reshard_after_forward is None else str(setup.mesh.reshard_after_forward)
        )
    # The recipe and the Accelerate config may both name a strategy, but must not differ.
    if section.strategy is not None:
        settings["sharding.strategy"] = setup.strategy.name
    if setup.offload and not _config_name(setup, found.hardware).endswith("offload"):
        settings["sharding.offload"] = "optimizer"
    elif section.offload == "optimizer" and not setup.offload:
        settings["sharding.offload"] = "none"
    if not setup.offload:
        settings |= {
            f"sharding.{key}": "null"
            for key in ("offload_executor", "device_state_gib")
            if getattr(section, key) is not None
        }
    return settings


def _checkpoint_settings(section: ShardingSection, asked: Checkpointing | None) -> dict[str, str]:
    settings = {}
    if asked is not None or section.activation_checkpointing is not None:
        settings["sharding.activation_checkpointing"] = "null" if asked is None else str(asked.every)
    offload, chunk_tokens = (False, None) if asked is None else (asked.offload, asked.chunk_tokens)
    if offload or section.offload_checkpoints:
        settings["sharding.offload_checkpoints"] = "true" if offload else "false"
    if chunk_tokens is not None or section.chunk_tokens is not None:
        settings["sharding.chunk_tokens"] = "null" if chunk_tokens is None else str(chunk_tokens)
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
