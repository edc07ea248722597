"""`toolkit configs`: list the shipped Accelerate configs, or copy one."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from toolkit.cli.shared.arguments import LOOK, AsJson, NewFile, complete_config
from toolkit.cli.shared.console import print_rows
from toolkit.cli.shared.new_files import new_copy
from toolkit.cli.shared.shipped import find_config, shipped_configs

configs_app = typer.Typer(invoke_without_command=True, **LOOK)


@configs_app.callback(epilog="toolkit configs")
def configs(context: typer.Context, as_json: AsJson = False) -> None:
    """List the shipped Accelerate configs: ranks, strategy, and when to choose them. Or copy one."""
    if context.invoked_subcommand is None:
        rows = [_config_fields(name, path) for name, path in shipped_configs().items()]
        headings = {"name": "config", "description": "what it is for"}
        print_rows(rows, {key: headings.get(key, key) for key in rows[0]}, as_json)


def _config_fields(name: str, path: Path) -> dict[str, Any]:
    """Returns what is shown of a config; the first sentence of its comment says what it is for."""
    text = path.read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    about = " ".join(line.removeprefix("# ") for line in text.splitlines() if line.startswith("#"))
    return {
        "name": name,
        "ranks": values["num_processes"],
        "strategy": values["fsdp_config"]["fsdp_sharding_strategy"],
        "description": about.split(". ")[0].removesuffix(".") + ".",
    }


@configs_app.command("copy", epilog="toolkit configs copy cpu_2 two.yaml")
def copy_config(
    name: Annotated[str, typer.Argument(help="Name of a shipped config.", autocompletion=complete_config)],
    path: NewFile,
) -> None:
    """Copy a shipped Accelerate config to edit it."""
    target = new_copy(find_config(name), path)
    print(f"{target}: a copy of {name}. Use it: toolkit train RECIPE --config {shlex.quote(str(target))}")
