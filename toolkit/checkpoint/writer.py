"""Saves checkpoints atomically: sharded by torch.distributed.checkpoint, synced, renamed and marked."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save

from toolkit import ranks
from toolkit.checkpoint.manifest import (
    COMPLETE,
    MANIFEST,
    METRICS,
    MODEL_FILES,
    SET_ASIDE,
    UNFINISHED,
    FileEntry,
    Manifest,
    file_entry,
    latest,
    list_checkpoints,
    step_folder,
    superseded,
)
from toolkit.checkpoint.state import described, first_failure, first_non_finite, host_copy
from toolkit.checkpoint.store import StorePath
from toolkit.errors import ToolkitError, first_line, in_words, is_lost_peer
from toolkit.paths import CHECKPOINT_FILE_BYTES, CHECKPOINTS, atomic_write, sync, write_synced
from toolkit.published import without_secrets
from toolkit.recipe.schema import CheckpointSection
from toolkit.training.durable_writes import RETRY_SECONDS, TELL_SECONDS

DELETED = ".deleted"
"""The ending of the hidden folders in which a checkpoint is deleted."""


WAIT_SECONDS = 1.0
"""Between looks at a save that is waited for."""


@dataclass(frozen=True)
class Save:
    """One save.

    Attributes:
        manifest: the manifest without tensors and files. That of rank 0 is written.
        tensors: the state by name, of any shapes; see `named_tensors`.
        parameters: the names of the model's parameters, which must be finite.
        random_states: the states of this rank's random number generators.
        records: the run's records so far.
    """

    manifest: Manifest
    tensors: dict[str, torch.Tensor]
    parameters: list[str]
    random_states: dict[str, Any]
    records: list[dict[str, Any]]


class Checkpointer:
    """Writes the checkpoints of a run.

    Every rank calls `save` at the same steps. A thread writes the state, over a separate process group. With
    asynchronous saving it writes a copy on the host, and the next save waits for it; else `save` waits, and nothing is
    copied.

    Args:
        run: the run's folder, which all ranks see.
        settings: the settings of checkpoints.
        warn: called if a save fails. The run goes on, and the last complete checkpoint stays.
        store: the store to which rank 0 copies the checkpoints in `run`, or None.
        waits: called while this rank waits for a save that makes progress, so that the wait is not a stall.
        device_type: torch's type of the ranks' devices.

    Attributes:
        uploads: copies checkpoints to the store. None without a store, and on other ranks than the first.
        seconds: how long the longest save took, or None before the first.
    """

    def __init__(
        self,
        run: Path,
        settings: CheckpointSection,
        warn: Callable[[str], None],
        store: StorePath | None = None,
        waits: Callable[[], None] = lambda: None,
        device_type: str = "cpu",
    ) -> None:
        self._run = run
        self._settings = settings
        self._copies = settings.copies_from(device_type)
        self._warn = warn
        self._waits = waits
        self._place: Path | None = None  # the folder of the current save
        self._num_done = 0
        # A separate group: the thread's collectives must not mix with those of training, and gloo needs no device.
        self._group = dist.new_group(backend="gloo", timeout=ranks.PATIENCE) if ranks.world_size() > 1 else None
        if self._group is not None:
            # A rank that refuses the run next would destroy its side of the group while others still connect.
            dist.barrier(self._group)
        self._thread: threading.Thread | None = None
        self._problem: str | None = None
        self.seconds: float | None = None
        found = None if store is None else ranks.alone_on_first_rank(lambda: Uploads(run, store, settings, warn))
        self.uploads: Uploads | None = found

    def save(self, job: Save, wait: bool = False) -> bool:
        """Saves, or starts to. Returns whether the last save that has ended counts.

        Args:
            job: the save.
            wait: whether to return only when it is written, for the end of a run.
        """
        whole = self.wait()
        waits = wait or not self._copies
        if not waits:
            # Copy before this returns: the next step changes the tensors, and adds to the records.
            job = replace(job, tensors=host_copy(job.tensors), records=list(job.records))
        # Also if this rank waits, so that it can tell a slow disk from one that hangs.
        self._thread = threading.Thread(
            target=ranks.on_this_device(self._write_or_tell), args=(job,), name="checkpoint", daemon=True
        )
        self._thread.start()
        return self.wait() if waits else whole

    def wait(self) -> bool:
        """Waits until the save that is being written has ended. Returns whether it counts."""
        seen: tuple[int, int] | None = None
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(WAIT_SECONDS)
            # A slow disk is not a stall, but one that hangs is.
            if (progress := (self._num_done, _bytes_in(self._place))) != seen:
                seen = progress
                self._waits()
        self._thread = None
        return self._report_problem()

    def _note_progress(self) -> None:
        self._num_done += 1

    def _report_problem(self) -> bool:
        # The writing thread only leaves its problem. This thread, which writes the metrics, reports it.
        problem, self._problem = self._problem, None
        if problem is not None:
            self._warn(problem)
        return problem is None

    def _write_or_tell(self, job: Save) -> None:
        """Writes a checkpoint. Any error, such as a full disk, costs this one, not the run."""
        try:
            self._write_checkpoint(job)
        except Exception as error:
            # The run cannot go on without the lost rank, whose own error is the one to read.
            why = "another rank has ended" if is_lost_peer(error) else f"{first_line(error)}; the run goes on"
            self._problem = (
                f"the checkpoint of step {job.manifest.step} was not saved: {why}, and the last complete one stays"
            )
            if ranks.rank() == 0 and self._place is not None:
                shutil.rmtree(self._place, ignore_errors=True)

    def _write_checkpoint(self, job: Save) -> None:
        """Writes a checkpoint. Collective over the save's own group. If a rank fails, every rank raises."""
        step, started, leads = job.manifest.step, time.monotonic(), ranks.rank() == 0
        folder = step_folder(self._run, step)
        self._place = unfinished = folder.with_name(f".{folder.name}{UNFINISHED}")
        self._on_every_rank(lambda: _create_folder(unfinished) if leads else None)
        self._save_tensors(job.tensors, unfinished)
        entries = self._on_every_rank(lambda: _write_rank_files(job, unfinished, self._note_progress))
        files = {name: entry for found in entries for name, entry in found.items()}
        non_finite = self._non_finite(job)
        manifest = replace(job.manifest, files=files, tensors=described(job.tensors), non_finite=non_finite)
        self._on_every_rank(lambda: self._publish(manifest, unfinished, folder) if leads else None)
        self.seconds = max(self.seconds or 0.0, time.monotonic() - started)
        if self.uploads is not None and non_finite is None:
            self.uploads.offer(step)
        if non_finite is not None:
            self._problem = (
                f"the checkpoint of step {manifest.step} does not count: {non_finite}; the last good one stays, "
                "and a restart goes on from there"
            )

    def _non_finite(self, job: Save) -> str | None:
        """Returns what is not finite in the state on any rank, in words, or None."""
        found = self._on_every_rank(lambda: first_non_finite(job.tensors, job.parameters))
        broken = [name for name in found if name is not None]
        return f"{broken[0]} holds values that are not finite" if broken else job.manifest.non_finite

    def _save_tensors(self, tensors: dict[str, torch.Tensor], folder: Path) -> None:
        writer = HuggingFaceStorageWriter(str(folder), files_of(tensors, ranks.world_size()), save_distributed=True)
        try:
            save(tensors, storage_writer=writer, process_group=self._group, no_dist=self._group is None)
        except CheckpointException as error:  # raised on all ranks
            raise ToolkitError(first_failure(error)) from error

    def _publish(self, manifest: Manifest, unfinished: Path, folder: Path) -> None:
        """Writes the manifest, renames the folder, writes the marker and deletes old checkpoints."""
        _require_files(manifest, unfinished)
        text = manifest.to_json()
        write_synced(unfinished / MANIFEST, text)
        sync(unfinished)
        if folder.exists():  # from a save that was interrupted before the marker, or with other weights
            shutil.rmtree(folder)
        # Sync, rename, sync, mark: a crash at any point leaves a folder without a marker, which does not count.
        os.replace(unfinished, folder)
        try:
            # The rename changes the entries of the parent folder, so sync that too.
            sync(folder.parent)
            # Whole or not at all: a full disk would let a file be created, but not filled.
            atomic_write(folder / COMPLETE, hashlib.sha256(text.encode()).hexdigest())
            sync(folder)
        except OSError:
            remove(folder)  # for example on a full disk, where it would block the next save
            raise
        # Only now: until the marker is on the disk, only the older checkpoints count.
        copying = None if self.uploads is None else self.uploads.copying
        for old in superseded(list_checkpoints(self._run), self._settings):
            if old.step != copying:  # otherwise a slow store would never get one
                remove(step_folder(self._run, old.step))

    def _on_every_rank(self, action: Callable[[], Any]) -> list[Any]:
        return ranks.on_every_rank(action, "write a checkpoint", self._group)


