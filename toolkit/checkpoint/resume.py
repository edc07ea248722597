"""Which checkpoint a run goes on from: the newest good one. What is newer and no good is named, and set aside."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolkit import ranks
from toolkit.checkpoint.fetch import fetch, incoming
from toolkit.checkpoint.manifest import (
    COMPLETE,
    FOLDER,
    PASSED_OVER,
    SET_ASIDE,
    STEP_FOLDER,
    Checkpoint,
    Manifest,
    Place,
    check_files,
    list_checkpoints,
    look_at,
    place_of,
    read_checkpoint,
)
from toolkit.checkpoint.reader import require_same_run
from toolkit.checkpoint.store import StorePath
from toolkit.errors import BadInputError


@dataclass(frozen=True)
class Resumption:
    """Where a run goes on from.

    Attributes:
        start: the folder and manifest of a checkpoint, every file of which is what was written; None: the beginning.
            Of one in a store, a copy.
        passed_over: newer checkpoints that are no good, the newest first; `problem` says why.
        origin: where the checkpoint lies.
        is_own: whether that is the run's own output folder or store.
    """

    start: tuple[Path, Manifest] | None
    passed_over: tuple[Checkpoint, ...] = ()
    origin: str = ""
    is_own: bool = False


def find(
    run: Path, resume: str, recipe: dict[str, Any], store: StorePath | None = None, copies: bool = True
) -> Resumption:
    """The checkpoint to go on from, every file of it read. Collective.

    Changes nothing, but that what lies in a store is copied into a hidden folder of `run`.

    Args:
        run: the output folder.
        resume: `auto`: the newest good checkpoint of the output folder and the store, if any; `never`; or a
            checkpoint's or a run's folder.
        recipe: resolved, of this run.
        store: where this run keeps its checkpoints, if not in the output folder.
        copies: False: nothing is copied, and of what lies in a store only sizes and the manifest are looked at.

    Raises:
        BadInputError: a path without a good checkpoint, a recipe that differs in what matters, an earlier
            checkpoint than the output folder's last, or an output folder of which no checkpoint is good.
        StoreError: a store that cannot be read.
    """
    if resume == "never":
        ranks.on_first_rank(lambda: _require_no_later(run, -1, store) if store is not None else None)
        return Resumption(None)
    candidates = ranks.on_first_rank(lambda: _candidates(run, resume, store))
    passed_over: list[Checkpoint] = []
    for candidate in candidates:
        manifest = candidate.manifest
        if candidate.problem is None and manifest is not None:
            # Before anything of it is read, which may be copied from far away.
            require_same_run(manifest.recipe, recipe, str(candidate.folder))
            folder, problem = _read_whole(run, candidate.folder, manifest, copies)
            if problem is None:
                if resume != "auto":
                    ranks.on_first_rank(lambda step=candidate.step: _require_no_later(run, step, store))  # type: ignore[misc]
                is_own = _is_own(candidate.folder, run, store)
                return Resumption((folder, manifest), tuple(passed_over), str(candidate.folder), is_own)
            candidate = replace(candidate, problem=problem)
        passed_over.append(candidate)
    # What was not finished never counted: of such a run nothing is lost that had been saved.
    lost = [checkpoint for checkpoint in passed_over if not checkpoint.unfinished]
    if lost or (passed_over and resume != "auto"):
        raise BadInputError(_nothing_is_good(resume if resume != "auto" else str(run), lost or passed_over))
    return Resumption(None, tuple(passed_over))


def _is_own(folder: Place, run: Path, store: StorePath | None) -> bool:
    if isinstance(folder, StorePath):
        return store is not None and folder.is_relative_to(store)
    return folder.is_relative_to(run)


def set_aside(passed_over: tuple[Checkpoint, ...], run: Path, store: StorePath | None = None) -> list[str]:
    """Renames what is passed over in `run`, so that nothing takes it for a checkpoint; what was done, for people.

    In `store` it gets another mark. What lies in another run's folder stays as it is.
    """
    return [_set_aside(checkpoint, _is_own(checkpoint.folder, run, store)) for checkpoint in passed_over]


def _set_aside(checkpoint: Checkpoint, is_own: bool) -> str:
    folder = checkpoint.folder
    if not is_own:
        return f"passed over {folder}: {checkpoint.problem}"
    if isinstance(folder, StorePath):
        # Renaming would copy all of it.
        (folder / PASSED_OVER).write_bytes(str(checkpoint.problem).encode())
        (folder / COMPLETE).unlink()
        return f"passed over {folder}: {checkpoint.problem}; it does not count any more, as {PASSED_OVER} in it says"
    number, place = 1, folder.with_name(folder.name + SET_ASIDE)
    while place.exists():
        number, place = number + 1, folder.with_name(f"{folder.name}{SET_ASIDE}-{number + 1}")
    try:
        folder.rename(place)
    except OSError as error:
        return f"passed over {folder.name}: {checkpoint.problem}; it could not be renamed ({error.strerror})"
    return f"passed over {folder.name}: {checkpoint.problem}; it is now {place.name}"


def _candidates(run: Path, resume: str, store: StorePath | None) -> list[Checkpoint]:
    """The checkpoints to try, in turn. Of two of a step the local one, which may be of a time before the store."""
    if resume == "auto":
        # An interrupted copy is nothing to pass over: it is cleared away later.
        stored = [c for c in list_checkpoints(store) if not c.unfinished] if store is not None else []
        return sorted([*stored, *list_checkpoints(run)], key=lambda checkpoint: checkpoint.step)[::-1]
    path = place_of(resume)
    if isinstance(path, Path):
        path = path.expanduser().resolve()
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


def _read_whole(run: Path, folder: Place, manifest: Manifest, copies: bool) -> tuple[Path, str | None]:
    """Where it lies, or was copied to, and the first file that is not what was written. Collective.

    Each rank reads its share.
    """
    if isinstance(folder, StorePath):
        here = incoming(run, manifest)
        if not copies:
            return here, None
        problems = ranks.on_every_rank(lambda: fetch(folder, manifest, here), "copy a checkpoint from the store")
    else:
        here, mine = folder, sorted(manifest.files)[ranks.rank() :: ranks.world_size()]
        problems = ranks.on_every_rank(lambda: check_files(here, manifest, mine), "read a checkpoint")
    return here, next((problem for problem in problems if problem is not None), None)


def _require_no_later(run: Path, step: int, store: StorePath | None) -> None:
    """Later checkpoints would be of weights that the new run never has, and be taken for its last."""
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


def _nothing_is_good(place: str, found: list[Checkpoint]) -> str:
    listed = "\n".join(f"  - {checkpoint.folder.name}: {checkpoint.problem}" for checkpoint in found)
    return (
        f"checkpoint.resume: no checkpoint of {place!r} is good:\n{listed}\n"
        "start anew with another training.output_dir, or name a copy of a good checkpoint by checkpoint.resume"
    )
