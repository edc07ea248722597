"""The output folder: which run may write there, and what a run writes before it trains."""

from __future__ import annotations

import json
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from toolkit import ranks
from toolkit.checkpoint.beside_weights.model_files import write_model_files
from toolkit.checkpoint.consolidate import BASE_DIGESTS, STORED_NAMES
from toolkit.checkpoint.manifest import MODEL_FILES, latest
from toolkit.checkpoint.resume import Resumption, set_aside
from toolkit.checkpoint.state import same_run
from toolkit.data.images.images import limits_of
from toolkit.data.layouts.template_arguments import date_of
from toolkit.data.report import DataReport
from toolkit.errors import BadInputError
from toolkit.model.adapters.adapters import base_of
from toolkit.pages.data_page import DATA_PAGE, DATA_REPORT, write_data_page
from toolkit.pages.parts.story import RUN_JSON
from toolkit.paths import CHECKPOINTS, appears, atomic_write, clear_interrupted_writes, is_store
from toolkit.recipe.recipe import Recipe
from toolkit.run.folder import finished
from toolkit.run.folder.finished import FINISHED
from toolkit.run.stages.stages import PreparedRun
from toolkit.supervise.lock import LOCK
from toolkit.supervise.output_place import unwritable
from toolkit.supervise.rank_status import FOLDER as HEARTBEAT_FOLDER
from toolkit.supervise.rank_status import REPORT
from toolkit.training.durable_writes import FULL
from toolkit.training.profile import FOLDER as PROFILE_FOLDER

RUN_FILES = (
    "recipe.yaml",
    "metrics.jsonl",
    RUN_JSON,
    DATA_REPORT,
    DATA_PAGE,
    MODEL_FILES,
    REPORT,
    FINISHED,
    PROFILE_FOLDER,
    "samples.json",
    "export",
    CHECKPOINTS,
)
"""Names of what a run leaves in its output folder."""


LISTING_SECONDS = 10.0
"""Longest time for a file of another host to appear, because network file systems cache listings."""


@contextmanager
def claimed(output_dir: Path, recipe: Recipe, found: Resumption) -> Iterator[list[str]]:
    """Writes the resolved recipe into the output folder, and removes it if the block fails.

    Checkpoints that the run passes over are set aside; the yielded lines say which and why. The recipe stays next to
    files that an earlier run of it left, so that the next start recognises that run.

    Raises:
        BadInputError: if the folder already holds a run that this one does not resume.
    """
    goes_on = found.is_own and ranks.on_first_rank(lambda: _may_write_to(output_dir, recipe, found))
    is_ours = False
    try:
        _require_one_folder(output_dir)
        ranks.on_first_rank(lambda: _claim(output_dir, recipe, goes_on))
        # From here on the recipe in the folder is this run's, and is removed if it fails.
        is_ours = True
        yield ranks.on_first_rank(lambda: set_aside(found.passed_over, output_dir))
    except BaseException:
        # No collective here: this rank may be the only one that failed.
        if ranks.rank() == 0 and not goes_on:
            if is_ours and _run_files(output_dir) == ["recipe.yaml"]:
                (output_dir / "recipe.yaml").unlink(missing_ok=True)
            shutil.rmtree(output_dir / HEARTBEAT_FOLDER, ignore_errors=True)
        raise


def _may_write_to(output_dir: Path, recipe: Recipe, found: Resumption) -> bool:
    """Returns whether a resumed run may write to the folder; with a store it may be that of another run."""
    saved = output_dir / "recipe.yaml"
    return not is_store(found.origin) or not saved.exists() or same_run(saved, recipe.model_dump(mode="json"))


def _claim(output_dir: Path, recipe: Recipe, goes_on: bool) -> None:
    if require_unfinished(output_dir, recipe, goes_on):
        # A run that was killed before its first checkpoint left these; the new one starts from the beginning.
        for name in ("metrics.jsonl", RUN_JSON, DATA_REPORT, DATA_PAGE, "samples.json", REPORT, FINISHED):
            (output_dir / name).unlink(missing_ok=True)
        shutil.rmtree(output_dir / PROFILE_FOLDER, ignore_errors=True)
    clear_interrupted_writes(output_dir)
    try:
        # Whole or not at all, so that a run that is killed at this moment is recognised by its recipe.
        atomic_write(output_dir / "recipe.yaml", recipe.to_yaml())
    except OSError as error:
        raise unwritable(output_dir, error) from error


def _require_one_folder(output_dir: Path) -> None:
    """Raises BadInputError if ranks see different folders under this name, as on hosts with disks of their own.

    Every rank writes its shards of a checkpoint there: on two disks no checkpoint would ever be whole.
    """
    if ranks.world_size() == 1:
        return
    # Its text is this run's: a folder on another disk can hold the lock of another one.
    lock = output_dir / LOCK
    text = ranks.on_first_rank(lambda: lock.read_text(encoding="utf-8"))
    seen = ranks.gather_objects((platform.node(), appears(lock, text, LISTING_SECONDS)))
    blind = [f"rank {rank} on {host}" for rank, (host, found) in enumerate(seen) if not found]
    if blind:
        raise BadInputError(
            f"training.output_dir: {str(output_dir)!r} is not the same folder on every rank: {', '.join(blind)} "
            f"cannot see what rank 0 on {seen[0][0]} writes; name a folder on a file system that all hosts share"
        )