def files_of(tensors: dict[str, torch.Tensor], num_ranks: int) -> dict[str, int]:
    """Assigns each tensor to a numbered file, from 1 on. Each rank's file has about `CHECKPOINT_FILE_BYTES`.

    The storage writer holds a second copy of a file's tensors in memory while it writes it, so files are small.

    Args:
        tensors: tensors of any shape by name.
        num_ranks: the number of ranks that share each tensor.
    """
    files, number, filled = {}, 1, 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size() // num_ranks
        if filled and filled + size > CHECKPOINT_FILE_BYTES:
            number, filled = number + 1, 0
        files[name] = number
        filled += size
    return files


def remove(folder: Path) -> None:
    """Deletes a checkpoint. Renames it first, so that a half-deleted one does not count and is deleted later."""
    hidden = folder.with_name(f".{folder.name}{DELETED}")
    try:
        os.replace(folder, hidden)
    except OSError:
        return  # for example a file system that has become read-only: it stays, and counts
    shutil.rmtree(hidden, ignore_errors=True)


def _require_files(manifest: Manifest, folder: Path) -> None:
    """Raises ToolkitError if rank 0 does not see a file that another rank has written, perhaps to another disk."""
    missing = [name for name, entry in manifest.files.items() if not _has_size(folder / name, entry.bytes)]
    if missing:
        raise ToolkitError(
            f"rank 0 on {platform.node()} does not see {len(missing)} of the {len(manifest.files)} files that the "
            f"ranks have written (first: {missing[0]}); the output folder must be one that all hosts share"
        )


