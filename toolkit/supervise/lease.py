"""Allows one run at a time in an output folder, by a lease that lives as long as its process.

Rank 0 holds a small file in the folder and touches it every `BEAT_SECONDS`. It uses no kernel lock, because network
file systems support them badly or not at all. A lease is created by a hard link, which only one process can create.

A lease is over if its process is gone, as far as this process can see that (same boot, same pid namespace), or if an
earlier attempt of the same job started it. Otherwise it is over if nobody has touched the file for `STALE_SECONDS`. The
clocks of two hosts are never compared.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from toolkit import ranks
from toolkit.errors import BadInputError, RankError, ToolkitError
from toolkit.supervise.output_place import make_place, unwritable
from toolkit.terminal import Terminal, format_time

LEASE = ".lease.json"
BEAT_SECONDS = 10.0
STALE_SECONDS = 120.0
"""Longer than file systems cache a file's time, and longer than a working process can miss its heartbeat."""


def _boot_id() -> str:
    """Identifies the boot of this machine and the pid namespace of this process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no Linux
        return platform.node()


def _start_time(pid: int) -> str | None:
    """Returns the start time of a process in kernel ticks, because pids are reused, or None if there is no process."""
    if not Path("/proc/self/stat").exists():  # no Linux
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, 0)
            return "unknown"
        return None
    try:
        # The process name, which comes first, may contain spaces and brackets.
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
    except OSError:
        return None
    state, *numbers = text.split()
    # A zombie, which its parent has not waited for yet, is gone all the same.
    return None if state in "ZX" else numbers[18]


def job_attempt() -> tuple[str | None, int]:
    """Returns the job that started this process, or None, and the number of the attempt."""
    if "SLURM_JOB_ID" in os.environ:
        job, count = f"slurm {os.environ['SLURM_JOB_ID']}", int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        return job, 1000 * count + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if (job_id := os.environ.get("TOOLKIT_JOB")) is not None:  # by the file of `toolkit job`
        return f"job {job_id}", int(os.environ.get("TOOLKIT_JOB_ATTEMPT") or "0")
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return (None if run == "none" else run), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


@dataclass(frozen=True)
class Lease:
    """The process that holds a folder.

    Attributes:
        host: the name of its host.
        pid: its process id.
        boot: identifies the boot and the pid namespace.
        born: its start time in kernel ticks, as text.
        job: the job of the launcher or batch system, or None.
        attempt: the number of the attempt of that job.
        since: when it took the folder, for messages.
        token: unique to this lease.
    """

    host: str = field(default_factory=platform.node)
    pid: int = field(default_factory=os.getpid)
    boot: str = field(default_factory=_boot_id)
    born: str | None = field(default_factory=lambda: _start_time(os.getpid()))
    job: str | None = field(default_factory=lambda: job_attempt()[0])
    attempt: int = field(default_factory=lambda: job_attempt()[1])
    since: str = field(default_factory=lambda: format_time(time.time()))
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    def is_over(self) -> bool | None:
        """Returns whether its process is gone, or None if this process cannot see that."""
        job, attempt = job_attempt()
        if job is not None and job == self.job and attempt > self.attempt:
            return True  # a launcher ends the ranks of an attempt before it begins the next
        if self.boot != _boot_id():
            return None
        return _start_time(self.pid) != self.born

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Creates the folder and holds it until the `with` block ends. Removes folders that it created if they stay empty.

    Raises:
        BadInputError: on every rank, if another run holds the folder, or it cannot be created or written.
    """
    made = ranks.on_first_rank(lambda: make_place(folder))
    try:
        holder = ranks.alone_on_first_rank(lambda: _LeaseKeeper(folder / LEASE, acquire(folder / LEASE)))
        try:
            yield
        except ToolkitError as error:
            if holder is None and not isinstance(error, RankError):  # all ranks have it
                _await_release(folder / LEASE)
            raise
        finally:
            if holder is not None:
                holder.release()
    finally:
        if ranks.rank() == 0:
            with contextlib.suppress(OSError):  # it is not empty
                for each in made:
                    each.rmdir()


def _await_release(path: Path) -> None:
    """Waits, some seconds at most, until rank 0 has cleaned up: a launcher ends it when this rank has ended."""
    until = time.monotonic() + BEAT_SECONDS
    while path.exists() and time.monotonic() < until:
        time.sleep(0.05)


