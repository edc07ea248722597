"""Writes to a disk that may be full, over its quota or read-only: training goes on, and the records wait in memory."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

from toolkit.errors import ToolkitError

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
"""Errors that a person can fix while a run goes on."""

TELL_SECONDS = 60.0
RETRY_SECONDS = 5.0
PATIENCE_SECONDS = 1200.0
"""Longest wait for room at the end of a run, when only writing is left to do."""


class LinesFile:
    """Appends lines to a file; lines that the disk does not take wait in memory, in order.

    All lines are kept: if somebody deletes, renames, cuts or rotates the file, they are written again.

    Args:
        warn: called once a minute with the number of waiting lines and the reason.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._path = path
        self._warn = warn
        self._size = 0
        self._lines: list[str] = []
        self._waiting: list[str] = []
        self._told = -TELL_SECONDS
        self._tried = -RETRY_SECONDS

    def replace(self, lines: list[str]) -> None:
        """Replaces the lines of the file. The old file stays until the new one is whole."""
        there = self._path.read_bytes().splitlines(keepends=True) if self._path.exists() else []
        # What is the same stays as it is, and needs no room.
        same = [
            line for line, found in takewhile(lambda pair: pair[0].encode() == pair[1], zip(lines, there, strict=False))
        ]
        self._size = sum(len(line.encode()) for line in same)
        self._lines, self._waiting = same, lines[len(same) :]
        self.catch_up()

    def append(self, line: str) -> None:
        self._waiting.append(line)
        # A disk that hangs before it says no must not be asked in every step.
        if len(self._waiting) == 1 or time.monotonic() - self._tried > RETRY_SECONDS:
            self.catch_up()

    def catch_up(self) -> bool:
        """Writes the waiting lines. Returns whether none is left."""
        try:
            self._write()
        except OSError as error:
            self._tried = time.monotonic()
            if self._tried - self._told >= TELL_SECONDS:
                self._told = self._tried
                self._warn(
                    f"{self._path} cannot be written ({error.strerror}): training goes on, and {len(self._waiting)} "
                    "records wait for room"
                )
            return False
        if self._told > 0:
            self._told = -TELL_SECONDS
            self._warn(f"{self._path} is written again, and holds all records")
        return True

    def _write(self) -> None:
        # No link: its target is somebody's file.
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            if os.fstat(descriptor).st_size < self._size:
                self._waiting, self._lines, self._size = [*self._lines, *self._waiting], [], 0
            data, written = "".join(self._waiting).encode(), 0
            try:
                while written < len(data):
                    written += os.pwrite(descriptor, data[written:], self._size + written)
            except OSError:
                os.ftruncate(descriptor, self._size)  # half a line is none
                raise
            self._size += written
            self._lines += self._waiting
            self._waiting.clear()
            os.ftruncate(descriptor, self._size)
        finally:
            os.close(descriptor)


def patiently(
    write: Callable[[], bool | None], what: str, warn: Callable[[str], None], waits: Callable[[], None]
) -> None:
    """Calls `write` until it succeeds, for up to `PATIENCE_SECONDS`; warns once a minute.

    Args:
        write: raises OSError or returns False if it cannot write.
        what: what is written, for warnings.
        waits: called every few seconds of the wait, which must not count as a stall.

    Raises:
        OSError, ToolkitError: as raised by `write`, if nobody can fix the cause while the run waits.
        ToolkitError: if the time is over.
    """
    started, told = time.monotonic(), -TELL_SECONDS
    while True:
        reason = _write_problem(write)
        if reason is None:
            return
        now = time.monotonic()
        if now - started > PATIENCE_SECONDS:
            raise ToolkitError(
                f"{what} could not be written ({reason}); make room, and start the same command again: it goes on from "
                "the last checkpoint, if there is one"
            )
        if now - told >= TELL_SECONDS:
            told = now
            warn(f"{what} cannot be written ({reason}); waiting for room")
        waits()
        time.sleep(RETRY_SECONDS)


def _write_problem(write: Callable[[], bool | None]) -> str | None:
    """Returns why `write` failed, or None if it wrote. Raises errors that nobody can fix while the run waits."""
    try:
        return "no room" if write() is False else None
    except (OSError, ToolkitError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if isinstance(cause, OSError) and cause.errno in FULL:
            return cause.strerror or type(cause).__name__
        raise
