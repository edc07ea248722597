"""Finds the checkpoint from which a run resumes: the newest good one. Names newer damaged ones and sets them aside."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolkit import ranks
from toolkit.checkpoint.manifest import (
    SET_ASIDE,
    Checkpoint,
    Manifest,
    Place,
    check_files,
    file_entry,
    latest,
    list_checkpoints,
    look_at,
    place_of,
    read_checkpoint,
)
from toolkit.checkpoint.state import require_same_run, same_recipe, verify_together
from toolkit.checkpoint.store import StorePath
from toolkit.errors import BadInputError
from toolkit.paths import CHECKPOINTS, STEP_FOLDER


@dataclass(frozen=True)
class Resumption:
    """The checkpoint from which a run resumes.

    Attributes:
        start: the folder and manifest of a verified checkpoint, or of the local copy of one in a store. None starts
            from the beginning.
        passed_over: newer checkpoints that are not good, the newest first. Their `problem` says why.
        origin: the path or URL of the checkpoint.
        is_own: whether it is in the run's own output folder or store.
    """

    start: tuple[Path, Manifest] | None = None
    passed_over: tuple[Checkpoint, ...] = ()
    origin: str = ""
    is_own: bool = False


def find(
    run: Path, resume: str, recipe: dict[str, Any], store: StorePath | None = None, copies: bool = True
) -> Resumption:
    """Finds the checkpoint to resume from, and verifies every file of it. Collective.

    Changes nothing, except that it copies a checkpoint from a store to a hidden folder of `run`.

    Args:
        run: the output folder.
        resume: `auto` for the newest good checkpoint of the output folder and the store, `never`, or the folder of a
            checkpoint or of a run. Once this run has checkpoints of its own, started again it goes on from these.
        recipe: the resolved recipe of this run.
        store: the store of this run's checkpoints, or None if they are in the output folder.
        copies: whether to copy a checkpoint from a store. If not, only its sizes and its manifest are checked.

    Raises:
        BadInputError: if the path has no good checkpoint, the recipe differs in what matters, the output folder or the
            store has later checkpoints, or all checkpoints of the run are damaged.
        StoreError: if the store cannot be read.
    """
    if resume == "never":
        ranks.on_first_rank(lambda: _require_no_later(run, -1, store) if store is not None else None)
        return Resumption(None)
    if resume != "auto" and ranks.on_first_rank(lambda: _has_begun(run, recipe, store)):
        resume = "auto"
    candidates = ranks.on_first_rank(lambda: _candidates(run, resume, store))
    passed_over: list[Checkpoint] = []
    for candidate in candidates:
        manifest = candidate.manifest
        if candidate.problem is None and manifest is not None:
            # Before its files are read, which may mean to copy them from far away.
            require_same_run(manifest.recipe, recipe, str(candidate.folder))
            folder, problem = _verify_files(run, candidate.folder, manifest, copies)
            if problem is None:
                if resume != "auto":
                    ranks.on_first_rank(lambda step=candidate.step: _require_no_later(run, step, store))  # type: ignore[misc]
                is_own = _is_own(candidate.folder, run, store)
                return Resumption((folder, manifest), tuple(passed_over), str(candidate.folder), is_own)
            candidate = replace(candidate, problem=problem)
        passed_over.append(candidate)
    # Unfinished checkpoints never counted: if there are only these, nothing that was saved is lost.
    lost = [checkpoint for checkpoint in passed_over if not checkpoint.unfinished]
    if lost or (passed_over and resume != "auto"):
        raise BadInputError(_no_good_checkpoint(resume if resume != "auto" else str(run), lost or passed_over))
    return Resumption(None, tuple(passed_over))


def _has_begun(run: Path, recipe: dict[str, Any], store: StorePath | None) -> bool:
    """Tells whether the last checkpoint of the output folder or the store is of this very recipe, started before."""
    found = [last.manifest for place in (run, store) if place is not None and (last := latest(place)) is not None]
    return any(manifest is not None and same_recipe(manifest.recipe, recipe) for manifest in found)


def _is_own(folder: Place, run: Path, store: StorePath | None) -> bool:
    if isinstance(folder, StorePath):
        return store is not None and folder.is_relative_to(store)
    return folder.resolve().is_relative_to((run / CHECKPOINTS).resolve())  # it may be a link to a larger disk


def set_aside(passed_over: tuple[Checkpoint, ...], run: Path) -> list[str]:
    """Renames passed-over checkpoints in `run`, so that nothing takes them for checkpoints. Says what it did.

    Those in a store, and in another run's folder, are not changed.
    """
    return [_renamed(checkpoint, _is_own(checkpoint.folder, run, None)) for checkpoint in passed_over]


def _renamed(checkpoint: Checkpoint, is_own: bool) -> str:
    folder = checkpoint.folder
    if not is_own or isinstance(folder, StorePath):
        return f"passed over {folder}: {checkpoint.problem}"
    number, place = 1, folder.with_name(folder.name + SET_ASIDE)
    while place.exists():
        number, place = number + 1, folder.with_name(f"{folder.name}{SET_ASIDE}-{number + 1}")
    try:
        folder.rename(place)
    except OSError as error:
        return f"passed over {folder.name}: {checkpoint.problem}; it could not be renamed ({error.strerror})"
    return f"passed over {folder.name}: {checkpoint.problem}; it is now {place.name}"


def _candidates(run: Path, resume: str, store: StorePath | None) -> list[Checkpoint]:
    """Returns the checkpoints to try, in order. For equal steps the local one comes first: it may predate the store."""
    if resume == "auto":
        # An interrupted copy is not passed over, but deleted later.
        stored = [c for c in list_checkpoints(store) if not c.unfinished] if store is not None else []
        return sorted([*stored, *list_checkpoints(run)], key=lambda checkpoint: checkpoint.step)[::-1]
    path = place_of(resume)
    if isinstance(path, Path):
        path = path.expanduser().resolve()
    if STEP_FOLDER.fullmatch(path.name) is not None:
        read_checkpoint(path)  # this one or none
        return [look_at(path)]
    if (path / CHECKPOINTS).is_dir():
        found = list_checkpoints(path)[::-1]
        if found:
            return found
        raise BadInputError(f"checkpoint.resume: {str(path)!r} has no complete checkpoint (it has none)")
    raise BadInputError(
        f"checkpoint.resume: {str(path)!r} is neither a checkpoint (step_00000100) nor a run's folder; "
        "allowed: auto, never, or such a folder"
    )


def _verify_files(run: Path, folder: Place, manifest: Manifest, copies: bool) -> tuple[Path, str | None]:
    """Verifies a checkpoint's files, and copies them first from a store. Each rank reads its share. Collective.

    Returns:
        The local folder, and the first file that is missing or damaged, in words, or None.
    """
    if isinstance(folder, StorePath):
        here = incoming(run, manifest.step)
        return here, ranks.on_first_rank(lambda: fetch(folder, manifest, here)) if copies else None
    return folder, verify_together(folder, manifest)


def _require_no_later(run: Path, step: int, store: StorePath | None) -> None:
    """Raises BadInputError for later checkpoints. They have other weights, and would be taken for the run's last."""
    for place in (run, store):
        found = list_checkpoints(place) if place is not None else []
        later = [c.folder.name for c in found if c.problem is None and c.step > step]
        if later:
            field = "training.output_dir" if place is run else "checkpoint.to"
            start = f"step {step} is to be resumed" if step >= 0 else "the run is to begin anew"
            raise BadInputError(
                f"checkpoint.resume: {start} into {str(place)!r}, which has later checkpoints "
                f"({', '.join(later)}); choose another {field}, or move them elsewhere"
            )


