"""`toolkit train`: start a recipe on this machine's GPUs or CPU through `accelerate launch`."""

from __future__ import annotations

import json
import os
import shlex
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from toolkit.cli.ranks.launch_options import ON_CPU, Machines, launcher_options, shown_script
from toolkit.cli.shared.arguments import (
    AsJson,
    ConfigOption,
    CpuOption,
    GpusOption,
    MachineRank,
    MainProcessIp,
    MainProcessPort,
    NumMachines,
    RecipeArguments,
    StrategyOption,
    load_recipe,
    split_arguments,
)
from toolkit.cli.shared.hub import require_inputs
from toolkit.errors import ToolkitError, counted
from toolkit.recipe.recipe import Recipe
from toolkit.terminal import stdout_on_stderr


def train(
    arguments: RecipeArguments = None,
    gpus: GpusOption = None,
    cpu: CpuOption = None,
    strategy: StrategyOption = None,
    config: ConfigOption = None,
    num_machines: NumMachines = None,
    machine_rank: MachineRank = None,
    main_process_ip: MainProcessIp = None,
    main_process_port: MainProcessPort = 29500,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the plan and the first batch; train nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a recipe, and print the `accelerate launch` command that does the same.

    Exit codes: 0 done, 1 failed, 2 bad input, 3 stopped on request with its state saved, 4 a rank stalled.
    """
    loaded = load_recipe(arguments)  # reports a wrong recipe before any rank starts
    machines = Machines(num_machines or 1, machine_rank or 0, main_process_ip, main_process_port)
    require_inputs(loaded)
    print(_starting_line(cpu or gpus), file=sys.stderr, flush=True)
    name, overrides = split_arguments(arguments)
    options = launcher_options(loaded, gpus, cpu, strategy, config, machines)
    words = [*options, shown_script(), name, *overrides, *(["--dry-run"] if dry_run else [])]
    command = f"{f'{ON_CPU}=true ' if cpu is not None else ''}accelerate launch {shlex.join(words)}"
    print(command, file=sys.stderr, flush=True)
    if cpu is not None:
        os.environ[ON_CPU] = "true"
    from toolkit.cli.ranks.launcher import run_launcher  # torch is imported only for a recipe that is right

    folder = Path(loaded.training.output_dir).expanduser()
    with stdout_on_stderr() if as_json else nullcontext():
        code = run_launcher(words, folder, recipe=loaded)
    if code == 0 and not dry_run and machines.rank == 0:  # others may have folders of their own
        require_finished(loaded, folder)
    if as_json:
        print(
            json.dumps({"command": command, "exit_code": code, **({} if dry_run else _run_results(folder))}, indent=1)
        )
    raise typer.Exit(code)


def require_finished(recipe: Recipe, folder: Path) -> None:
    """Checks that a run whose ranks ended with code 0 has said that it is done.

    Raises:
        ToolkitError: if it has not: code that runs in a rank can end its process with any code.
    """
    from toolkit.pages.status import mark_ended
    from toolkit.run.folder.finished import FINISHED, is_finished
    from toolkit.supervise.rank_status import REPORT

    if is_finished(folder):
        return
    own = ", ".join(f"{field} ({name})" for field, name in recipe.own_code().items())
    suspect = f"{own} or a library" if own else "a library"
    what = f"the ranks ended with code 0 before the run was done: {str(folder)!r} has no {FINISHED}"
    mark_ended(folder / REPORT, "failed", f"{what[0].upper()}{what[1:]}.")
    raise ToolkitError(
        f"{what}; {suspect} has ended a process: look at the last lines above; run the same command to "
        "resume from the last checkpoint"
    )


def _starting_line(ranks: int | None) -> str:
    """Returns the first line of a start: importing torch takes seconds, up to a minute on a busy machine."""
    return f"starting {'ranks' if ranks is None else counted(ranks, 'rank')}; importing torch takes a while ..."


def _run_results(folder: Path) -> dict[str, Any]:
    """Returns the results of a run: its folder, its record, and what it wrote."""
    from toolkit.pages.parts.story import read_story

    parts = {name: str(folder / path) for name, path in (("export_dir", "export"), ("report", "report.html"))}
    written = {name: path if Path(path).exists() else None for name, path in parts.items()}
    return {"output_dir": str(folder), "record": asdict(read_story(folder)), **written}
