"""Saves: sharded through torch.distributed.checkpoint, synced, read back, renamed, marked. Or nothing at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save

from toolkit import ranks
from toolkit.checkpoint.manifest import (
    COMPLETE,
    FOLDER,
    MANIFEST,
    METRICS,
    SET_ASIDE,
    UNFINISHED,
    FileEntry,
    Manifest,
    file_entry,
    latest,
    list_checkpoints,
    step_folder,
    sync,
    write_synced,
)
from toolkit.checkpoint.rotation import superseded
from toolkit.checkpoint.state import described, first_failure, first_non_finite, host_copy
from toolkit.checkpoint.store import StorePath
from toolkit.checkpoint.upload import Uploads
from toolkit.errors import ToolkitError, first_line, is_lost_peer
from toolkit.paths import CHECKPOINT_FILE_BYTES
from toolkit.recipe.schema import CheckpointSection
from toolkit.sharding.shards import local_tensor

DELETED = ".deleted"
"""Ending of the hidden folders in which a checkpoint is deleted."""


@dataclass(frozen=True)
class Job:
    """One save: what rank 0 tells, the tensors, this rank's generators, and the run's records so far.

    Attributes:
        parameters: the model's, by name, which must be finite.
    """

    manifest: Manifest
    tensors: dict[str, torch.Tensor]
    parameters: list[str]
    random_states: dict[str, Any]
    records: list[dict[str, Any]]


class Checkpointer:
    """Writes the checkpoints of a run.

    Every rank calls `save` at the same steps. With asynchronous saving, the state is copied to the host and
    written by a thread, over a process group of its own; the next save waits for it.

    Args:
        run: the run's folder, which all ranks see unless there is a store.
        warn: told of a save that failed; the run goes on, and the last whole checkpoint stays.
        store: where the checkpoints are kept instead of `run`; copied there by a thread, from each rank's own folder.
    """

    def __init__(
        self, run: Path, settings: CheckpointSection, warn: Callable[[str], None], store: StorePath | None = None
    ) -> None:
        self._run = run
        self._settings = settings
        self._warn = warn
        # A group of its own: the thread's collectives must not mix with those of training, and gloo needs no device.
        self._group = dist.new_group(backend="gloo", timeout=ranks.PATIENCE) if ranks.world_size() > 1 else None
        if self._group is not None:
            # A rank that refuses the run next would take its side of the group down while others still connect.
            dist.barrier(self._group)
        self._thread: threading.Thread | None = None
        self._problem: str | None = None
        self.uploads = Uploads(run, store, settings, warn) if store is not None else None

    def save(self, job: Job, wait: bool = False) -> bool:
        """Saves, or begins to; whether the last save that has ended counts.

        Args:
            wait: return when it is written, as the end of a run does.
        """
        whole = self.wait()
        if self._settings.asynchronous and not wait:
            # Copied before this returns: the next step changes the tensors, and adds to the records.
            job = replace(job, tensors=host_copy(job.tensors), records=list(job.records))
            self._thread = threading.Thread(
                target=ranks.on_this_device(self._write), args=(job,), name="checkpoint", daemon=True
            )
            self._thread.start()
            return whole
        self._write(job)
        return self._report()

    def wait(self) -> bool:
        """Returns when the save that is being written has ended; whether it counts."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._report()

    def _report(self) -> bool:
        # The writing thread only leaves its problem; it is told from here, where the metrics are written.
        problem, self._problem = self._problem, None
        if problem is not None:
            self._warn(problem)
        return problem is None

    def _write(self, job: Job) -> None:
        """Collective over the save's own group. Any rank's problem is every rank's."""
        step = job.manifest.step
        folder = step_folder(self._run, step) if self.uploads is None else self.uploads.folder(step)
        unfinished = folder.with_name(f".{folder.name}{UNFINISHED}")
        # One folder for all ranks or, where the disk may be the host's own, one for each.
        leads = ranks.rank() == 0 or self.uploads is not None
        try:
            self._together(lambda: _begin(unfinished) if leads else None)
            self._save_tensors(job.tensors, unfinished)
            entries = self._together(lambda: _finish_rank(job, unfinished))
            files = {name: entry for found in entries for name, entry in found.items()}
            non_finite = self._non_finite(job)
            manifest = replace(job.manifest, files=files, tensors=described(job.tensors), non_finite=non_finite)
            self._together(lambda: self._publish(manifest, unfinished, folder) if leads else None)
            if (uploads := self.uploads) is not None:
                uploads.begin(*self._together(lambda: uploads.offer(manifest))[0])
            if non_finite is not None:
                self._problem = (
                    f"the checkpoint of step {manifest.step} does not count: {non_finite}; the last good one stays, "
                    "and a restart goes on from there"
                )
        # Whatever it is, as a full disk: it costs one checkpoint, not the run.
        except Exception as error:
            # Without the lost rank the run does not go on, and what that rank failed at is what is to be read.
            why = "another rank has ended" if is_lost_peer(error) else f"{first_line(error)}; the run goes on"
            self._problem = (
                f"the checkpoint of step {job.manifest.step} was not saved: {why}, and the last whole checkpoint stays"
            )
            if leads:
                shutil.rmtree(unfinished, ignore_errors=True)

    def _non_finite(self, job: Job) -> str | None:
        """What is not finite in the state, on any rank."""
        found = self._together(lambda: first_non_finite(job.tensors, job.parameters))
        broken = [name for name in found if name is not None]
        return f"{broken[0]} holds values that are not finite" if broken else job.manifest.non_finite

    def _save_tensors(self, tensors: dict[str, torch.Tensor], folder: Path) -> None:
        writer = HuggingFaceStorageWriter(str(folder), files_of(tensors, ranks.world_size()), save_distributed=True)
        try:
            save(tensors, storage_writer=writer, process_group=self._group, no_dist=self._group is None)
        except CheckpointException as error:  # raised on all ranks
            raise ToolkitError(first_failure(error)) from error

    def _publish(self, manifest: Manifest, unfinished: Path, folder: Path) -> None:
        """Names the files, moves the folder to its place, marks it, and clears old ones away.

        If there is a store, all but the move is done there, when every rank's files are there.
        """
        if self.uploads is None:
            _require_files(manifest, unfinished)
        text = manifest.to_json()
        write_synced(unfinished / MANIFEST, text)
        sync(unfinished)
        if folder.exists():  # of a save that was interrupted between here and the marker, or of other weights
            shutil.rmtree(folder)
        # Sync, rename, sync, mark: a crash at any point leaves a folder without a marker, which does not count.
        os.replace(unfinished, folder)
        try:
            # The rename is in the parent folder's names, so these are synced, too.
            sync(folder.parent)
            if self.uploads is not None:
                return
            _mark(folder, hashlib.sha256(text.encode()).hexdigest())
        except OSError:
            remove(folder)  # as on a full disk, where it would stand in the way of the next save
            raise
        # Only now: until the marker is on the disk, the older ones are all that counts.
        for old in superseded(list_checkpoints(self._run), self._settings):
            remove(step_folder(self._run, old.step))

    def _together(self, action: Callable[[], Any]) -> list[Any]:
        return ranks.on_every_rank(action, "write a checkpoint", self._group)