def _no_good_checkpoint(place: str, found: list[Checkpoint]) -> str:
    listed = "\n".join(f"  - {checkpoint.folder.name}: {checkpoint.problem}" for checkpoint in found)
    return (
        f"checkpoint.resume: no checkpoint of {place!r} is good:\n{listed}\n"
        "start anew with another training.output_dir, or name a copy of a good checkpoint by checkpoint.resume"
    )


# ---- Copies a checkpoint from a store to the output folder, from which it is read like a local one ----

INCOMING = ".incoming"


def incoming(run: Path, step: int) -> Path:
    """Returns the folder for a copy of a checkpoint."""
    return run / INCOMING / f"step_{step:08d}"


def clear_incoming(run: Path) -> None:
    """Deletes the copies. Collective."""
    ranks.on_first_rank(lambda: shutil.rmtree(run / INCOMING, ignore_errors=True))


def fetch(source: StorePath, manifest: Manifest, to: Path) -> str | None:
    """Copies a checkpoint's files, and compares their sums. What an interrupted copy has left is not copied again.

    Returns:
        The first file that is missing or damaged, in words, or None if all are good.
    """
    to.mkdir(parents=True, exist_ok=True)
    for name, entry in sorted(manifest.files.items()):
        if (to / name).exists() and file_entry(to / name) == entry:
            continue
        part = to / f".{name}"  # no reader takes it for the file
        try:
            (source / name).get(part)
        except FileNotFoundError:
            return f"{name} is missing"
        os.replace(part, to / name)
        if (problem := check_files(to, manifest, [name])) is not None:
            return problem
    return None
