"""Copies checkpoints to a store while training goes on. Each rank copies its own files; the marker is written last.

    OUTPUT_DIR/.outgoing/rank_00001/step_00000100/    this rank's files and the manifest, until they are in the store
    s3://bucket/runs/first/checkpoints/step_00000100/ as a local checkpoint
    s3://bucket/runs/first/model/                     configuration and tokenizer, for `toolkit export`

At most one checkpoint waits while another is copied; a newer one takes its place. If files are left when a run ends,
the next start copies them before it looks for a checkpoint to resume from.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from toolkit import ranks
from toolkit.checkpoint.consolidate import MODEL_FILES
from toolkit.checkpoint.manifest import (
    COMPLETE,
    MANIFEST,
    PASSED_OVER,
    UNFINISHED,
    Manifest,
    file_entry,
    latest,
    list_checkpoints,
    step_folder,
)
from toolkit.checkpoint.rotation import superseded
from toolkit.checkpoint.store import StorePath
from toolkit.errors import ToolkitError, counted, first_line, in_words, without_secrets
from toolkit.paths import CHECKPOINTS
from toolkit.recipe.schema import CheckpointSection
from toolkit.training.durable_writes import RETRY_SECONDS, TELL_SECONDS

T = TypeVar("T")

OUTGOING = ".outgoing"
LONGEST_PAUSE = 60.0
"""The longest pause between two attempts (seconds). The first is `RETRY_SECONDS`, and each is twice the one before."""


def outgoing(run: Path, rank: int) -> Path:
    """Returns the folder for a rank's files that are not in the store yet. It may be on a disk of its host only."""
    return run / OUTGOING / f"rank_{rank:05d}"


@dataclass
class Parcel:
    """The files of one checkpoint that this rank copies.

    Attributes:
        manifest: the manifest of the checkpoint.
        folders: the local folders, which are deleted once the checkpoint is in the store.
        files: the local files by name.
        sent: the names of the files that are in the store.
    """

    manifest: Manifest
    folders: list[Path]
    files: dict[str, Path]
    sent: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, manifest: Manifest, folders: list[Path]) -> Parcel:
        """Returns the parcel of the files in these folders that the manifest names."""
        files = {path.name: path for folder in folders for path in folder.iterdir() if path.name in manifest.files}
        return cls(manifest, folders, files)

    @property
    def sent_bytes(self) -> tuple[int, int]:
        """Returns the bytes of this rank's files that are in the store, and of all its files."""
        sizes = {name: self.manifest.files[name].bytes for name in self.files}
        return sum(sizes[name] for name in list(self.sent)), sum(sizes.values())

    def discard(self) -> None:
        """Deletes the local folders."""
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)


