"""`toolkit job`: write the file with which Slurm runs a recipe on several nodes."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.shared.arguments import (
    MACHINE,
    CpuOption,
    Force,
    RecipeArguments,
    StrategyOption,
    complete_hardware,
    load_recipe,
    split_arguments,
)
from toolkit.cli.shared.new_files import require_new, write_to
from toolkit.errors import BadInputError
from toolkit.terminal import one_line

SYSTEM = "Slurm"
"""Group of options in the help text."""


def job(
    arguments: RecipeArguments = None,
    nodes: Annotated[str, typer.Option(help="Number of nodes, or a range: 1-2.", rich_help_panel=MACHINE)] = "1",
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs of each node.", rich_help_panel=MACHINE)] = None,
    cpu: CpuOption = None,
    strategy: StrategyOption = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            help="What a node has (`toolkit plan --list-hardware`), for the check of --gpus.",
            rich_help_panel=MACHINE,
            autocompletion=complete_hardware,
        ),
    ] = None,
    time: Annotated[
        str | None,
        typer.Option(help="Time limit of each start: 90m, 8h or 2d.", rich_help_panel=SYSTEM),
    ] = None,
    partition: Annotated[str | None, typer.Option(help="Partition.", rich_help_panel=SYSTEM)] = None,
    image: Annotated[str | None, typer.Option(help="Image of the container, by Pyxis.", rich_help_panel=SYSTEM)] = None,
    output: Annotated[
        Path | None,
        typer.Option("--to", help="Write the job to this file.", show_default="named after the output folder"),
    ] = None,
    force: Force = False,
) -> None:
    """Write a job file for Slurm, with a reason for each line, and print how to submit it.

    The job saves its state when it is preempted or its time is over, starts again, and resumes. Nothing is submitted.
    """
    loaded = load_recipe(arguments)
    from toolkit.cluster.checks import check_job, minutes_of, nodes_of
    from toolkit.cluster.job import Job
    from toolkit.planning.hardware import hardware_of

    if (gpus is None) == (cpu is None):
        raise BadInputError("how many ranks has a node? Give --gpus or --cpu, and one of them alone")
    source, overrides = split_arguments(arguments)
    device = None if hardware is None else hardware_of(hardware)
    made = Job(
        loaded,
        source,
        tuple(overrides),
        *nodes_of(nodes),
        ranks=gpus or cpu or 1,
        on_cpu=cpu is not None,
        strategy=strategy,
        minutes=None if time is None else minutes_of(time),
        partition=partition,
        image=image,
    )
    check_job(made, device)
    file = output or Path(f"{made.name}.slurm.sh")
    require_new(file, force)
    if file.exists() and Path(source).exists() and file.samefile(source):
        raise BadInputError(f"--to: {str(file)!r} is the recipe that the job trains; name another file")
    # Its lines begin the file as comments; what it is given may hold an end of line.
    write_to(file, made.text(one_line(shlex.join(["toolkit", *sys.argv[1:]]))))
    print(f"{file}: look at it, then submit it:\n  sbatch {shlex.quote(str(file))}")
