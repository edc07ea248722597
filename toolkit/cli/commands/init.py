"""`toolkit init`: write a recipe that fits a model, its data and a machine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.shared.arguments import MACHINE, OVERRIDES, AsJson, CpuOption, Force, GpusOption, complete_hardware
from toolkit.cli.shared.hub import settle_names
from toolkit.cli.shared.new_files import require_new, write_to
from toolkit.errors import BadInputError, counted
from toolkit.paths import GIB
from toolkit.recipe.json_schema import schema_line
from toolkit.terminal import Terminal

if TYPE_CHECKING:
    from toolkit.suggest.suggestion import Machine, Suggestion

CPU_RANKS = 2
"""On a machine without a GPU: the fewest that rehearse a run on several."""

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar=OVERRIDES, help="Recipe values to keep as you give them."),
]
MethodName = Annotated[
    str | None,
    typer.Option(
        help="Training method: full, lora, qlora, pretrain, dpo, ipo, simpo, orpo, lora-dpo, qlora-dpo, reward, kto, "
        "grpo, classify, tag or seq2seq. By default the rows decide: full for answers, pretrain for plain text, dpo "
        "for pairs, classify for labels, tag for words with tags, seq2seq for an encoder-decoder; lora if full "
        "training does not fit, and qlora if lora does not.",
    ),
]
HardwareName = Annotated[
    str | None,
    typer.Option(
        help="Write the recipe for this hardware: a preset (`toolkit plan --list-hardware`). By default this "
        "machine's GPU; where there is none, h100_sxm with --gpus, and the CPU without.",
        rich_help_panel=MACHINE,
        autocompletion=complete_hardware,
    ),
]


def init(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder of a model, or its hub name.")],
    data: Annotated[str, typer.Argument(metavar="DATA", help="Rows to train on: a file, a glob, or a hub data set.")],
    overrides: Overrides = None,
    method: MethodName = None,
    gpus: GpusOption = None,
    cpu: CpuOption = None,
    hardware: HardwareName = None,
    output: Annotated[
        Path | None, typer.Option("--to", help="Write the recipe to this file.", show_default="named after the data")
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write a recipe for a model and its data, with a reason for each value, and print the next commands.

    Reads the rows and the model's configuration; needs no GPU and no weights.
    """
    if gpus is not None and cpu is not None:
        raise BadInputError("--gpus and --cpu exclude each other; leave one of them out")
    file = output or Path(f"{_name_after(data)}.yaml")
    if file.suffix not in (".yaml", ".yml"):
        raise BadInputError(f"--to: {str(file)!r}: the name of a recipe ends in .yaml or .yml")
    require_new(file, force)
    settle_names([model], [data])
    from toolkit.suggest.suggestion import suggest  # torch is imported only for arguments that are right

    console = Terminal()
    found = suggest(
        model,
        data,
        _machine_of_options(gpus, cpu, hardware),
        method=method,
        overrides=overrides or [],
        folder=file.parent,
        tell=lambda line: console.print(line, markup=False),
    )
    write_to(file, schema_line(file.parent) + found.text())
    if as_json:
        print(json.dumps(_suggestion_as_json(found, file), indent=1, ensure_ascii=False))
    else:
        _print_suggestion(found, file)


def _name_after(data: str) -> str:
    """Returns a name for the recipe, and for its run, after the data."""
    path = Path(data)
    return (path.parent.name if "*" in path.name else path.name.partition(".")[0]) or "recipe"


def _machine_of_options(gpus: int | None, cpu: int | None, hardware: str | None) -> Machine:
    """Returns the machine that is named, or else this one."""
    import torch

    from toolkit.planning.hardware import hardware_of, preset_of_device
    from toolkit.sharding.offload.host import host_gib_of_a_rank, multiplies_in_bf16
    from toolkit.suggest.suggestion import Machine

    here = torch.cuda.device_count()
    if cpu is None and gpus is None and hardware is None and not here:
        cpu = CPU_RANKS
    preset = preset_of_device(torch.cuda.get_device_name(0)) if here and hardware is None and cpu is None else None
    device = preset or hardware_of(
        hardware if hardware is not None else "cpu" if cpu is not None else "h100_sxm",
        device_memory_gib=host_gib_of_a_rank(cpu) if cpu is not None and hardware is None else None,
    )
    if (device.device_type == "cpu") != (cpu is not None):
        right = "--gpus N" if cpu is not None else "--cpu N"
        raise BadInputError(f"--hardware {device.name}: its type is {device.device_type}; give {right} with it")
    count = next(number for number in (cpu, gpus, here or 1) if number is not None)
    return Machine(device, count, hardware, has_bf16=cpu is not None and hardware is None and multiplies_in_bf16())


def _print_suggestion(found: Suggestion, file: Path) -> None:
    from toolkit.model.part_sizes import describe_parts

    row, setup = found.row, found.row.setup
    console = Terminal(stderr=False)
    lines = [
        f"{file}: method {found.method.name} trains {found.method.about}",
        f"data: {counted(len(found.rows.lengths), 'row')} ({found.layout}), {found.rows.num_tokens:,} tokens; "
        f"samples of {found.recipe.data.max_length:,}",
        f"model: {found.model.num_parameters:,} parameters on {found.machine.words}: {setup.name}, checkpoints "
        f"{setup.checkpoints}, micro-batch {setup.micro_batch_size} x {setup.accumulation}; "
        f"{row.need / GIB:.1f} of {found.machine.hardware.memory_bytes / GIB:.0f} GiB needed",
        *([f"parts: {describe_parts(found.parts)}"] if found.parts else []),
        f"run: about {counted(found.num_steps, 'step')}",
        "next:",
        *(f"  {command}" for command in found.commands(str(file))),
    ]
    for line in lines:
        console.print(line, markup=False)


def _suggestion_as_json(found: Suggestion, file: Path) -> dict[str, Any]:
    return {
        "file": str(file),
        "method": found.method.name,
        "layout": found.layout,
        "rows": len(found.rows.lengths),
        "tokens": found.rows.num_tokens,
        "parameters": found.model.num_parameters,
        "parts": {part: dataclasses.asdict(size) for part, size in found.parts.items()},
        "steps": found.num_steps,
        "need": found.row.need,
        "recipe": found.draft.nested(),
        "reasons": {key: reason for key, reason in found.reasons.items() if reason},
        "commands": found.commands(str(file)),
    }