def _has_size(path: Path, num_bytes: int) -> bool:
    try:
        return path.stat().st_size == num_bytes
    except OSError:
        return False


def _create_folder(unfinished: Path) -> None:
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)


def _bytes_in(folder: Path | None) -> int:
    """Returns the size of the files that all ranks have written to a folder; 0 if there is none."""
    try:
        return sum(path.stat().st_size for path in folder.iterdir()) if folder is not None else 0
    except OSError:  # renamed or deleted meanwhile
        return 0


def _write_rank_files(job: Save, folder: Path, note_progress: Callable[[], None]) -> dict[str, FileEntry]:
    """Writes this rank's other files, and syncs all files.

    Args:
        job: the save.
        folder: the folder of the files.
        note_progress: called after each file of tensors.
    """
    # The storage writer counts ranks from 1.
    mine = sorted(folder.glob(f"shard-{ranks.rank() + 1:05d}-*.safetensors"))
    for path in mine:
        sync(path)
        note_progress()
    states = folder / f"rank_{ranks.rank():05d}.json"
    write_synced(states, json.dumps(job.random_states))
    mine.append(states)
    if ranks.rank() == 0:
        metrics = folder / METRICS
        write_synced(metrics, "".join(json.dumps(record) + "\n" for record in job.records))
        mine.append(metrics)
    return {path.name: file_entry(path) for path in mine}


