"""`toolkit verify`: train a few steps plainly and sharded, and compare."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli.shared.arguments import AsJson, ConfigOption, CpuOption, RecipeArguments, load_recipe
from toolkit.cli.shared.console import print_table
from toolkit.cli.shared.hub import settle_hub
from toolkit.cli.shared.shipped import find_config
from toolkit.terminal import Terminal

if TYPE_CHECKING:
    from toolkit.verify import Report


def verify(
    arguments: RecipeArguments = None,
    cpu: CpuOption = None,
    config: ConfigOption = None,
    steps: Annotated[int, typer.Option(help="Compare this many optimizer steps.")] = 5,
    time_limit: Annotated[float, typer.Option(help="Stop after this many seconds.")] = 1800.0,
    as_json: AsJson = False,
) -> None:
    """Train a few steps in a plain loop on one process, then sharded; compare losses, gradients and weights.

    The ranks run on this machine, on the CPU if it has too few GPUs. Dropout is off, and the output folder
    stays untouched. Without --config and --cpu it takes the file that `accelerate config` wrote, or else two
    ranks with the recipe's strategy or zero3.

    Exit codes: 0 all checks pass, 1 one failed, 2 bad input.
    """
    loaded = load_recipe(arguments)
    settle_hub(loaded)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # clears up, as after Ctrl-C
    from toolkit import verify as verification  # torch is imported only for a recipe that is right

    progress = Terminal()
    report = verification.verify(
        loaded,
        None if config is None else find_config(config),
        cpu=cpu,
        steps=steps,
        time_limit_seconds=time_limit,
        tell=lambda line: progress.print(line, markup=False),
    )
    if as_json:
        print(report.to_json())
    else:
        _print_report(report)
    if report.verdict == verification.FAILED:
        raise typer.Exit(1)


def _print_report(report: Report) -> None:
    for name, fact in report.facts.items():
        print(f"{name:>10}: {fact}")
    numbers = [["" if value is None else f"{value:.1e}" for value in (row.found, row.tolerance)] for row in report.rows]
    print_table(
        ["check", "found", "tolerance", "verdict", "note"],
        [[row.check, *shown, row.verdict, row.note] for row, shown in zip(report.rows, numbers, strict=True)],
    )
    print(f"verdict: {report.verdict}")
