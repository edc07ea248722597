"""Which checkpoint a run goes on from: the newest good one. What is newer and no good is named, and set aside."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolkit import ranks
from toolkit.checkpoint.manifest import (
    FOLDER,
    STEP_FOLDER,
    Checkpoint,
    Manifest,
    check_files,
    list_checkpoints,
    look_at,
    read_checkpoint,
)
from toolkit.checkpoint.reader import require_same_run
from toolkit.errors import BadInputError

SET_ASIDE = ".set_aside"
"""Ending of the folder of a checkpoint that a run has passed over; it does not count any more."""


@dataclass(frozen=True)
class Resumption:
    """Where a run goes on from.

    Attributes:
        start: the folder and manifest of a checkpoint, every file of which is what was written; None: the beginning.
        passed_over: newer checkpoints that are no good, the newest first; `problem` says why.
    """

    start: tuple[Path, Manifest] | None
    passed_over: tuple[Checkpoint, ...] = ()


def find(run: Path, resume: str, recipe: dict[str, Any]) -> Resumption:
    """The checkpoint to go on from, every file of it read. Changes nothing. Collective.

    Args:
        run: the output folder.
        resume: `auto`: the newest good checkpoint of the output folder, if any; `never`; or a checkpoint's
            or a run's folder.
        recipe: resolved, of this run.

    Raises:
        BadInputError: a path without a good checkpoint, a recipe that differs in what matters, an earlier
            checkpoint than the output folder's last, or an output folder of which no checkpoint is good.
    """
    if resume == "never":
        return Resumption(None)
    candidates = ranks.on_first_rank(lambda: _candidates(run, resume))
    passed_over: list[Checkpoint] = []
    for candidate in candidates:
        checkpoint = _read_whole(candidate)
        if checkpoint.problem is None and checkpoint.manifest is not None:
            require_same_run(checkpoint.manifest.recipe, recipe, str(checkpoint.folder))
            if resume != "auto":
                ranks.on_first_rank(lambda step=checkpoint.step: _require_no_later(run, step))  # type: ignore[misc]
            return Resumption((checkpoint.folder, checkpoint.manifest), tuple(passed_over))
        passed_over.append(checkpoint)
    # What was not finished never counted: of such a run nothing is lost that had been saved.
    lost = [checkpoint for checkpoint in passed_over if not checkpoint.unfinished]
    if lost or (passed_over and resume != "auto"):
        raise BadInputError(_nothing_is_good(resume if resume != "auto" else str(run), lost or passed_over))
    return Resumption(None, tuple(passed_over))


def set_aside(passed_over: tuple[Checkpoint, ...], run: Path) -> list[str]:
    """Renames what is passed over in `run`, so that nothing takes it for a checkpoint; what was done, for people.

    What lies in another run's folder stays as it is.
    """
    return [_set_aside(checkpoint, checkpoint.folder.is_relative_to(run)) for checkpoint in passed_over]


def _set_aside(checkpoint: Checkpoint, is_own: bool) -> str:
    folder = checkpoint.folder
    if not is_own:
        return f"passed over {folder}: {checkpoint.problem}"
    number, place = 1, folder.with_name(folder.name + SET_ASIDE)
    while place.exists():
        number, place = number + 1, folder.with_name(f"{folder.name}{SET_ASIDE}-{number + 1}")
    try:
        folder.rename(place)
    except OSError as error:
        return f"passed over {folder.name}: {checkpoint.problem}; it could not be renamed ({error.strerror})"
    return f"passed over {folder.name}: {checkpoint.problem}; it is now {place.name}"


def _candidates(run: Path, resume: str) -> list[Checkpoint]:
    """The checkpoints to try, in turn."""
    if resume == "auto":
        return list_checkpoints(run)[::-1]
    path = Path(resume).expanduser().resolve()
    if STEP_FOLDER.fullmatch(path.name) is not None:
        read_checkpoint(path)  # the one that was asked for, or none
        return [look_at(path)]
    if (path / FOLDER).is_dir():
        found = list_checkpoints(path)[::-1]
        if found:
            return found
        raise BadInputError(f"checkpoint.resume: {str(path)!r} has no whole checkpoint (it has none)")
    raise BadInputError(
        f"checkpoint.resume: {str(path)!r} is neither a checkpoint (step_00000100) nor a run's folder; "
        "allowed: auto, never, or such a folder"
    )


def _read_whole(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint, with a problem where a file is not what was written. Each rank reads its share. Collective."""
    manifest = checkpoint.manifest
    if manifest is None or checkpoint.problem is not None:
        return checkpoint
    mine = sorted(manifest.files)[ranks.rank() :: ranks.world_size()]
    problems = ranks.on_every_rank(lambda: check_files(checkpoint.folder, manifest, mine), "read a checkpoint")
    return replace(checkpoint, problem=next((problem for problem in problems if problem is not None), None))


def _require_no_later(run: Path, step: int) -> None:
    """Later checkpoints would be of weights that the new run never has, and be taken for its last."""
    later = [c.folder.name for c in list_checkpoints(run) if c.problem is None and c.step > step]
    if later:
        raise BadInputError(
            f"checkpoint.resume: step {step} is to be resumed into {str(run)!r}, which has later checkpoints "
            f"({', '.join(later)}); choose another training.output_dir, or move them elsewhere"
        )


def _nothing_is_good(place: str, found: list[Checkpoint]) -> str:
    listed = "\n".join(f"  - {checkpoint.folder.name}: {checkpoint.problem}" for checkpoint in found)
    return (
        f"checkpoint.resume: no checkpoint of {place!r} is good:\n{listed}\n"
        "start anew with another training.output_dir, or name a copy of a good checkpoint by checkpoint.resume"
    )
