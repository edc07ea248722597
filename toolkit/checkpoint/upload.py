"""Copies checkpoints to a store while training goes on, in a thread of rank 0. The marker is written last.

    s3://bucket/runs/first/checkpoints/step_00000100/ as the checkpoint in the output folder
    s3://bucket/runs/first/model/                     configuration and tokenizer, for `toolkit export`

At most one checkpoint waits while another is copied; a newer one takes its place. A run that starts copies its last
checkpoint if the store has none as new.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

from toolkit import ranks
from toolkit.checkpoint.manifest import (
    COMPLETE,
    MANIFEST,
    MODEL_FILES,
    Manifest,
    latest,
    list_checkpoints,
    step_folder,
    superseded,
)
from toolkit.checkpoint.store import StorePath
from toolkit.errors import ToolkitError, in_words
from toolkit.published import without_secrets
from toolkit.recipe.schema import CheckpointSection
from toolkit.training.durable_writes import RETRY_SECONDS, TELL_SECONDS

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
        remove(step_folder(store, old.step))


def remove(folder: StorePath) -> None:
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