def acquire(path: Path) -> Lease:
    """Creates the lease, replacing one that is over. Waits up to `STALE_SECONDS` if it is not clear whether it is.

    Raises:
        BadInputError: if another run holds the folder, or the lease's file cannot be read or written.
    """
    mine, seen, until = Lease(), None, 0.0
    while not _create_file(path, mine):
        try:
            found, touched = _read_file(path)
        except OSError as error:
            raise _unreadable_error(path, error) from error
        if touched is None:
            continue  # it has just been removed
        over = found.is_over() if found is not None else None
        if over is None and seen is None:
            seen, until = (found, touched), time.monotonic() + STALE_SECONDS
            Terminal().print(f"the output folder is held by {found}; waiting to see whether it is alive")
        if over is False or (over is None and seen != (found, touched)):
            raise _held_error(path.parent, found)
        if over or time.monotonic() > until:
            _remove_if_unchanged(path, found)
        else:
            time.sleep(min(1.0, STALE_SECONDS / 10))
    return mine


def _held_error(folder: Path, found: Lease | None) -> BadInputError:
    end = "" if found is None else f"end it (kill {found.pid} on {found.host}), "
    return BadInputError(
        f"training.output_dir: another run is writing to {str(folder)!r}: {found or 'unknown'}; wait until it is done, "
        f"{end}or choose another training.output_dir. A run that is gone lets go within {STALE_SECONDS:.0f} s"
    )


def _unreadable_error(path: Path, error: OSError) -> BadInputError:
    return BadInputError(
        f"training.output_dir: {str(path)!r}, the lease of its run, cannot be read: {error.strerror}; "
        "give this user the right to read it, or choose another training.output_dir"
    )


def read_lease(path: Path) -> tuple[Lease | None, int | None]:
    """Returns the lease, and when its file was last touched (nanoseconds).

    The lease is None if the file does not contain one. Both are None without a file, and if the file cannot be read:
    the heartbeat and the end of a run must not fail for that.
    """
    try:
        return _read_file(path)
    except OSError:
        return None, None


def _read_file(path: Path) -> tuple[Lease | None, int | None]:
    """Does the work of `read_lease`. Raises OSError if the file exists and cannot be read, such as another user's."""
    try:
        # Open first: network file systems refresh what they cache about a file when it is opened.
        with path.open("rb") as file:
            touched = os.fstat(file.fileno()).st_mtime_ns
            text = file.read(10_000)
    except OSError as error:
        # ESTALE: on NFS, another host removed the file after it was opened here.
        if error.errno in (errno.ENOENT, errno.ESTALE):
            return None, None
        raise
    try:
        return Lease(**json.loads(text)), touched
    except (ValueError, TypeError, RecursionError):
        return None, touched


def let_go(path: Path) -> bool:
    """Removes the lease of a process that is gone. Returns whether nobody holds the folder, as far as can be seen."""
    try:
        found, touched = _read_file(path)
        if touched is not None and found is not None and found.is_over():
            _remove_if_unchanged(path, found)
        return _read_file(path)[1] is None
    except OSError:  # it may be that of a living run
        return False


def _create_file(path: Path, lease: Lease) -> bool:
    """Creates the file with its whole content, unless it exists. Returns whether it was created."""
    temporary = path.with_name(f"{path.name}.{lease.token}")
    try:
        temporary.write_text(json.dumps(asdict(lease)), encoding="utf-8")
        with contextlib.suppress(FileExistsError):
            return _hard_link(temporary, path)
        return False
    except OSError as error:
        raise unwritable(path.parent, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _hard_link(temporary: Path, path: Path) -> bool:
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:
        # NFS may report an error for a link that it has created, and some file systems have no links at all.
        if temporary.stat().st_nlink == 2:
            return True
        with path.open("x", encoding="utf-8") as file:
            file.write(temporary.read_text(encoding="utf-8"))
    return True


def _remove_if_unchanged(path: Path, judged: Lease | None) -> None:
    """Removes a lease that is over, but not another one that was created in the meantime."""
    if read_lease(path)[0] != judged:
        return
    aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, aside)
        if read_lease(aside)[0] != judged:
            with contextlib.suppress(OSError):
                os.link(aside, path)
        aside.unlink()


class _LeaseKeeper:
    """Touches the file of a lease while the run goes on, in a thread."""

    def __init__(self, path: Path, lease: Lease) -> None:
        self._path = path
        self._lease = lease
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_alive, name="lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Ends the thread and removes the file."""
        self._ended.set()
        # With a limit: a file system that hangs must not keep the process.
        self._thread.join(BEAT_SECONDS)
        if read_lease(self._path)[0] == self._lease:
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _keep_alive(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            found, touched = read_lease(self._path)
            if found is not None and found != self._lease:
                # This process stood still for so long that another run took it for dead: both would write here.
                Terminal().fail(f"{str(self._path.parent)!r} was taken over by {found}; this run ends")
                os._exit(1)
            with contextlib.suppress(OSError, ToolkitError):  # as on a disk that is full or cannot be written
                if touched is None:
                    _create_file(self._path, self._lease)
                os.utime(self._path)