class Sender:
    """Copies one checkpoint after another. Collective, over a group other than that of training.

    Args:
        run: the output folder. That of rank 0 holds the model's configuration.
        store: the store.
        settings: decide which older checkpoints are deleted.
        group: a gloo group of all ranks, or None.
    """

    def __init__(
        self, run: Path, store: StorePath, settings: CheckpointSection, group: dist.ProcessGroup | None
    ) -> None:
        self._run = run
        self._store = store
        self._settings = settings
        self._group = group
        self._has_model = False

    def attempt(self, parcel: Parcel) -> str | None:
        """Copies missing files. Returns on every rank why the checkpoint is not in the store, or None if it is."""
        for action in (self._remove_marker, self._copy_files, self._write_marker):
            problems = ranks.gather_objects(_problem_of(action, parcel), self._group)
            found = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem is not None]
            if found:
                return found[0] + (f" (and {counted(len(found) - 1, 'more rank')})" if len(found) > 1 else "")
        parcel.discard()
        return None

    def _remove_marker(self, parcel: Parcel) -> None:
        """Removes the marker of an earlier attempt at this step before any file changes."""
        if ranks.rank() == 0 and not parcel.sent:
            for name in (COMPLETE, PASSED_OVER):
                (step_folder(self._store, parcel.manifest.step) / name).unlink()

    def _copy_files(self, parcel: Parcel) -> None:
        folder = step_folder(self._store, parcel.manifest.step)
        for name, path in sorted(parcel.files.items()):
            if name not in parcel.sent:
                _require_unchanged(path, parcel.manifest)
                (folder / name).put(path, parcel.manifest.files[name].sha256)
                parcel.sent.add(name)

    def _write_marker(self, parcel: Parcel) -> None:
        """Checks that exactly the files of all ranks are in the store, and writes the marker. Rank 0 only."""
        if ranks.rank() != 0:
            return
        manifest, folder = parcel.manifest, step_folder(self._store, parcel.manifest.step)
        there = {path.name: path for path in folder.iterdir()}
        for name, entry in manifest.files.items():
            if name not in there or there[name].stat().st_size != entry.bytes:
                raise ToolkitError(f"{folder} lacks {name}, which another rank has copied; all must see one store")
        for name in there.keys() - manifest.files.keys() - {MANIFEST, COMPLETE}:
            there[name].unlink()  # from an earlier attempt with other ranks
        self._copy_model()
        text = manifest.to_json().encode()
        (folder / MANIFEST).write_bytes(text)
        (folder / COMPLETE).write_bytes(hashlib.sha256(text).hexdigest().encode())
        # Only now: until the marker is there, only the older checkpoints count.
        for old in superseded(list_checkpoints(self._store), self._settings):
            remove(self._store / CHECKPOINTS / old.folder.name)

    def _copy_model(self) -> None:
        """Copies the configuration and tokenizer, which turn a checkpoint into a model. Once per run."""
        if not self._has_model:
            for path in sorted(path for path in (self._run / MODEL_FILES).rglob("*") if path.is_file()):
                name = path.relative_to(self._run / MODEL_FILES).as_posix()
                (self._store / MODEL_FILES / name).put(path, file_entry(path).sha256)
            self._has_model = True


def _require_unchanged(path: Path, manifest: Manifest) -> None:
    """Raises ToolkitError if a file has changed since it was written. The store's checksum would not show that."""
    if file_entry(path) != manifest.files[path.name]:
        raise ToolkitError(f"{path} is not what was written: its checksum differs")


def _problem_of(action: Callable[[Parcel], None], parcel: Parcel) -> str | None:
    try:
        action(parcel)
    except ToolkitError as error:
        return without_secrets(first_line(error))
    # Any other error costs an attempt, not the run.
    except Exception as error:
        return without_secrets(in_words(error))
    return None


def remove(folder: StorePath) -> None:
    """Deletes a checkpoint, the marker first. A half-deleted one does not count, and is deleted later."""
    (folder / COMPLETE).unlink()
    folder.remove_tree()


def clear_unfinished(store: StorePath) -> None:
    """Deletes what interrupted copies and deletions have left. One process calls it, before any copy."""
    for checkpoint in list_checkpoints(store):
        if checkpoint.unfinished:
            (store / CHECKPOINTS / checkpoint.folder.name).remove_tree()