def _run_files(output_dir: Path) -> list[str]:
    """Returns the names of what a run left in the folder."""
    place = output_dir / CHECKPOINTS
    # An empty folder may be a link to a larger disk, made for this run.
    is_empty = place.is_dir() and not any(place.iterdir())
    return [name for name in RUN_FILES if (output_dir / name).exists() and not (is_empty and name == CHECKPOINTS)]


def require_unfinished(output_dir: Path, recipe: Recipe, goes_on: bool) -> bool:
    """Returns whether the folder holds files of a run of the same recipe that ended before its first checkpoint.

    Raises:
        BadInputError: if it holds another run, or a finished run that is not to be resumed.
    """
    links = [name for name in RUN_FILES if name != CHECKPOINTS and (output_dir / name).is_symlink()]
    if links:
        raise BadInputError(
            f"training.output_dir: {str(output_dir / links[0])!r} is a link, through which no run writes; remove "
            "it, or choose another folder"
        )
    found = _run_files(output_dir)
    is_done = finished.is_finished(output_dir)
    # A finished run is trained further only if the recipe names its checkpoint, not by `auto`.
    if goes_on and (not is_done or recipe.checkpoint.resume != "auto"):
        return False
    # What begins at another place than `auto` finds is the same run only if it begins there again.
    resume = recipe.checkpoint.resume
    again = same_run(output_dir / "recipe.yaml", recipe.model_dump(mode="json"), in_all=resume != "auto")
    if not is_done and again and latest(output_dir) is None:
        return True
    if found:
        is_saved = is_done and latest(output_dir) is not None
        further = f", train it further with checkpoint.resume={output_dir}" if is_saved else ""
        raise BadInputError(
            f"training.output_dir: {str(output_dir)!r} already holds a {'finished ' if is_done else ''}run "
            f"({', '.join(found)}); choose another folder, for example training.output_dir=outputs/second{further}, or "
            "delete this one"
        )
    return False


def require_writable(output_dir: Path) -> None:
    """Checks that the folder can be made and written; leaves nothing behind.

    Raises:
        BadInputError: if it cannot.
    """
    nearest = next(folder for folder in (output_dir, *output_dir.parents) if folder.exists())
    try:
        # Tried, because access rights are not enough: a file system may be read-only, and root may do anything.
        Path(tempfile.mkdtemp(prefix=".writable-", dir=nearest)).rmdir()
    except OSError as error:
        raise unwritable(output_dir, error) from error


def is_same_and_finished(output_dir: Path, recipe: Recipe) -> bool:
    """Returns whether the folder holds this run, finished, because the same command was started again."""
    if not finished.is_finished(output_dir):
        return False
    try:
        text = (output_dir / "recipe.yaml").read_text(encoding="utf-8")
        saved = Recipe.load(output_dir / "recipe.yaml")
    except (OSError, BadInputError):
        return False
    return (
        text == recipe.changed(data={"template_date": recipe.data.template_date or saved.data.template_date}).to_yaml()
    )


def keep_day(run: PreparedRun) -> None:
    """Adds the day that the chat template writes, if any, to the run's recipe, in its folder too."""
    recipe, opened = run.opened.recipe.changed(data={"template_date": date_of(run.tokenizer)}), run.opened
    if recipe != opened.recipe:
        ranks.on_first_rank(lambda: atomic_write(opened.output_dir / "recipe.yaml", recipe.to_yaml()))
    opened.recipe = recipe


def write_data_report(folder: Path, recipe: Recipe, report: DataReport) -> None:
    """Writes `data_report.json` and the page next to it.

    Raises:
        BadInputError: if the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / DATA_REPORT).write_text(json.dumps(report.to_dict(), indent=1), encoding="utf-8")
        write_data_page(folder / DATA_PAGE, Path(recipe.training.output_dir).name, report.to_dict())
    except OSError as error:
        raise BadInputError(f"{str(folder)!r} cannot be written: {error.strerror}; name another folder") from error


def write_beginning(run: PreparedRun) -> None:
    """Writes what is known before the first step: the data report, and what turns a checkpoint into a model.

    Raises:
        BadInputError: if the disk is full or read-only.
    """
    output_dir, fit, tokens = run.opened.output_dir, run.fit, run.tokenizer
    try:
        (output_dir / FINISHED).unlink(missing_ok=True)  # the run is trained further
        write_data_report(output_dir, run.opened.recipe, run.data.report)
        (output_dir / MODEL_FILES).mkdir(exist_ok=True)
        write_model_files(base_of(run.inner), tokens, output_dir / MODEL_FILES, fit.dtype, fit.files)
        limits_of(tokens).write(output_dir / MODEL_FILES)
        names, dtype = None if fit.stored is None else sorted(fit.stored), str(fit.dtype).removeprefix("torch.")
        stored = {"names": names, "fingerprint": fit.origin, "dtype": dtype}
        (output_dir / MODEL_FILES / STORED_NAMES).write_text(json.dumps(stored), encoding="utf-8")
        (output_dir / MODEL_FILES / BASE_DIGESTS).write_text(json.dumps(fit.files.digests()), encoding="utf-8")
    except OSError as error:
        if error.errno not in FULL:  # it is not about this folder
            raise
        raise unwritable(output_dir, error) from error
