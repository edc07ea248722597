"""Starts what `toolkit generate` does on ranks, which share the model.

python -m toolkit.cli.ranks.generate_rank OPTIONS
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import typer

from toolkit.cli.ranks.finetune import as_rank
from toolkit.cli.ranks.sample_rank import joined_ranks
from toolkit.cli.shared.console import prepare_process
from toolkit.cli.shared.signals import end_at_interrupts
from toolkit.errors import BadInputError
from toolkit.generation.text.options import Options

PATHS = ("file", "evaluation", "output")
"""Options that are paths, which JSON has as texts."""


def start(options: Options, gpus: int | None, cpu: int | None) -> None:
    """Generates on so many ranks of this machine.

    Raises:
        BadInputError: if there are too few GPUs, or an option cannot be used.
        typer.Exit: with the exit code of the ranks.
    """
    from toolkit.cli.ranks.launch_options import launcher_options
    from toolkit.cli.ranks.launcher import run_launcher
    from toolkit.generation.text.command import rows_of

    if options.images:
        raise BadInputError("--image needs a model on one device; leave --gpus and --cpu out")
    rows_of(options)  # what is wrong is told in a moment
    launch = launcher_options(None, gpus, cpu, None, None)
    job = json.dumps(dataclasses.asdict(options), default=str)
    with tempfile.TemporaryDirectory() as nothing:
        raise typer.Exit(run_launcher([*launch, "--module", "toolkit.cli.ranks.generate_rank", job], Path(nothing)))


def rank_main(job: dict[str, Any]) -> None:
    """Runs a rank."""
    from toolkit.generation.text.command import run

    paths = {name: Path(job[name]) for name in PATHS if job[name] is not None}
    options = Options(**{**job, **paths, "images": ()})
    with joined_ranks(options.device, "cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo"):
        run(options)


if __name__ == "__main__":
    end_at_interrupts()
    prepare_process()
    sys.exit(as_rank(lambda: rank_main(json.loads(sys.argv[1]))))