class Uploads:
    """Copies checkpoints in a separate thread while there are any.

    All ranks copy the same checkpoint at the same time, and rank 0 decides which. Training never waits for a copy, only
    the end of the run does.

    Args:
        run: the output folder.
        store: the store.
        settings: decide which older checkpoints are deleted.
        warn: called once a minute while the store fails.

    Attributes:
        missing: why the last checkpoint is not in the store, or None.
        seconds: how long the longest copy took, or None before the first.
    """

    def __init__(self, run: Path, store: StorePath, settings: CheckpointSection, warn: Callable[[str], None]) -> None:
        self._run = run
        self._store = store
        self._warn = warn
        self._group = dist.new_group(backend="gloo", timeout=ranks.PATIENCE) if ranks.world_size() > 1 else None
        self._sender = Sender(run, store, settings, self._group)
        self._changed = threading.Condition()
        self._parcels: dict[int, Parcel] = {}
        self._waiting: int | None = None  # on rank 0, which decides
        self._is_busy = False  # on rank 0
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._give_up_at = 0.0
        self._told = -TELL_SECONDS
        self.missing: str | None = None
        self.seconds: float | None = None

    def folder(self, step: int) -> Path:
        """Returns the folder for this rank's files of a step until they are in the store."""
        return outgoing(self._run, ranks.rank()) / f"step_{step:08d}"

    def offer(self, manifest: Manifest) -> tuple[bool, int | None]:
        """Hands over a checkpoint that is in `folder`. Returns the arguments of `begin`; rank 0's are for all ranks."""
        with self._changed:
            self._parcels[manifest.step] = Parcel.of(manifest, [self.folder(manifest.step)])
            self._changed.notify_all()
            idle, displaced = not self._is_busy, self._waiting
            self._is_busy, self._waiting = True, manifest.step
            return idle, displaced

    def begin(self, idle: bool, displaced: int | None) -> None:
        """Starts the thread, or drops an older checkpoint that still waited.

        Args:
            idle: whether nothing is being copied.
            displaced: the step of the older checkpoint that waited, or None.
        """
        if displaced is not None:
            self._drop(displaced, "copying is slower than saving")
        if idle:
            if self._thread is not None:
                self._thread.join()  # it has nothing left to do
            self._thread = threading.Thread(target=ranks.on_this_device(self._run_all), name="upload", daemon=True)
            self._thread.start()

    def finish(self, seconds: float, tell: Callable[[str], None]) -> str | None:
        """Waits for the copies. Returns why the last checkpoint is not in the store, or None if it is.

        All ranks call this. A running copy may take as long as it needs.

        Args:
            seconds: how long to retry if the store fails.
            tell: called about every second with what the wait is for.
        """
        self._give_up_at = time.monotonic() + seconds
        self._closing.set()
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(1.0)
            tell(self._progress())
        self._closing.clear()
        for folder in (outgoing(self._run, ranks.rank()), self._run / OUTGOING):
            with contextlib.suppress(OSError):  # files that are not in the store yet stay
                folder.rmdir()
        return self.missing

    def abandon(self, seconds: float) -> None:
        """Waits for the copies, but not for long: this rank ends alone. Files that are not copied stay here."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _progress(self) -> str:
        for step, parcel in sorted(self._parcels.items()):
            sent, whole = parcel.sent_bytes
            figures = f"{sent / 2**20:,.0f} of {whole / 2**20:,.0f} MiB of rank {ranks.rank()}"
            return f"copying the checkpoint of step {step} to {self._store}: {figures}"
        return f"copying to {self._store}"

    def _run_all(self) -> None:
        try:
            while (step := self._from_first_rank(self._next_step)) is not None:
                self._copy_with_retries(self._parcel_of(step))
        except Exception as error:
            # The run cannot go on without the lost rank, whose own error is the one to read.
            self.missing = f"the copy to {self._store} was cut off: {in_words(error)}"

    def _from_first_rank(self, action: Callable[[], T]) -> T:
        """Runs `action` on rank 0 and returns its result on every rank."""
        return ranks.gather_objects(action() if ranks.rank() == 0 else None, self._group)[0]  # type: ignore[return-value]

    def _next_step(self) -> int | None:
        """Returns the step of the checkpoint to copy, or None if there is none and the thread ends. Rank 0 only."""
        with self._changed:
            step, self._waiting = self._waiting, None
            self._is_busy = step is not None
            return step

    def _parcel_of(self, step: int) -> Parcel:
        with self._changed:
            # Rank 0 may choose a checkpoint that another rank is just about to hand over.
            self._changed.wait_for(lambda: step in self._parcels)
            return self._parcels[step]

    def _copy_with_retries(self, parcel: Parcel) -> None:
        """Retries until the checkpoint is in the store, a newer one waits, or the run's end has waited long enough."""
        step, pause, started = parcel.manifest.step, RETRY_SECONDS, time.monotonic()
        while (problem := self._sender.attempt(parcel)) is not None:
            decision = self._from_first_rank(self._decide)
            self.missing = f"the checkpoint of step {step} is not in {self._store}: {problem}"
            if decision == "skip":
                self._drop(step, problem)
                return
            if decision == "give up":
                self._parcels.pop(step)
                return
            self._warn_sometimes(f"{self.missing}; the run goes on, and it is tried again")
            self._wait_to_retry(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)
        if self.missing is not None and self._told > 0:
            self._warn(f"the checkpoint of step {step} is in {self._store} now")
            self._told = -TELL_SECONDS
        self.missing = None
        self.seconds = max(self.seconds or 0.0, time.monotonic() - started)
        self._parcels.pop(step)

    def _decide(self) -> str:
        """Decides what to do after a failed attempt: `skip`, `give up` or `again`. Rank 0 only."""
        if self._waiting is not None:
            return "skip"
        return "give up" if self._closing.is_set() and time.monotonic() > self._give_up_at else "again"

    def _wait_to_retry(self, seconds: float) -> None:
        """Waits until the next attempt, for less time once the end of the run waits for it."""
        if self._closing.is_set():
            time.sleep(min(seconds, RETRY_SECONDS))
        else:
            self._closing.wait(seconds)

    def _drop(self, step: int, why: str) -> None:
        self._warn_sometimes(
            f"the checkpoint of step {step} is not copied to {self._store}, as a newer one is there: {why}"
        )
        self._parcels.pop(step).discard()

    def _warn_sometimes(self, text: str) -> None:
        if time.monotonic() - self._told >= TELL_SECONDS:
            self._told = time.monotonic()
            self._warn(text)


