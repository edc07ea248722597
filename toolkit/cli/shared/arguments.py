"""Arguments that several commands take, each declared once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from toolkit.errors import BadInputError
from toolkit.paths import shipped_files
from toolkit.recipe.objectives.section import Section
from toolkit.recipe.recipe import Recipe, shipped_recipes

DEFAULT_RECIPE = "quickstart"

DEFAULT_GPU_CONFIG, DEFAULT_CPU_CONFIG = "zero3", "cpu_2"
"""Accelerate configs that `toolkit train` starts from if none is named."""

MOST_CPU_RANKS = 1024
"""Of one machine: each takes half a GiB before its model, and a port."""

DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16", "fp16": "float16"}
"""What --dtype takes -> torch's name."""


def complete_recipe(incomplete: str) -> list[str]:
    """Recipes and keys that start with what was typed, for the shell, which completes paths where there are none."""
    if "." in incomplete and "/" not in incomplete:
        section, _, start = incomplete.partition(".")
        field = Recipe.model_fields.get(section)
        kind = field.annotation if field is not None else None
        if isinstance(kind, type) and issubclass(kind, Section):
            return [f"{section}.{key}=" for key in kind.model_fields if key.startswith(start)]
    sections = [f"{name}." for name in Recipe.model_fields if name.startswith(incomplete) and name != "description"]
    return [name for name in shipped_recipes() if name.startswith(incomplete)] + sections


def complete_hardware(incomplete: str) -> list[str]:
    """Presets of hardware."""
    from toolkit.planning.hardware import presets

    return [name for name in presets() if name.startswith(incomplete)]


def complete_strategy(incomplete: str) -> list[str]:
    """Sharding strategies, without and with offload."""
    from toolkit.sharding.plan.strategy import OFFLOAD, STRATEGIES

    words = [*STRATEGIES, *(f"{name}{OFFLOAD}" for name, strategy in STRATEGIES.items() if strategy.sharded)]
    return [word for word in words if word.startswith(incomplete)]


def complete_config(incomplete: str) -> list[str]:
    """Accelerate configs that are shipped."""
    return [name for name in shipped_files("accelerate_configs") if name.startswith(incomplete)]


def complete_shipped(incomplete: str) -> list[str]:
    """Recipes and Accelerate configs that are shipped."""
    return [name for name in (*shipped_recipes(), *shipped_files("accelerate_configs")) if name.startswith(incomplete)]


LOOK: Any = {"rich_markup_mode": "markdown", "context_settings": {"help_option_names": ["-h", "--help"]}}
"""Settings of each group of commands."""

RECIPE, OVERRIDES = "RECIPE section.key=value", "section.key=value"
"""How these arguments are shown."""

MACHINE, MACHINES = "Machine", "Several machines"
"""Groups of options in the help texts."""

RecipeArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar=RECIPE,
        help=f"Name or path of a recipe (default: {DEFAULT_RECIPE}), and values that replace the recipe's.",
        autocompletion=complete_recipe,
    ),
]
GpusOption = Annotated[
    int | None,
    typer.Option(min=1, help="Number of GPUs. By default all GPUs of this machine.", rich_help_panel=MACHINE),
]
CpuOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MOST_CPU_RANKS,
        help="Take this many ranks (processes) on the CPU; of a job, on each node.",
        rich_help_panel=MACHINE,
    ),
]
StrategyOption = Annotated[
    str | None,
    typer.Option(
        help="Sharding strategy: ddp, zero1, zero2, zero3 or hybrid; each but ddp also with +offload. By default "
        "the recipe's, or else the config's; of a job, zero3.",
        rich_help_panel=MACHINE,
        autocompletion=complete_strategy,
    ),
]
ConfigOption = Annotated[
    str | None,
    typer.Option(
        help="Accelerate config: the name of a shipped one (`toolkit recipes configs`) or a path.",
        rich_help_panel=MACHINE,
        autocompletion=complete_config,
    ),
]
NumMachines = Annotated[
    int | None,
    typer.Option(min=1, help="Number of machines. Run the command on each.", rich_help_panel=MACHINES),
]
MachineRank = Annotated[
    int | None, typer.Option(min=0, help="Number of this machine, from 0.", rich_help_panel=MACHINES)
]
MainProcessIp = Annotated[
    str | None, typer.Option(help="Address of machine 0, where the machines meet.", rich_help_panel=MACHINES)
]
MainProcessPort = Annotated[
    int, typer.Option(min=1, max=65535, help="A free port of machine 0.", rich_help_panel=MACHINES)
]
RunFolder = Annotated[Path, typer.Argument(help="Folder of a run.")]
RunPlace = Annotated[str, typer.Argument(help="Folder of a run, or its store (s3://bucket/runs/first).")]
NewFile = Annotated[Path, typer.Argument(help="New file, or a folder.")]
NewModel = Annotated[Path, typer.Option(help="New folder, which `from_pretrained` loads.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")]
Checkpoint = Annotated[str | None, typer.Option(help="Take this checkpoint of the run: best, last, or its step.")]
StoredDtype = Annotated[
    str | None,
    typer.Option(
        help="Store the weights in this type: float32, bfloat16 (bf16) or float16 (fp16).",
        show_default="the base's",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def split_arguments(arguments: Sequence[str] | None, option: str | None = None) -> tuple[str, list[str]]:
    """Returns the recipe's name or path, and the overrides.

    Raises:
        BadInputError: if two recipes are given.
    """
    overrides = list(arguments or [])
    is_named = overrides and ("=" not in overrides[0] or Path(overrides[0]).expanduser().is_file())
    named = overrides.pop(0) if is_named else None
    if named is not None and option is not None:
        raise BadInputError(f"two recipes are given: {named!r} and --recipe {option}; leave one of them out")
    return next(name for name in (named, option, DEFAULT_RECIPE) if name is not None), overrides


def load_recipe(arguments: Sequence[str] | None) -> Recipe:
    """Loads the recipe that a command's arguments name; prints to stderr which settings an override replaces."""
    recipe = Recipe.load(*split_arguments(arguments))
    for note in recipe.notes:
        print(f"note: {note}", file=sys.stderr)
    return recipe


def parse_dtype(text: str, *others: str) -> str:
    """Returns torch's name of a dtype, or one of `others` as it is.

    Raises:
        BadInputError: for another name; it lists the allowed ones.
    """
    if text in others:
        return text
    if text not in DTYPES:
        raise BadInputError(f"--dtype: unknown {text!r}; allowed: {', '.join((*others, *DTYPES))}")
    return DTYPES[text]
