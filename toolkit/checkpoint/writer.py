"""Saves checkpoints atomically: sharded by torch.distributed.checkpoint, synced, read back, renamed and marked."""

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
from safetensors import safe_open
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save

from toolkit import ranks
from toolkit.checkpoint.manifest import (
    COMPLETE,
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
    superseded,
)
from toolkit.checkpoint.state import described, first_failure, first_non_finite, host_copy
from toolkit.checkpoint.store import StorePath
from toolkit.checkpoint.upload import Uploads
from toolkit.errors import ToolkitError, first_line, is_lost_peer
from toolkit.paths import CHECKPOINT_FILE_BYTES, CHECKPOINTS, atomic_write, sync, write_synced
from toolkit.recipe.schema import CheckpointSection
from toolkit.sharding.fsdp2.shards import local_tensor

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
    """Writes this rank's other files, reads its tensors back, and syncs all files.

    Args:
        job: the save.
        folder: the folder of the files.
        note_progress: called after each file of tensors.
    """
    # The storage writer counts ranks from 1.
    mine = sorted(folder.glob(f"shard-{ranks.rank() + 1:05d}-*.safetensors"))
    for path in mine:
        require_same(path, job.tensors)
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


def require_same(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Checks that a written file holds the state, byte for byte.

    Args:
        path: the safetensors file.
        tensors: the state by name; this rank's part of each has the shape of the tensor in the file.

    Raises:
        ToolkitError: if a tensor differs.
    """
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (no dict)
            live = local_tensor(tensors[name]).cpu()
            read = file.get_tensor(name)
            if not same_bytes(read, live):
                raise ToolkitError(f"{path.name}: {name} reads back differently from what was written")


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether two tensors have the same shape, dtype and bits. NaN equals itself."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.numel() == 0:
        return True
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def _step_of(set_aside: Path) -> float:
    """Returns the step of a checkpoint that was set aside, or infinity if the name does not contain it."""
    number = set_aside.name.partition(SET_ASIDE)[0].removeprefix("step_")
    return int(number) if number.isdecimal() else math.inf


def clear_unfinished(run: Path) -> None:
    """Deletes what interrupted saves and deletions have left. One process calls it, before any save."""
    leftovers = [path for ending in (UNFINISHED, DELETED) for path in (run / CHECKPOINTS).glob(f".step_*{ending}")]
    last = latest(run)
    # Earlier versions deleted the marker before the rest.
    old = [c.step for c in list_checkpoints(run) if c.unfinished and last is not None and c.step < last.step]
    leftovers += [step_folder(run, step) for step in old]
    # From a save that was killed between rename and marker. A damaged checkpoint has its marker, and stays.
    aside = [path for path in (run / CHECKPOINTS).glob(f"step_*{SET_ASIDE}*") if not (path / COMPLETE).exists()]
    leftovers += [path for path in aside if last is not None and _step_of(path) <= last.step]
    for folder in leftovers:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
