"""What `toolkit plan` does."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from toolkit.errors import BadInputError
from toolkit.pages.plan_console import as_json, explain, plot, show
from toolkit.places import GIB
from toolkit.planning.table import Plan, Row, launch_of, plan
from toolkit.planning.time.hardware import Hardware
from toolkit.recipe.recipe import Recipe
from toolkit.sharding.accelerate_config import read_accelerate_config
from toolkit.sharding.strategy import asks_for_offload, parse_strategy

IN_A_FILE = 400
"""Characters of a line that goes to a file or a pipe; 80 would cost columns."""


@dataclass(frozen=True)
class PlanOptions:
    """What is printed beside the table."""

    every_row: bool = False
    explain: bool = False
    trace: bool = False
    plot: Path | None = None
    as_json: bool = False


@dataclass(frozen=True)
class Accelerated:
    """What an Accelerate config says about a plan."""

    strategy: str | None = None
    offload: bool = False
    shard_size: int | None = None
    mixed_precision: str | None = None
    num_processes: int | None = None


def accelerated_by(path: Path) -> Accelerated:
    """Raises BadInputError where the file is none, or no Accelerate config."""
    config = read_accelerate_config(path)
    where = f"--accelerate-config: {path}: fsdp_config.fsdp_sharding_strategy"
    return Accelerated(
        strategy=None if config.strategy is None else parse_strategy(config.strategy, where).name,
        offload=asks_for_offload(config.strategy),
        shard_size=config.shard_size,
        mixed_precision=config.mixed_precision,
        num_processes=config.num_processes,
    )


def plan_command(
    recipe: Recipe,
    name: str,
    overrides: list[str],
    hardware: Hardware,
    ranks: int | None,
    accelerated: Accelerated,
    options: PlanOptions,
) -> bool:
    """Plans and prints; whether anything fits."""
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing. is deprecated.*")  # by peft
    found = plan(
        recipe,
        hardware,
        next(number for number in (ranks, accelerated.num_processes, 1) if number is not None),
        mixed_precision=accelerated.mixed_precision,
        strategy=accelerated.strategy,
        offload=accelerated.offload,
        shard_size=accelerated.shard_size,
    )
    row = found.recommended or found.asked
    launch = None if found.recommended is None else launch_of(found, found.recommended, name, overrides)
    if options.plot is not None:
        plot(found, options.plot)
    traced = _trace(found, row) if options.trace else None
    if options.as_json:
        result = as_json(found, launch)
        print(json.dumps(result if traced is None else {**result, "traced": traced}, indent=1))
        return found.recommended is not None
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = IN_A_FILE
    show(console, found, launch, options.every_row)
    if options.explain:
        console.print()
        explain(console, found, row)
    if traced is not None:
        console.print(_told(traced), markup=False)
    return found.recommended is not None


def _trace(found: Plan, row: Row) -> dict[str, Any]:
    """Runs the real FSDP2 on ranks that are not there, in a process of its own: a process group is global."""
    if not row.setup.strategy.sharded or row.setup.offload:
        raise BadInputError(
            f"--trace: {row.setup.name} cannot be traced: torch's DDP and the offload engine need ranks that are "
            "there; it traces zero1, zero2, zero3 and hybrid"
        )
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        traced: dict[str, Any] = pool.submit(_traced, found.recipe, found.mixed_precision, row.setup).result()
    return {**traced, "planned": row.peak.total - row.peak.optimizer}


def _traced(recipe: Recipe, mixed_precision: str, setup: Any) -> dict[str, Any]:
    from toolkit.planning.memory.trace import trace
    from toolkit.planning.workload import workload_of

    workload = workload_of(recipe, mixed_precision)
    found = trace(
        workload, setup.strategy, setup.mesh, setup.micro_batch_size, min(setup.accumulation, 3), setup.checkpointing
    )
    return dataclasses.asdict(found)


def _told(traced: dict[str, Any]) -> str:
    difference = traced["planned"] / traced["peak"] - 1
    return (
        f"traced with FSDP2, without optimizer state: peak {traced['peak'] / GIB:.3f} GiB in {traced['moment']}; "
        f"planned {traced['planned'] / GIB:.3f} GiB ({difference:+.2%})"
    )