def files_of(tensors: dict[str, torch.Tensor], num_ranks: int) -> dict[str, int]:
    """Number of the file, from 1 on, of each tensor: of each rank's parts about `CHECKPOINT_FILE_BYTES` a file.

    The storage writer holds a file's tensors in memory a second time while it writes it, so files are small.
    """
    files, number, filled = {}, 1, 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size() // num_ranks
        if filled and filled + size > CHECKPOINT_FILE_BYTES:
            number, filled = number + 1, 0
        files[name] = number
        filled += size
    return files


def _mark(folder: Path, checksum: str) -> None:
    """Writes the marker whole or not at all: a disk that is full lets a file be made, and then nothing into it."""
    hidden = folder / f".{COMPLETE}"
    write_synced(hidden, checksum)
    os.replace(hidden, folder / COMPLETE)
    sync(folder)


def remove(folder: Path) -> None:
    """Deletes a checkpoint; one that is half deleted does not stand in its place, and is cleared away later."""
    hidden = folder.with_name(f".{folder.name}{DELETED}")
    try:
        os.replace(folder, hidden)
    except OSError:
        return  # as on a file system that has become read-only: it stays, and counts
    shutil.rmtree(hidden, ignore_errors=True)


def _require_files(manifest: Manifest, folder: Path) -> None:
    """Raises ToolkitError if rank 0 lacks a file that another rank has written, as on a disk of its own."""
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


def _begin(unfinished: Path) -> None:
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)


def _finish_rank(job: Job, folder: Path) -> dict[str, FileEntry]:
    """Writes this rank's own files, reads its tensors back, and syncs all of it."""
    # The storage writer counts ranks from 1.
    mine = sorted(folder.glob(f"shard-{ranks.rank() + 1:05d}-*.safetensors"))
    for path in mine:
        require_same(path, job.tensors)
        sync(path)
    states = folder / f"rank_{ranks.rank():05d}.json"
    write_synced(states, json.dumps(job.random_states))
    mine.append(states)
    if ranks.rank() == 0:
        metrics = folder / METRICS
        write_synced(metrics, "".join(json.dumps(record) + "\n" for record in job.records))
        mine.append(metrics)
    return {path.name: file_entry(path) for path in mine}


def require_same(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Raises ToolkitError if a written file does not hold the state, byte for byte."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (no dict)
            live = local_tensor(tensors[name]).cpu()
            read = file.get_tensor(name)
            if not same_bytes(read, live):
                raise ToolkitError(f"{path.name}: {name} reads back differently from what was written")


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compares shapes, types and bits: what is not a number equals itself here."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.numel() == 0:
        return True
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def _step_of(set_aside: Path) -> float:
    """The step of a checkpoint that was set aside; infinite if the name does not say it."""
    number = set_aside.name.partition(SET_ASIDE)[0].removeprefix("step_")
    return int(number) if number.isdecimal() else math.inf


def clear_unfinished(run: Path) -> None:
    """Deletes what interrupted saves and deletions have left. Called by one process, before any save."""
    leftovers = [path for ending in (UNFINISHED, DELETED) for path in (run / FOLDER).glob(f".step_*{ending}")]
    last = latest(run)
    # Earlier versions took the marker away before the rest.
    old = [c.step for c in list_checkpoints(run) if c.unfinished and last is not None and c.step < last.step]
    leftovers += [step_folder(run, step) for step in old]
    # Of a save that was killed between its rename and its mark; a damaged one keeps the mark, and stays.
    aside = [path for path in (run / FOLDER).glob(f"step_*{SET_ASIDE}*") if not (path / COMPLETE).exists()]
    leftovers += [path for path in aside if last is not None and _step_of(path) <= last.step]
    for folder in leftovers:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
