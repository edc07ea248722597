"""`toolkit plan`: say before a run whether it fits, what to pick, and how fast it will be."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.shared.arguments import (
    MACHINE,
    MOST_CPU_RANKS,
    AsJson,
    ConfigOption,
    RecipeArguments,
    RecipeOption,
    complete_hardware,
    load_recipe,
    split_arguments,
)
from toolkit.cli.shared.console import libraries_imported, print_table
from toolkit.cli.shared.hub import settle_hub
from toolkit.cli.shared.shipped import find_config
from toolkit.errors import BadInputError
from toolkit.paths import GIB
from toolkit.planning.time.hardware import Hardware, hardware_of, presets, profile_path
from toolkit.recipe.recipe import Recipe
from toolkit.terminal import Pass, Terminal

if TYPE_CHECKING:
    from toolkit.planning.planner import PlanRow
    from toolkit.planning.table import Plan

DEFAULT_HARDWARE = "h100_sxm"

IN_A_FILE = 400
"""Characters of a line that goes to a file or a pipe; 80 would cost columns."""


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
Cpu = Annotated[
    int | None,
    _of_machine("Plan for this many processes on this machine's CPU.", min=1, max=MOST_CPU_RANKS),
]
HardwareName = Annotated[
    str | None,
    _of_machine(
        "Plan for this hardware: a preset (--list-hardware), `calibrated`, or the path of a profile.",
        show_default=DEFAULT_HARDWARE,
        autocompletion=complete_hardware,
    ),
]
GpusPerNode = Annotated[int | None, _of_preset("Number of GPUs per node.")]
DeviceMemory = Annotated[float | None, _of_preset("Memory of one GPU (GiB).")]
HostMemory = Annotated[float | None, _of_preset("Host memory of one node (GiB).")]
LinkSpeed = Annotated[float | None, _of_preset("Bandwidth between the GPUs of a node (GB/s each way).")]
NicSpeed = Annotated[float | None, _of_preset("Bandwidth between nodes (GB/s per node, each way).")]
PcieSpeed = Annotated[float | None, _of_preset("Bandwidth between a GPU and the host (GB/s each way).")]
DramSpeed = Annotated[float | None, _of_preset("Bandwidth of host memory (GB/s per node).")]
EveryRow = Annotated[bool, typer.Option("--all", help="Show every row.")]
Explain = Annotated[bool, typer.Option("--explain", help="Show the formulas with the numbers filled in.")]
Trace = Annotated[bool, typer.Option("--trace", help="Check the peak by running FSDP2 on fake tensors.")]
Plot = Annotated[Path | None, typer.Option(help="Draw the memory of each row to this file.")]
LongestRow = Annotated[
    bool, typer.Option("--longest-row", help="Print the longest row that fits, and the settings that reach it.")
]
Calibrate = Annotated[
    bool,
    typer.Option(
        "--calibrate", help="Measure this machine, store the result as `calibrated`, and exit.", rich_help_panel=MACHINE
    ),
]
ListHardware = Annotated[
    bool, typer.Option("--list-hardware", help="List the presets and exit.", rich_help_panel=MACHINE)
]


def plan(
    arguments: RecipeArguments = None,
    recipe: RecipeOption = None,
    gpus: Gpus = None,
    cpu: Cpu = None,
    hardware: HardwareName = None,
    config: ConfigOption = None,
    gpus_per_node: GpusPerNode = None,
    device_memory_gib: DeviceMemory = None,
    host_memory_gib: HostMemory = None,
    link_gbs: LinkSpeed = None,
    nic_gbs: NicSpeed = None,
    pcie_gbs: PcieSpeed = None,
    dram_gbs: DramSpeed = None,
    every_row: EveryRow = False,
    explain: Explain = False,
    trace: Trace = False,
    plot: Plot = None,
    longest_row: LongestRow = False,
    calibrate: Calibrate = False,
    list_hardware: ListHardware = False,
    as_json: AsJson = False,
) -> None:
    """Predict before a run whether it fits, which strategy to pick, and how fast it will be.

    Needs no GPU and no weights: the model's configuration is enough.

    Exit codes: 0 something fits, 1 nothing does, 2 bad input.
    """
    if list_hardware:
        _print_presets()
        return
    if calibrate:
        _print_calibration(1 if gpus is None else gpus)
        return
    _require_effect({"--longest-row": longest_row}, {"--all": every_row, "--explain": explain, "--trace": trace})
    _require_effect({"--longest-row": longest_row}, {"--plot": plot is not None})
    if plot is not None:
        _require_image(plot)
    loaded = load_recipe(arguments, recipe)
    settle_hub(loaded)
    device = hardware_of(
        (DEFAULT_HARDWARE if hardware is None else hardware) if cpu is None else _cpu_preset(gpus, hardware),
        device_memory_gib=device_memory_gib if cpu is None or device_memory_gib is not None else _memory_per_rank(cpu),
        gpus_per_node=gpus_per_node if cpu is None or gpus_per_node is not None else _cpu_ranks_of_a_node(cpu),
        host_memory_gib=host_memory_gib,
        link_gbs=link_gbs,
        nic_gbs=nic_gbs,
        pcie_gbs=pcie_gbs,
        dram_gbs=dram_gbs,
    )
    accelerated = Accelerated() if config is None else accelerated_by(find_config(config))
    if longest_row:
        with Pass(Terminal(), "planning"):
            _print_longest(loaded, device, cpu or gpus or accelerated.num_processes or 1, accelerated, as_json)
        return
    with Pass(Terminal(), "planning"):
        found = _plan_recipe(loaded, device, cpu or gpus, accelerated)
    _print_plan(found, *split_arguments(arguments, recipe), PlanOutput(every_row, explain, trace, plot, as_json))
    if found.recommended is None:
        raise typer.Exit(1)


IMAGES = (".png", ".svg", ".pdf")


def _require_effect(alone: dict[str, bool], others: dict[str, bool]) -> None:
    """Raises BadInputError if an option is given with another one that leaves it without effect."""
    for option in [option for option, given in alone.items() if given]:
        if idle := [other for other, given in others.items() if given]:
            raise BadInputError(f"{idle[0]} has no effect with {option}; leave one of them out")


def _require_image(plot: Path) -> None:
    """Raises BadInputError for the name of a file that would be another one's, or is not one of an image."""
    if plot.suffix not in IMAGES:
        raise BadInputError(f"--plot: {str(plot)!r} is not an image's name; allowed ends: {', '.join(IMAGES)}")