def finish_interrupted(run: Path, store: StorePath, settings: CheckpointSection, tell: Callable[[str], None]) -> None:
    """Copies the newest checkpoint of which the ranks still have every file, if it is newer than the store's last.

    Deletes local files that are not newer than the store's last checkpoint. Collective.

    Args:
        run: the output folder.
        store: the store.
        settings: decide which older checkpoints are deleted.
        tell: called with a line if a checkpoint is copied.

    Raises:
        ToolkitError: on every rank, if the store fails.
    """
    last = ranks.on_first_rank(lambda: latest(store))
    saved_step = -1 if last is None else last.step
    parcels = {step: parcel for step, parcel in _leftover_parcels(run).items() if step > saved_step}
    there = ranks.gather_objects({step: (p.manifest.to_json(), set(p.files)) for step, p in parcels.items()})
    for step in sorted(set().union(*there), reverse=True):
        found = [of_rank[step] for of_rank in there if step in of_rank]
        text, names = found[0][0], set().union(*(names for _, names in found))
        manifest = Manifest.from_json(text)
        if {other for other, _ in found} == {text} and names == manifest.files.keys():
            tell(f"the checkpoint of step {step} was saved and is not in {store} yet: it is copied first")
            problem = Sender(run, store, settings, None).attempt(parcels.get(step, Parcel(manifest, [], {})))
            if problem is not None:
                raise ToolkitError(f"checkpoint.to: the checkpoint of step {step} cannot be copied: {problem}")
            saved_step = step
            break
    for folder in _folders_of_this_rank(run, "step_*"):
        if int(folder.name.removeprefix("step_")) <= saved_step:
            shutil.rmtree(folder, ignore_errors=True)
    for folder in _folders_of_this_rank(run, f".step_*{UNFINISHED}"):
        shutil.rmtree(folder, ignore_errors=True)


def _folders_of_this_rank(run: Path, names: str) -> list[Path]:
    """Returns the matching folders that this rank handles: its own and, after a run on more ranks, those of others."""
    every = sorted((run / OUTGOING).glob("rank_*"))
    mine = [f for f in every if f.name[5:].isdigit() and int(f.name[5:]) % ranks.world_size() == ranks.rank()]
    return [path for folder in mine for path in sorted(folder.glob(names))]


def _leftover_parcels(run: Path) -> dict[int, Parcel]:
    """Returns this rank's files of each step. Leaves out what cannot be read."""
    folders: dict[int, list[Path]] = {}
    for folder in _folders_of_this_rank(run, "step_*"):
        folders.setdefault(int(folder.name.removeprefix("step_")), []).append(folder)
    parcels = {}
    for step, those in folders.items():
        with contextlib.suppress(OSError, ValueError, ToolkitError):
            parcel = Parcel.of(Manifest.from_json((those[0] / MANIFEST).read_bytes()), those)
            for path in parcel.files.values():
                _require_unchanged(path, parcel.manifest)
            parcels[step] = parcel
    return parcels