def _step_of(set_aside: Path) -> float:
    """Returns the step of a checkpoint that was set aside, or infinity if the name does not contain it."""
    number = set_aside.name.partition(SET_ASIDE)[0].removeprefix("step_")
    return int(number) if number.isdecimal() else math.inf


def clear_unfinished(run: Path) -> None:
    """Deletes what interrupted saves and deletions have left. One process calls it, before any save."""
    leftovers = [path for ending in (UNFINISHED, DELETED) for path in (run / CHECKPOINTS).glob(f".step_*{ending}")]
    last = latest(run)
    # From a save that was killed between rename and marker. A damaged checkpoint has its marker, and stays.
    aside = [path for path in (run / CHECKPOINTS).glob(f"step_*{SET_ASIDE}*") if not (path / COMPLETE).exists()]
    leftovers += [path for path in aside if last is not None and _step_of(path) <= last.step]
    for folder in leftovers:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)


# ---- Copies checkpoints to a store while training goes on, in a thread of rank 0. The marker is written last ----
#     s3://bucket/runs/first/checkpoints/step_00000100/ as the checkpoint in the output folder
#     s3://bucket/runs/first/model/                     configuration and tokenizer, for `toolkit export`
#
# At most one checkpoint waits while another is copied; a newer one takes its place. A run that starts copies its last
# checkpoint if the store has none as new.

LONGEST_PAUSE = 60.0
"""The longest pause between two attempts (seconds). The first is `RETRY_SECONDS`, and each is twice the one before."""


def copy_checkpoint(run: Path, store: StorePath, step: int, settings: CheckpointSection, sent: set[str]) -> None:
    """Copies a checkpoint to a store, and deletes older ones there.

    Args:
        run: the output folder.
        store: the store.
        step: the step of a checkpoint that counts.
        settings: decide which older checkpoints are deleted.
        sent: the names of the files that an earlier attempt has copied. Those of this one are added.

    Raises:
        StoreError: if the store fails.
        OSError: if the checkpoint cannot be read.
    """
    source, target = step_folder(run, step), step_folder(store, step)
    text = (source / MANIFEST).read_bytes()
    names = Manifest.from_json(text).files
    (target / COMPLETE).unlink()  # of an earlier run's checkpoint of this step
    for name in sorted(names.keys() - sent):
        (target / name).put(source / name)
        sent.add(name)
    for path in target.iterdir():
        if path.name not in names:
            path.unlink()
    for found in (each for each in (run / MODEL_FILES).rglob("*") if each.is_file()):
        (store / found.relative_to(run).as_posix()).put(found)
    (target / MANIFEST).write_bytes(text)
    (target / COMPLETE).write_bytes(hashlib.sha256(text).hexdigest().encode())
    # Only now: until the marker is there, only the older checkpoints count.
    for old in superseded(list_checkpoints(store), settings):
        remove_copy(step_folder(store, old.step))


def remove_copy(folder: StorePath) -> None:
    """Deletes a checkpoint, the marker first. A half-deleted one does not count, and is deleted later."""
    (folder / COMPLETE).unlink()
    folder.remove_tree()


