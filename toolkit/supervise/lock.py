"""Allows one run at a time in an output folder, by a lock of the operating system on a file in it.

The lock ends with the process of rank 0, however that ends. It belongs to the opened file (flock), not to the process
(POSIX): two runs in one process exclude each other, and others may read the file. Children would share the opened file;
those that are forked close it, and it is not inherited by programs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from toolkit import ranks
from toolkit.errors import BadInputError, RankError, ToolkitError
from toolkit.supervise.output_place import make_place, unwritable
from toolkit.terminal import Terminal, format_time

LOCK = ".lock"
"""The name of the file, which says who holds it, for errors."""

LOST_HOST_SECONDS = 120.0
"""A file server needs up to this long to release the locks of a host that is gone (NFSv4 and Lustre: about 100)."""

CLEAN_UP_SECONDS = 10.0


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Creates the folder and holds it until the `with` block ends. Removes folders that it created if they stay empty.

    Raises:
        BadInputError: on every rank, if another run holds the folder, or it cannot be created or written.
    """
    made = ranks.on_first_rank(lambda: make_place(folder))
    try:
        file = ranks.alone_on_first_rank(lambda: acquire(folder))
        try:
            yield
        except ToolkitError as error:
            if file is None and not isinstance(error, RankError):  # all ranks have it
                _await_release(folder / LOCK)
            raise
        finally:
            if file is not None:
                release(file, folder)
    finally:
        if ranks.rank() == 0:
            with contextlib.suppress(OSError):  # it is not empty
                for each in made:
                    each.rmdir()


def _await_release(path: Path) -> None:
    """Waits, some seconds at most, until rank 0 has cleaned up: a launcher ends it when this rank has ended."""
    until = time.monotonic() + CLEAN_UP_SECONDS
    while path.exists() and time.monotonic() < until:
        time.sleep(0.05)


def acquire(folder: Path) -> BinaryIO:
    """Locks the folder, and returns the file that holds the lock until `release`, or until this process ends.

    Waits up to `LOST_HOST_SECONDS` for a holder on another host, which may be gone.

    Raises:
        BadInputError: if another run holds the folder, or it cannot be written.
    """
    until, is_told = time.monotonic() + LOST_HOST_SECONDS, False
    while True:
        try:
            file = (folder / LOCK).open("a+b", buffering=0)
            is_locked = _lock(file, folder)
            if is_locked and _is_in(folder, file):
                _write_holder(file, folder)
                return file
            file.seek(0)
            holder = file.read().decode(errors="replace") or "unknown"
            file.close()
        except OSError as error:
            raise unwritable(folder, error) from error
        if is_locked:
            continue  # the run before has just removed this file
        if f" on {platform.node()}, " in holder or time.monotonic() >= until:
            raise BadInputError(
                f"training.output_dir: another run is writing to {str(folder)!r}: {holder}; wait until it is done, end "
                f"it, or choose another training.output_dir. If its host is gone, delete {str(folder / LOCK)!r}"
            )
        if not is_told:
            Terminal().print(f"the output folder is held by {holder}; waiting to see whether its host is gone")
        is_told = True
        time.sleep(1.0)


def _lock(file: BinaryIO, folder: Path) -> bool:
    """Locks the file, if the file system has locks. Returns whether no other run holds it, as far as can be seen."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.register_at_fork(after_in_child=file.close)  # a worker that is left over would hold the folder
    except BlockingIOError:
        return False
    except OSError as error:
        Terminal().warn(
            f"{str(folder)!r} is on a file system without locks ({error}): a second run that writes there would not be "
            "noticed"
        )
    return True


def _write_holder(file: BinaryIO, folder: Path) -> None:
    try:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}, since {format_time(time.time())}".encode())
        os.fsync(file)  # other hosts read it
    except OSError:
        release(file, folder)
        raise


def _is_in(folder: Path, file: BinaryIO) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(file.fileno()), (folder / LOCK).stat())
    return False


def release(file: BinaryIO, folder: Path) -> None:
    """Removes the file of `acquire`, unless it is another run's by now, and ends the lock."""
    if _is_in(folder, file):
        with contextlib.suppress(OSError):
            (folder / LOCK).unlink()
    file.close()
