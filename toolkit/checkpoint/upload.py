"""Copies checkpoints to a store, beside training: each rank its own files, the mark last.

    OUTPUT_DIR/.outgoing/rank_00001/step_00000100/    this rank's files and the manifest, until they are in the store
    s3://bucket/runs/first/checkpoints/step_00000100/ as a local checkpoint
    s3://bucket/runs/first/model/                     configuration and tokenizer, for `toolkit export`

At most one checkpoint waits while another is copied: a newer one takes its place. What is still here when a run ends is
copied by the next start, before it looks for a checkpoint to go on from.
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
    FOLDER,
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
from toolkit.recipe.schema import CheckpointSection
from toolkit.training.durable_writes import RETRY_SECONDS, TELL_SECONDS

T = TypeVar("T")

OUTGOING = ".outgoing"
LONGEST_PAUSE = 60.0
"""Seconds between two attempts; the first are `RETRY_SECONDS` apart, and each pause is twice the one before."""


def outgoing(run: Path, rank: int) -> Path:
    """Where a rank keeps what is not in the store yet, on a disk that may be its host's own."""
    return run / OUTGOING / f"rank_{rank:05d}"


@dataclass
class Parcel:
    """What this rank copies of one checkpoint.

    Attributes:
        folders: what is deleted when the checkpoint is in the store.
        files: name -> file.
        sent: names of those that are in the store.
    """

    manifest: Manifest
    folders: list[Path]
    files: dict[str, Path]
    sent: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, manifest: Manifest, folders: list[Path]) -> Parcel:
        files = {path.name: path for folder in folders for path in folder.iterdir() if path.name in manifest.files}
        return cls(manifest, folders, files)

    @property
    def sent_bytes(self) -> tuple[int, int]:
        """Of this rank's files: what is in the store, and all."""
        sizes = {name: self.manifest.files[name].bytes for name in self.files}
        return sum(sizes[name] for name in list(self.sent)), sum(sizes.values())

    def discard(self) -> None:
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)


class Sender:
    """Copies one checkpoint after another. Collective, and none of it is for the training's own group.

    Args:
        run: the output folder; rank 0's holds the model's configuration.
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
        """Copies what is not there yet; why the checkpoint is not in the store, on every rank. None: it is."""
        for action in (self._unmark, self._send, self._mark):
            problems = ranks.gather_objects(_problem_of(action, parcel), self._group)
            found = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem is not None]
            if found:
                return found[0] + (f" (and {counted(len(found) - 1, 'more rank')})" if len(found) > 1 else "")
        parcel.discard()
        return None

    def _unmark(self, parcel: Parcel) -> None:
        """Before a file changes: what an earlier attempt at this step has left does not count any more."""
        if ranks.rank() == 0 and not parcel.sent:
            for name in (COMPLETE, PASSED_OVER):
                (step_folder(self._store, parcel.manifest.step) / name).unlink()

    def _send(self, parcel: Parcel) -> None:
        folder = step_folder(self._store, parcel.manifest.step)
        for name, path in sorted(parcel.files.items()):
            if name not in parcel.sent:
                _require_whole(path, parcel.manifest)
                (folder / name).put(path, parcel.manifest.files[name].sha256)
                parcel.sent.add(name)

    def _mark(self, parcel: Parcel) -> None:
        """Rank 0: sees to it that every rank's files are there, and that nothing else is, and marks the checkpoint."""
        if ranks.rank() != 0:
            return
        manifest, folder = parcel.manifest, step_folder(self._store, parcel.manifest.step)
        there = {path.name: path for path in folder.iterdir()}
        for name, entry in manifest.files.items():
            if name not in there or there[name].stat().st_size != entry.bytes:
                raise ToolkitError(f"{folder} lacks {name}, which another rank has copied; all must see one store")
        for name in there.keys() - manifest.files.keys() - {MANIFEST, COMPLETE}:
            there[name].unlink()  # of an earlier attempt by other ranks
        self._copy_model()
        text = manifest.to_json().encode()
        (folder / MANIFEST).write_bytes(text)
        (folder / COMPLETE).write_bytes(hashlib.sha256(text).hexdigest().encode())
        # Only now: until the mark is there, the older ones are all that counts.
        for old in superseded(list_checkpoints(self._store), self._settings):
            remove(self._store / FOLDER / old.folder.name)

    def _copy_model(self) -> None:
        """What makes a model of a checkpoint: once a run."""
        if not self._has_model:
            for path in sorted((self._run / MODEL_FILES).glob("*")):
                (self._store / MODEL_FILES / path.name).put(path, file_entry(path).sha256)
            self._has_model = True


