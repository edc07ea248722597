"""`toolkit plan`: say before a run whether it fits, what to pick, and what it sends."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.shared.arguments import (
    MACHINE,
    AsJson,
    ConfigOption,
    CpuOption,
    RecipeArguments,
    complete_hardware,
    load_recipe,
    split_arguments,
)
from toolkit.cli.shared.console import print_table
from toolkit.cli.shared.hub import settle_hub
from toolkit.cli.shared.shipped import find_config
from toolkit.errors import BadInputError
from toolkit.paths import GIB
from toolkit.planning.hardware import Hardware, hardware_of, presets
from toolkit.recipe.recipe import Recipe
from toolkit.sharding.accelerate_config import AccelerateConfig, read_accelerate_config
from toolkit.sharding.plan.strategy import agreed_tensor, asks_for_offload, parse_strategy
from toolkit.terminal import LongAction, Terminal

if TYPE_CHECKING:
    from toolkit.planning.table import Plan

DEFAULT_HARDWARE = "h100_sxm"


def _of_machine(about: str, **settings: Any) -> Any:
    """Returns an option that says what machine to plan for."""
    return typer.Option(help=about, rich_help_panel=MACHINE, **settings)


def _of_preset(about: str) -> Any:
    """Returns an option that replaces a figure of the hardware."""
    return typer.Option(help=about, show_default="the preset's", rich_help_panel="Figures of the hardware")


Gpus = Annotated[
    int | None,
    _of_machine("Plan for this many GPUs, one rank each. By default the config's number, or 1."),
]
HardwareName = Annotated[
    str | None,
    _of_machine(
        "Plan for this hardware: a preset (--list-hardware).",
        show_default=DEFAULT_HARDWARE,
        autocompletion=complete_hardware,
    ),
]
GpusPerNode = Annotated[int | None, _of_preset("Number of GPUs per node.")]
DeviceMemory = Annotated[float | None, _of_preset("Memory of one GPU (GiB).")]
HostMemory = Annotated[float | None, _of_preset("Host memory of one node (GiB).")]
EveryRow = Annotated[bool, typer.Option("--all", help="Show every row.")]
Explain = Annotated[
    bool, typer.Option("--explain", help="Show the parts of the peak, the largest moments, and what is sent.")
]
ListHardware = Annotated[
    bool, typer.Option("--list-hardware", help="List the presets and exit.", rich_help_panel=MACHINE)
]


def plan(
    arguments: RecipeArguments = None,
    gpus: Gpus = None,
    cpu: CpuOption = None,
    hardware: HardwareName = None,
    config: ConfigOption = None,
    gpus_per_node: GpusPerNode = None,
    device_memory_gib: DeviceMemory = None,
    host_memory_gib: HostMemory = None,
    every_row: EveryRow = False,
    explain: Explain = False,
    list_hardware: ListHardware = False,
    as_json: AsJson = False,
) -> None:
    """Predict before a run whether it fits, which strategy to pick, and how much each rank sends.

    Needs no GPU and no weights: the model's configuration is enough.

    Exit codes: 0 something fits, 1 nothing does, 2 bad input.
    """
    if list_hardware:
        _print_presets()
        return
    loaded = load_recipe(arguments)
    settle_hub(loaded)
    if cpu is not None and (gpus is not None or hardware not in (None, "cpu")):
        raise BadInputError("--cpu excludes --gpus and --hardware; leave one of them out")
    given = {"device_memory_gib": device_memory_gib, "gpus_per_node": gpus_per_node, "host_memory_gib": host_memory_gib}
    figures: dict[str, Any] = {} if cpu is None else _of_cpu_ranks(cpu)
    figures |= {name: value for name, value in given.items() if value is not None}
    device = hardware_of(hardware or (DEFAULT_HARDWARE if cpu is None else "cpu"), **figures)
    accelerated = AccelerateConfig({}, "") if config is None else read_accelerate_config(find_config(config))
    accelerated.check()
    with LongAction(Terminal(), "planning"):
        found = _plan_recipe(loaded, device, cpu or gpus, accelerated)
    _print_plan(found, *split_arguments(arguments), every_row, explain, as_json)
    if found.recommended is None:
        raise typer.Exit(1)


def _of_cpu_ranks(count: int) -> dict[str, Any]:
    """Returns the figures of ranks on the CPU, which are all on this machine and share its memory."""
    from toolkit.sharding.offload.host import host_gib_of_a_rank  # torch is imported only for a recipe that is right

    of_a_node = max(count, presets()["cpu"].devices_per_node)
    return {"device_memory_gib": host_gib_of_a_rank(count), "gpus_per_node": of_a_node}


def _plan_recipe(recipe: Recipe, hardware: Hardware, ranks: int | None, config: AccelerateConfig) -> Plan:
    from toolkit.planning import table  # torch is imported only for a recipe that is right

    return table.plan(
        _as_configured(recipe, config),
        hardware,
        next(number for number in (ranks, config.num_processes, 1) if number is not None),
        mixed_precision=config.mixed_precision,
        strategy=None if config.strategy is None else parse_strategy(config.strategy, "--config").name,
        offload=asks_for_offload(config.strategy),
        shard_size=config.size("dp_shard"),
    )


def _as_configured(recipe: Recipe, config: AccelerateConfig) -> Recipe:
    """Returns the recipe with the tensor groups and the checkpointing that it or the Accelerate config asks for."""
    update: dict[str, Any] = {"tensor": agreed_tensor(recipe.sharding.tensor, config.size("tp"))}
    if config.asks_for("fsdp_activation_checkpointing") and recipe.sharding.activation_checkpointing is None:
        offloads = config.asks_for("fsdp_activation_checkpointing_offload")
        update |= {"activation_checkpointing": 1, "offload_checkpoints": offloads}
    return recipe.changed(sharding=update)


def _print_plan(found: Plan, name: str, overrides: list[str], every_row: bool, explain: bool, as_json: bool) -> None:
    from toolkit.cli.shared import plan_console
    from toolkit.planning.launch import launch_of

    launch = None if found.recommended is None else launch_of(found, found.recommended, name, overrides)
    if as_json:
        print(json.dumps(plan_console.as_json(found, launch), indent=1))
        return
    console = Terminal(stderr=False)
    plan_console.show(console, found, launch, every_row)
    if explain:
        console.print()
        plan_console.explain(console, found, found.recommended or found.asked)


def _print_presets() -> None:
    rows = [
        [name, f"{h.memory_bytes / GIB:.0f} GiB", f"{h.peak_flops['bfloat16'] / 1e12:.0f}"]
        for name, h in presets().items()
    ]
    print_table(["hardware", "memory", "TFLOP/s in bfloat16"], rows)