def _cpu_ranks_of_a_node(cpu: int) -> int:
    """Returns all of them: they are this machine's."""
    return max(cpu, presets()["cpu"].devices_per_node)


def _cpu_preset(gpus: int | None, hardware: str | None) -> str:
    """Returns the preset of CPU ranks. Raises BadInputError if GPUs are given, too."""
    if gpus is not None or hardware not in (None, "cpu"):
        raise BadInputError("--cpu excludes --gpus and --hardware; leave one of them out")
    return "cpu"


def _memory_per_rank(num_ranks: int) -> float:
    """Returns the share of this machine's memory for each of its CPU ranks (GiB)."""
    from toolkit.sharding.offload.host import host_gib_of_a_rank  # torch is imported only for a recipe that is right

    return host_gib_of_a_rank(num_ranks)


@dataclass(frozen=True)
class PlanOutput:
    """Options of what is printed besides the table."""

    every_row: bool = False
    explain: bool = False
    trace: bool = False
    plot: Path | None = None
    as_json: bool = False


@dataclass(frozen=True)
class Accelerated:
    """The settings of an Accelerate config that a plan needs."""

    strategy: str | None = None
    offload: bool = False
    shard_size: int | None = None
    mixed_precision: str | None = None
    num_processes: int | None = None
    tensor: int | None = None
    checkpoints: bool = False
    offloads_checkpoints: bool = False


def accelerated_by(path: Path) -> Accelerated:
    """Reads the settings of an Accelerate config.

    Raises:
        BadInputError: if the file does not exist, or is not an Accelerate config.
    """
    from toolkit.sharding.accelerate_config import read_accelerate_config
    from toolkit.sharding.plan.strategy import asks_for_offload, parse_strategy

    config = read_accelerate_config(path)
    where = f"--config: {path}: fsdp_config.fsdp_sharding_strategy"
    return Accelerated(
        strategy=None if config.strategy is None else parse_strategy(config.strategy, where).name,
        offload=asks_for_offload(config.strategy),
        shard_size=config.shard_size,
        mixed_precision=config.mixed_precision,
        num_processes=config.num_processes,
        tensor=config.tensor_size,
        checkpoints=config.asks_for("fsdp_activation_checkpointing"),
        offloads_checkpoints=config.asks_for("fsdp_activation_checkpointing_offload"),
    )


def _plan_recipe(recipe: Recipe, hardware: Hardware, ranks: int | None, accelerated: Accelerated) -> Plan:
    with libraries_imported():
        from toolkit.planning import table  # torch is imported only for a recipe that is right

    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing. is deprecated.*")  # by peft
    return table.plan(
        _as_configured(recipe, accelerated),
        hardware,
        next(number for number in (ranks, accelerated.num_processes, 1) if number is not None),
        mixed_precision=accelerated.mixed_precision,
        strategy=accelerated.strategy,
        offload=accelerated.offload,
        shard_size=accelerated.shard_size,
    )


def _as_configured(recipe: Recipe, accelerated: Accelerated) -> Recipe:
    """Returns the recipe with the tensor groups and the checkpointing that it or the Accelerate config asks for."""
    from toolkit.sharding.plan.strategy import agreed_tensor

    update: dict[str, Any] = {"tensor": agreed_tensor(recipe.sharding.tensor, accelerated.tensor)}
    if accelerated.checkpoints and recipe.sharding.activation_checkpointing is None:
        update |= {"activation_checkpointing": 1, "offload_checkpoints": accelerated.offloads_checkpoints}
    return recipe.model_copy(update={"sharding": recipe.sharding.model_copy(update=update)})