def _require_whole(path: Path, manifest: Manifest) -> None:
    """Raises ToolkitError if a file has changed since it was written: a store's checksum would be that of a copy."""
    if file_entry(path) != manifest.files[path.name]:
        raise ToolkitError(f"{path} is not what was written: its checksum differs")


def _problem_of(action: Callable[[Parcel], None], parcel: Parcel) -> str | None:
    try:
        action(parcel)
    except ToolkitError as error:
        return without_secrets(first_line(error))
    # Whatever it is: it costs an attempt, not the run.
    except Exception as error:
        return without_secrets(in_words(error))
    return None


def remove(folder: StorePath) -> None:
    """Deletes a checkpoint, its mark first: one that is half deleted does not count, and is cleared away later."""
    (folder / COMPLETE).unlink()
    folder.remove_tree()


def clear_unfinished(store: StorePath) -> None:
    """Deletes what interrupted copies and deletions have left. Called by one process, before any copy."""
    for checkpoint in list_checkpoints(store):
        if checkpoint.unfinished:
            (store / FOLDER / checkpoint.folder.name).remove_tree()


class Uploads:
    """Copies checkpoints in a thread of their own, for as long as there are any.

    All ranks copy the same checkpoint at the same time; rank 0 decides which. Training never waits for a copy, only
    the end of the run does.

    Args:
        warn: told once a minute of a store that fails.
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

    def folder(self, step: int) -> Path:
        """Where this rank keeps its files of a step until they are in the store."""
        return outgoing(self._run, ranks.rank()) / f"step_{step:08d}"

    def offer(self, manifest: Manifest) -> tuple[bool, int | None]:
        """Hands a checkpoint over that lies in `folder`. Rank 0's answer is for `begin`, on all ranks."""
        with self._changed:
            self._parcels[manifest.step] = Parcel.of(manifest, [self.folder(manifest.step)])
            self._changed.notify_all()
            idle, displaced = not self._is_busy, self._waiting
            self._is_busy, self._waiting = True, manifest.step
            return idle, displaced

    def begin(self, idle: bool, displaced: int | None) -> None:
        """Starts the thread, or drops what has waited and is older than what waits now."""
        if displaced is not None:
            self._drop(displaced, "copying is slower than saving")
        if idle:
            if self._thread is not None:
                self._thread.join()  # it has nothing left to do
            self._thread = threading.Thread(target=ranks.on_this_device(self._run_all), name="upload", daemon=True)
            self._thread.start()

    def finish(self, seconds: float, tell: Callable[[str], None]) -> str | None:
        """Waits for the copies; why the last checkpoint is not in the store, None if it is. On all ranks.

        A copy that goes on is waited for however long it takes; a store that fails for `seconds`.

        Args:
            tell: called every second or so, with what is waited for.
        """
        self._give_up_at = time.monotonic() + seconds
        self._closing.set()
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(1.0)
            tell(self._under_way())
        self._closing.clear()
        for folder in (outgoing(self._run, ranks.rank()), self._run / OUTGOING):
            with contextlib.suppress(OSError):  # what is not in the store yet stays
                folder.rmdir()
        return self.missing

    def abandon(self, seconds: float) -> None:
        """Waits for the copies, but not for long: this rank ends alone, and what it has not copied stays here."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _under_way(self) -> str:
        for step, parcel in sorted(self._parcels.items()):
            sent, whole = parcel.sent_bytes
            figures = f"{sent / 2**20:,.0f} of {whole / 2**20:,.0f} MiB of rank {ranks.rank()}"
            return f"copying the checkpoint of step {step} to {self._store}: {figures}"
        return f"copying to {self._store}"

    def _run_all(self) -> None:
        try:
            while (step := self._told_by_first(self._next)) is not None:
                self._copy(self._taken(step))
        except Exception as error:
            # Without the lost rank the run does not go on; its own error is what is to be read.
            self.missing = f"the copy to {self._store} was cut off: {in_words(error)}"

    def _told_by_first(self, action: Callable[[], T]) -> T:
        """What rank 0 finds, on every rank."""
        return ranks.gather_objects(action() if ranks.rank() == 0 else None, self._group)[0]  # type: ignore[return-value]

    def _next(self) -> int | None:
        """Rank 0: the checkpoint to copy; None: there is none, and the thread ends."""
        with self._changed:
            step, self._waiting = self._waiting, None
            self._is_busy = step is not None
            return step

    def _taken(self, step: int) -> Parcel:
        with self._changed:
            # Rank 0 may choose what another rank is just about to hand over.
            self._changed.wait_for(lambda: step in self._parcels)
            return self._parcels[step]

    def _copy(self, parcel: Parcel) -> None:
        """Tries until it is there, a newer one waits, or the run's end has waited for long enough."""
        step, pause = parcel.manifest.step, RETRY_SECONDS
        while (problem := self._sender.attempt(parcel)) is not None:
            decision = self._told_by_first(self._decide)
            self.missing = f"the checkpoint of step {step} is not in {self._store}: {problem}"
            if decision == "skip":
                self._drop(step, problem)
                return
            if decision == "give up":
                self._parcels.pop(step)
                return
            self._tell_of(f"{self.missing}; the run goes on, and it is tried again")
            self._pause(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)
        if self.missing is not None and self._told > 0:
            self._warn(f"the checkpoint of step {step} is in {self._store} now")
            self._told = -TELL_SECONDS
        self.missing = None
        self._parcels.pop(step)

    def _decide(self) -> str:
        """Rank 0, after an attempt that failed."""
        if self._waiting is not None:
            return "skip"
        return "give up" if self._closing.is_set() and time.monotonic() > self._give_up_at else "again"

    def _pause(self, seconds: float) -> None:
        """Until the next attempt; shorter once the run's end waits for it."""
        if self._closing.is_set():
            time.sleep(min(seconds, RETRY_SECONDS))
        else:
            self._closing.wait(seconds)

    def _drop(self, step: int, why: str) -> None:
        self._tell_of(f"the checkpoint of step {step} is not copied to {self._store}, as a newer one is there: {why}")
        self._parcels.pop(step).discard()

    def _tell_of(self, text: str) -> None:
        if time.monotonic() - self._told >= TELL_SECONDS:
            self._told = time.monotonic()
            self._warn(text)


