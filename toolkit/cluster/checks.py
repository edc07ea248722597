"""Checks a job before its file is written, so that no node is waited for in vain."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from toolkit.cluster.job import Job
from toolkit.errors import BadInputError
from toolkit.planning.hardware import Hardware, hardware_of
from toolkit.planning.setup import asked_setup
from toolkit.sharding.parallel.sequence_parallel import require_groups
from toolkit.sharding.plan.strategy import parse_strategy

OWN_DISKS = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # noqa: S108 (named, not written to)
"""Folders that each node has for itself."""

UNITS = {"m": 1, "h": 60, "d": 24 * 60}


def nodes_of(text: str) -> tuple[int, int]:
    """Returns the least and the most nodes of `2` or `1-2`.

    Raises:
        BadInputError: if it is neither.
    """
    found = re.fullmatch(r"([1-9]\d{0,4})(?:-([1-9]\d{0,4}))?", text)
    if found is None or int(found[2] or found[1]) < int(found[1]):
        raise BadInputError(f"--nodes: {text!r}; allowed: a number from 1 (2), or a range (1-2)")
    return int(found[1]), int(found[2] or found[1])


def minutes_of(text: str) -> int:
    """Returns the minutes of a time such as `90m`, `8h` or `2d`.

    Raises:
        BadInputError: if it is not one.
    """
    found = re.fullmatch(r"([1-9]\d{0,4})([mhd])", text)
    if found is None:
        raise BadInputError(f"--time: {text!r}; allowed: a number of minutes, hours or days, such as 90m, 8h or 2d")
    return int(found[1]) * UNITS[found[2]]


def check_job(job: Job, hardware: Hardware | None) -> None:
    """Checks what can be known of a job before it starts.

    Args:
        hardware: what each node has, if the user says so.

    Raises:
        BadInputError: with all that is wrong.
    """
    _check_options(job)
    if not job.on_cpu:
        _check_gpus(job, hardware)
    _check_restarts(job)
    _check_folders(job)
    _check_steps(job)


def _check_gpus(job: Job, hardware: Hardware | None) -> None:
    """Raises BadInputError if a rank of a node would have no GPU, as far as that is known here."""
    if hardware is not None and job.ranks > (count := hardware.devices_per_node):
        raise BadInputError(
            f"--gpus: {job.ranks}, but a node of {hardware.name} has {count} GPUs; give at most as many, "
            "and more --nodes"
        )


def _check_options(job: Job) -> None:
    """Raises BadInputError for options that would not stay inside of their line."""
    given = {"--partition": job.partition, "--image": job.image, "the recipe": job.source, "here": str(Path.cwd())}
    for option, value in given.items():
        if value is not None and not value.isprintable():
            raise BadInputError(f"{option}: {value!r} holds an end of line, or another character that is not printed")


def _check_restarts(job: Job) -> None:
    """Raises BadInputError if a run that is started again would begin at its first step."""
    section = job.recipe.checkpoint
    if section.resume == "never":
        raise BadInputError(
            "checkpoint.resume: never, but a job that is preempted starts again, at the first step; set it to auto"
        )
    if section.every_steps is None and section.minutes is None:
        raise BadInputError(
            "checkpoint.every_minutes: never, so that the loss of a node loses the whole run; set it, for example "
            "checkpoint.every_minutes=10"
        )


def _check_folders(job: Job) -> None:
    """Raises BadInputError if the next start, or another node, would not see the checkpoints."""
    if (store := job.recipe.checkpoint.to) is not None:
        if store.startswith("file://") and _is_on_own_disk(Path(store.removeprefix("file://"))):
            raise BadInputError(f"checkpoint.to: {store!r} is on a disk that each node has for itself; name another")
        return
    folder = Path(job.recipe.training.output_dir).expanduser().resolve()
    if _is_on_own_disk(folder):
        raise BadInputError(
            f"training.output_dir: {str(folder)!r} is on a disk that each node has for itself, so that neither the "
            "other nodes nor the next start see its checkpoints; name a folder of a shared file system, or keep the "
            "checkpoints in a store (checkpoint.to=s3://bucket/runs/first)"
        )


def _is_on_own_disk(folder: Path) -> bool:
    return any(folder.resolve().is_relative_to(own) for own in OWN_DISKS)


def _check_steps(job: Job) -> None:
    """Raises BadInputError if the strategy's groups, or a step, do not fit one of the numbers of nodes."""
    node = replace(hardware_of("cpu" if job.on_cpu else "h100_sxm"), devices_per_node=job.ranks)
    section = job.recipe.sharding
    asked = None if job.strategy is None else parse_strategy(job.strategy, "--strategy").name
    for count in job.node_counts:
        ranks = count * job.ranks
        try:
            # hybrid shards inside a node, and needs another one
            if (asked or section.strategy) == "hybrid" and count == 1:
                raise BadInputError(
                    "strategy hybrid keeps a copy of the model on each node, and there is one; name zero3"
                )
            asked_setup(job.recipe, ranks, node, asked, False, None)
            require_groups("sharding.experts", section.experts, ranks)
            require_groups("sharding.sequence", section.sequence, ranks)
        except BadInputError as error:
            raise BadInputError(f"--nodes: on {count} of {job.ranks} ranks: {error}") from error
        if job.micro_batches % count:
            raise BadInputError(
                f"--nodes: {job.least}-{job.most}: a step of {job.micro_batches} micro-batches for each rank of a node "
                f"(training.gradient_accumulation_steps x {job.most}) cannot be shared by {count} nodes, and would "
                "have other samples; name other numbers, or another training.gradient_accumulation_steps"
            )