class Uploads:
    """Copies the checkpoints of a run to a store. Training never waits for a copy, only the end of the run does.

    Args:
        run: the output folder.
        store: the store.
        settings: decide which older checkpoints are deleted.
        warn: called once a minute while the store fails.

    Attributes:
        copying: the step of the checkpoint that is being copied, or None.
        missing: why the last checkpoint is not in the store, or None.
        seconds: how long the longest copy took, or None before the first.
    """

    def __init__(self, run: Path, store: StorePath, settings: CheckpointSection, warn: Callable[[str], None]) -> None:
        self._run = run
        self._store = store
        self._settings = settings
        self._warn = warn
        self._lock = threading.Lock()
        self._waiting: int | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._give_up_at = 0.0
        self._told = -TELL_SECONDS
        self.copying: int | None = None
        self.missing: str | None = None
        self.seconds: float | None = None
        for checkpoint in list_checkpoints(store):
            if checkpoint.unfinished:  # of a copy or a deletion that was interrupted
                step_folder(store, checkpoint.step).remove_tree()
        here, there = latest(run), latest(store)
        if here is not None and (there is None or there.step < here.step):
            self.offer(here.step)

    def offer(self, step: int) -> None:
        """Hands over a checkpoint that counts."""
        with self._lock:
            if self._waiting is not None:
                self._tell_dropped(self._waiting, "copying is slower than saving")
            self._waiting = step
            if self._thread is None:
                self._thread = threading.Thread(target=ranks.on_this_device(self._copy_all), name="upload", daemon=True)
                self._thread.start()

    def finish(self, seconds: float, tell: Callable[[str], None]) -> str | None:
        """Waits for the copies. Returns why the last checkpoint is not in the store, or None if it is.

        Args:
            seconds: how long to retry if the store fails. A copy that goes on may take as long as it needs.
            tell: called about every second with what the wait is for.
        """
        self._give_up_at = time.monotonic() + seconds
        self._closing.set()
        while (thread := self._thread) is not None:
            thread.join(1.0)
            tell(f"copying the checkpoint of step {self.copying} to {self._store}")
        self._closing.clear()
        return self.missing

    def abandon(self, seconds: float) -> None:
        """Waits for the copies, but not for long: this rank ends alone."""
        if (thread := self._thread) is not None:
            thread.join(seconds)

    def _copy_all(self) -> None:
        while (step := self._next_step()) is not None:
            self._copy_with_retries(step)

    def _next_step(self) -> int | None:
        with self._lock:
            self.copying, self._waiting = self._waiting, None
            if self.copying is None:
                self._thread = None  # under the lock: the next offer starts another
            return self.copying

    def _copy_with_retries(self, step: int) -> None:
        """Retries until the checkpoint is in the store, a newer one waits, or the run's end has waited long enough."""
        pause, started = RETRY_SECONDS, time.monotonic()
        sent: set[str] = set()
        while (problem := self._attempt(step, sent)) is not None:
            self.missing = f"the checkpoint of step {step} is not in {self._store}: {problem}"
            if self._waiting is not None:
                self._tell_dropped(step, problem)
                return
            if self._closing.is_set() and time.monotonic() > self._give_up_at:
                return
            self._warn_sometimes(f"{self.missing}; the run goes on, and it is tried again")
            if self._closing.wait(pause):
                time.sleep(min(pause, RETRY_SECONDS))
            pause = min(LONGEST_PAUSE, 2 * pause)
        if self.missing is not None and self._told > 0:
            self._warn(f"the checkpoint of step {step} is in {self._store} now")
            self._told = -TELL_SECONDS
        self.missing = None
        self.seconds = max(self.seconds or 0.0, time.monotonic() - started)

    def _attempt(self, step: int, sent: set[str]) -> str | None:
        """Returns why a copy failed, or None. Any error costs an attempt, not the run."""
        try:
            copy_checkpoint(self._run, self._store, step, self._settings, sent)
        except ToolkitError as error:
            return str(error)
        except Exception as error:
            return without_secrets(in_words(error))
        return None

    def _tell_dropped(self, step: int, why: str) -> None:
        self._warn_sometimes(
            f"the checkpoint of step {step} is not copied to {self._store}, as a newer one is there: {why}"
        )

    def _warn_sometimes(self, text: str) -> None:
        if time.monotonic() - self._told >= TELL_SECONDS:
            self._told = time.monotonic()
            self._warn(text)
