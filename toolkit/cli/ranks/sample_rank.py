"""Starts what `toolkit sample` does: in this process or on ranks.

python -m toolkit.cli.ranks.sample_rank OPTIONS
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from toolkit.cli.ranks.finetune import as_rank
from toolkit.cli.shared.console import prepare_process
from toolkit.cli.shared.signals import end_at_interrupts
from toolkit.generation.sampling.sample_options import SampleOptions

if TYPE_CHECKING:
    from toolkit.generation.sampling.sampled_rows import Sampled


def start(options: SampleOptions, gpus: int | None, cpu: int | None, as_json: bool) -> None:
    """Samples on so many ranks of this machine; without a number on all GPUs, or on one process.

    Raises:
        BadInputError: if there are too few GPUs, or an option, a model, a prompt or a folder cannot be used.
        typer.Exit: with the exit code of ranks that were started.
    """
    from toolkit.cli.ranks.launch_options import count_gpus, launcher_options

    if gpus is None and cpu is None:
        gpus = count_gpus() or None
    if gpus is not None and gpus > 1:
        options = dataclasses.replace(options, device="cuda")  # each rank has its own
    launch = launcher_options(None, gpus, cpu, None, None) if gpus or cpu else []
    if (cpu or gpus or 1) == 1:
        from toolkit.generation.sampling.sampling import sample

        _print_sampled(sample(options), as_json)
        return
    from toolkit.cli.ranks.launcher import run_launcher
    from toolkit.generation.sampling.sampling import read_prompts
    from toolkit.generation.text.load import find_model

    # Before the ranks start: what is wrong is reported within a second.
    find_model(options.source)
    read_prompts(options)
    job = json.dumps({"options": dataclasses.asdict(options), "json": as_json}, default=str)
    raise typer.Exit(run_launcher([*launch, "--module", "toolkit.cli.ranks.sample_rank", job], options.to))


def _print_sampled(found: Sampled, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**dataclasses.asdict(found), "folder": str(found.folder)}, indent=1))
    else:
        print(found.summary())


def rank_main(job: dict[str, Any]) -> None:
    """Runs a rank."""
    from toolkit import ranks
    from toolkit.generation.sampling.sampling import sample

    values = job["options"]
    options = SampleOptions(**{**values, "prompts": Path(values["prompts"]), "to": Path(values["to"])})
    with joined_ranks(options.device):
        found = sample(options)
        if ranks.rank() == 0:
            _print_sampled(found, job["json"])


@contextmanager
def joined_ranks(device: str) -> Iterator[None]:
    """Joins the ranks inside the block. They exchange only what is on the host."""
    import torch
    import torch.distributed as dist

    from toolkit import ranks
    from toolkit.supervise.parent_death import ended_with_launcher

    if device == "cuda":
        torch.cuda.set_device(ranks.local_rank())
    dist.init_process_group("gloo")
    with ended_with_launcher():
        yield
    dist.destroy_process_group()


if __name__ == "__main__":
    end_at_interrupts()
    prepare_process()
    sys.exit(as_rank(lambda: rank_main(json.loads(sys.argv[1]))))
