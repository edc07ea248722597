"""Starts a script as `accelerate launch` does, with its ranks forked from the server of ranks.py.

The launcher's own code reads the config and makes the environment; only the step that would give each
rank an interpreter of its own is replaced, because the imports there cost each of them five seconds.
Where the start itself is tested, the command is started: tests/recipes/test_commands.py, the two
machines, the stops, and the first run of an example.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from support.ranks import alone, run_on_ranks
from toolkit.ranks import free_port

OF_A_LAUNCHER = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "OMP_")
"""What the names of a launcher's environment variables start with."""

OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def clean_environment(**added: str) -> dict[str, str]:
    """This process's environment without what a launcher may have left in it, offline, and what is added."""
    left = {key for key in os.environ if key.startswith(OF_A_LAUNCHER) or key in OF_A_RANK}
    kept = {key: value for key, value in os.environ.items() if key not in left}
    return {**kept, "HF_HUB_OFFLINE": "1", **added}


def launch(config: Path, script: Path, *arguments: str, folder: Path) -> str:
    """What the first rank of `accelerate launch --config_file CONFIG SCRIPT ARGUMENTS` prints, run in `folder`.

    Raises AssertionError with the traceback of a rank that failed.
    """
    num_ranks, environment = read_by_the_launcher(config, script)
    return str(run_on_ranks(_run_script, num_ranks, script, arguments, environment, folder)[0])


def read_by_the_launcher(config: Path, script: Path) -> tuple[int, dict[str, str]]:
    """How many ranks the launcher would start, and the environment that they would share."""
    import torch.distributed.run
    from accelerate.commands.launch import launch_command, launch_command_parser

    found: list[tuple[int, dict[str, str]]] = []

    def note(settings: Any) -> None:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        found.append((int(settings.nproc_per_node), {**os.environ, **meeting}))

    with (
        mock.patch.dict(os.environ, clean_environment(OMP_NUM_THREADS="1"), clear=True),
        mock.patch.object(torch.distributed.run, "run", note),
    ):
        launch_command(launch_command_parser().parse_args(["--config_file", str(config), str(script)]))
    (started,) = found
    return started


@alone
def _run_script(script: Path, arguments: tuple[str, ...], environment: dict[str, str], folder: Path) -> str:
    """This rank's standard output."""
    of_this_rank = {key: os.environ[key] for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    os.environ.clear()
    os.environ.update({**environment, **of_this_rank})
    os.chdir(folder)
    sys.argv = [str(script), *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as ended:
            if ended.code:
                raise AssertionError(f"exit code {ended.code}") from ended
    return printed.getvalue()