def finish_interrupted(run: Path, store: StorePath, settings: CheckpointSection, tell: Callable[[str], None]) -> None:
    """Copies the newest checkpoint of which the ranks still have every file, if the store has none as new. Collective.

    What is older than the store's last is deleted here.

    Raises:
        ToolkitError: on every rank, where the store fails.
    """
    last = ranks.on_first_rank(lambda: latest(store))
    saved_step = -1 if last is None else last.step
    parcels = {step: parcel for step, parcel in _left_over(run).items() if step > saved_step}
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
    for folder in _kept_by(run, "step_*"):
        if int(folder.name.removeprefix("step_")) <= saved_step:
            shutil.rmtree(folder, ignore_errors=True)
    for folder in _kept_by(run, f".step_*{UNFINISHED}"):
        shutil.rmtree(folder, ignore_errors=True)


def _kept_by(run: Path, names: str) -> list[Path]:
    """Folders that this rank sees to: its own and, of a run on more ranks, those of others."""
    every = sorted((run / OUTGOING).glob("rank_*"))
    mine = [f for f in every if f.name[5:].isdigit() and int(f.name[5:]) % ranks.world_size() == ranks.rank()]
    return [path for folder in mine for path in sorted(folder.glob(names))]


def _left_over(run: Path) -> dict[int, Parcel]:
    """Step -> what this rank has of it; what cannot be read is left out."""
    folders: dict[int, list[Path]] = {}
    for folder in _kept_by(run, "step_*"):
        folders.setdefault(int(folder.name.removeprefix("step_")), []).append(folder)
    parcels = {}
    for step, those in folders.items():
        with contextlib.suppress(OSError, ValueError, ToolkitError):
            parcel = Parcel.of(Manifest.from_json((those[0] / MANIFEST).read_bytes()), those)
            for path in parcel.files.values():
                _require_whole(path, parcel.manifest)
            parcels[step] = parcel
    return parcels