def _print_longest(recipe: Recipe, hardware: Hardware, ranks: int, accelerated: Accelerated, as_json: bool) -> None:
    from toolkit.planning.longest import longest_rows
    from toolkit.planning.table import precision_of

    rows = longest_rows(
        _as_configured(recipe, accelerated),
        hardware,
        ranks,
        precision_of(recipe.training, accelerated.mixed_precision, hardware),
    )
    if as_json:
        told = {
            v: {"tokens": found.tokens, "settings": found.settings, "model_positions": found.num_positions}
            for v, found in rows.items()
        }
        print(json.dumps(told, indent=1))
        return
    for verdict, found in rows.items():
        print(f"{verdict}: {found.describe()}")


def _print_plan(found: Plan, name: str, overrides: list[str], shown: PlanOutput) -> None:
    from toolkit.cli.shared import plan_console
    from toolkit.planning.launch import launch_of

    row = found.recommended or found.asked
    launch = None if found.recommended is None else launch_of(found, found.recommended, name, overrides)
    if shown.plot is not None:
        plan_console.plot(found, shown.plot)
    traced = _trace_in_process(found, row) if shown.trace else None
    if shown.as_json:
        result = plan_console.as_json(found, launch)
        print(json.dumps(result if traced is None else {**result, "traced": traced}, indent=1))
        return
    console = Terminal(stderr=False, soft_wrap=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = IN_A_FILE
    plan_console.show(console, found, launch, shown.every_row)
    if shown.explain:
        console.print()
        plan_console.explain(console, found, row)
    if traced is not None:
        console.print(_trace_text(traced), markup=False)


def _trace_in_process(found: Plan, row: PlanRow) -> dict[str, Any]:
    """Runs the real FSDP2 on simulated ranks, in a separate process because a process group is global."""
    from toolkit.planning.workload.workload import shared_by
    from toolkit.recipe.recipe import with_tensor

    if not row.setup.strategy.sharded or row.setup.offload:
        raise BadInputError(
            f"--trace: {row.setup.name} cannot be traced: torch's DDP and the offload engine need real ranks; "
            "zero1, zero2, zero3 and hybrid without offload can be traced"
        )
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        recipe = with_tensor(shared_by(found.recipe, row.traffic.sequence), row.setup.mesh.tensor)
        traced: dict[str, Any] = pool.submit(_traced_peak, recipe, found.mixed_precision, row.setup).result()
    return {**traced, "planned": row.peak.total - row.peak.optimizer}


def _traced_peak(recipe: Recipe, mixed_precision: str, setup: Any) -> dict[str, Any]:
    from toolkit.planning.memory.trace import trace
    from toolkit.planning.workload.image_workload import workload_on_rows

    workload = workload_on_rows(recipe, mixed_precision)
    found = trace(
        workload,
        setup.strategy,
        setup.mesh,
        setup.micro_batch_size,
        # By micro-batch no later one holds more than the third; by block all are held.
        setup.accumulation if setup.by_block else min(setup.accumulation, 3),
        setup.checkpointing,
        setup.by_block,
    )
    return dataclasses.asdict(found)


def _trace_text(traced: dict[str, Any]) -> str:
    difference = traced["planned"] / traced["peak"] - 1
    return (
        f"traced with FSDP2, without optimizer state: peak {traced['peak'] / GIB:.3f} GiB in {traced['moment']}; "
        f"planned {traced['planned'] / GIB:.3f} GiB ({difference:+.2%})"
    )


def _print_presets() -> None:
    rows = [
        [name, f"{h.memory_bytes / GIB:.0f} GiB", f"{h.peak_flops['bfloat16'] / 1e12:.0f}"]
        for name, h in presets().items()
    ]
    print_table(["hardware", "memory", "TFLOP/s in bfloat16"], rows)


def _print_calibration(ranks: int) -> None:
    from toolkit.planning.time.calibrate import calibrate

    found = calibrate(ranks=ranks)
    rows = [
        *([f"{dtype} products", f"{flops / 1e12:.3g} TFLOP/s"] for dtype, flops in found.peak_flops.items()),
        ["device memory", f"{found.memory_bandwidth / 1e9:.3g} GB/s"],
        ["between devices", f"{found.link_bandwidth / 1e9:.3g} GB/s"],
        ["device to host", f"{found.host_link_bandwidth / 1e9:.3g} GB/s"],
        ["host memory", f"{found.host_memory_bandwidth / 1e9:.3g} GB/s"],
    ]
    print_table(["measured", found.name], rows)
    print(f"{profile_path()}: use it with --hardware calibrated")
