"""One run at a time in an output folder: a lease that lives as long as its process.

Rank 0 holds a small file in the folder and touches it every `BEAT_SECONDS`. No lock of the kernel's is used, as network
file systems know them badly or not at all: a lease is made by a hard link, which one process alone can make. It is over
when its process is gone, where that can be seen from here (the same boot, the same pid namespace), or was started by an
earlier attempt of the same job; elsewhere when nobody has touched the file for `STALE_SECONDS`. Clocks of two hosts are
never compared.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import stat
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from toolkit import ranks
from toolkit.errors import BadInputError, ToolkitError
from toolkit.terminal import Terminal, format_time

LEASE = ".lease.json"
BEAT_SECONDS = 10.0
STALE_SECONDS = 120.0
"""Longer than file systems cache a file's time, and than a process that works is kept from its beat."""


def _boot() -> str:
    """This boot of this machine, and which of its processes are to be seen from here."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no Linux
        return platform.node()


def _born(pid: int) -> str | None:
    """When a process was started, in the kernel's ticks, as pids are used again; None: there is no such process."""
    if not Path("/proc/self/stat").exists():  # no Linux
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, 0)
            return "unknown"
        return None
    try:
        # The name, which comes before, may hold spaces and brackets.
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
    except OSError:
        return None
    state, *numbers = text.split()
    # One that nobody has waited for yet is gone all the same.
    return None if state in "ZX" else numbers[18]


def _attempt() -> tuple[str | None, int]:
    """The job that started this process, and which of its attempts this is."""
    if "SLURM_JOB_ID" in os.environ:
        job, count = f"slurm {os.environ['SLURM_JOB_ID']}", int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        return job, 1000 * count + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return (None if run == "none" else run), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


@dataclass(frozen=True)
class Lease:
    """Who holds a folder."""

    host: str = field(default_factory=platform.node)
    pid: int = field(default_factory=os.getpid)
    boot: str = field(default_factory=_boot)
    born: str | None = field(default_factory=lambda: _born(os.getpid()))
    job: str | None = field(default_factory=lambda: _attempt()[0])
    attempt: int = field(default_factory=lambda: _attempt()[1])
    since: str = field(default_factory=lambda: format_time(time.time()))
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    def is_over(self) -> bool | None:
        """Whether its process is gone; None: that cannot be seen from here."""
        job, attempt = _attempt()
        if job is not None and job == self.job and attempt > self.attempt:
            return True  # a launcher ends the ranks of an attempt before it begins the next
        if self.boot != _boot():
            return None
        return _born(self.pid) != self.born

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Makes the folder and holds it until the block ends; folders that were made and stay empty are taken back.

    Raises:
        BadInputError: on every rank, where another run holds it, or where it cannot be made or written.
    """
    made = ranks.on_first_rank(lambda: make(folder))
    try:
        holder = ranks.alone_on_first_rank(lambda: _Holder(folder / LEASE, acquire(folder / LEASE)))
        try:
            yield
        finally:
            if holder is not None:
                holder.release()
    finally:
        if ranks.rank() == 0:
            with contextlib.suppress(OSError):  # it is not empty
                for each in made:
                    each.rmdir()


OF_A_RUN = ("recipe.yaml", "metrics.jsonl", "report.html", "checkpoints", "export")
"""By each of these a folder is known as that of a run, whatever else is in it."""

BESIDE_A_RUN = (".yaml", ".yml", ".sh", ".py", ".ipynb", ".log", ".out", ".err", ".md", ".txt")
"""Endings of what people and batch systems keep beside a run that is to begin."""


def require_place(folder: Path) -> None:
    """Raises BadInputError for an output folder in which no run belongs: a root, or one that holds other data."""
    if folder.exists() and not folder.is_dir():
        raise BadInputError(f"training.output_dir: {str(folder)!r} is a file; name a folder")
    if folder in (Path(folder.anchor), Path.home()):
        raise BadInputError(f"training.output_dir: {str(folder)!r} holds all else, too; name a folder of the run's own")
    if "$" in str(folder):
        raise BadInputError(
            f"training.output_dir: {str(folder)!r} holds a $, and variables in a recipe are not replaced; write the "
            "path out"
        )
    # A link that leads nowhere is there, too: what opens the folder names it.
    if not folder.exists() or any(os.path.lexists(folder / name) for name in OF_A_RUN):
        return
    others = sorted(p.name for p in folder.iterdir() if p.name[0] != "." and p.suffix not in BESIDE_A_RUN)
    if others := [name for name in others if name != "lost+found"]:
        raise BadInputError(
            f"training.output_dir: {str(folder)!r} holds something else ({', '.join(others[:5])}) and no run; name a "
            "new folder, or an empty one"
        )


def make(folder: Path) -> list[Path]:
    """Makes the output folder; what was not there, the innermost first."""
    require_place(folder)
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from error
    return made


def unwritable(folder: Path, error: OSError) -> BadInputError:
    return BadInputError(
        f"training.output_dir: {str(folder)!r} cannot be written: {error.strerror}; name another folder"
    )


def acquire(path: Path) -> Lease:
    """Makes the lease, in place of one that is over. Waits up to `STALE_SECONDS` where that cannot be seen at once."""
    _require_plain(path)
    mine, seen, until = Lease(), None, 0.0
    while not _create(path, mine):
        try:
            found, touched = _read(path)
        except OSError as error:
            raise _unreadable(path, error) from error
        if touched is None:
            continue  # it has just gone
        over = found.is_over() if found is not None else None
        if over is None and seen is None:
            seen, until = (found, touched), time.monotonic() + STALE_SECONDS
            Terminal().print(f"the output folder is held by {found}; waiting to see whether it is alive")
        if over is False or (over is None and seen != (found, touched)):
            raise _held(path.parent, found)
        if over or time.monotonic() > until:
            _take_away(path, found)
        else:
            time.sleep(min(1.0, STALE_SECONDS / 10))
    return mine


def _require_plain(path: Path) -> None:
    """Raises BadInputError for a link, which may lead nowhere, and for a pipe, which nobody may write to."""
    with contextlib.suppress(OSError):
        mode = path.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # a folder cannot be read, which says so itself
            raise BadInputError(
                f"training.output_dir: {str(path)!r}, which says who is writing there, is no plain file; remove it, or "
                "choose another training.output_dir"
            )


def _held(folder: Path, found: Lease | None) -> BadInputError:
    end = "" if found is None else f"end it (kill {found.pid} on {found.host}), "
    return BadInputError(
        f"training.output_dir: another run is writing to {str(folder)!r}: {found or 'unknown'}; wait until it is done, "
        f"{end}or choose another training.output_dir. A run that is gone lets go within {STALE_SECONDS:.0f} s"
    )


def _unreadable(path: Path, error: OSError) -> BadInputError:
    return BadInputError(
        f"training.output_dir: {str(path)!r}, which says who is writing there, cannot be read: {error.strerror}; "
        "give this user the right to read it, or choose another training.output_dir"
    )


def read_lease(path: Path) -> tuple[Lease | None, int | None]:
    """Who holds the folder, None if the file does not say; and when it was last touched, None without a file.

    A file that cannot be read is as none: the beat and the end of a run do not fail for it.
    """
    try:
        return _read(path)
    except OSError:
        return None, None


def _read(path: Path) -> tuple[Lease | None, int | None]:
    """The same. Raises OSError for a file that is there and cannot be read, as another user's own."""
    try:
        # Opened first: network file systems look anew at what they know of a file when it is opened.
        with path.open("rb") as file:
            touched = os.fstat(file.fileno()).st_mtime_ns
            text = file.read(10_000)
    except OSError as error:
        # Stale: on NFS, removed by another host after it was opened here.
        if error.errno in (errno.ENOENT, errno.ESTALE):
            return None, None
        raise
    try:
        return Lease(**json.loads(text)), touched
    except (ValueError, TypeError, RecursionError):
        return None, touched


def let_go(path: Path) -> bool:
    """Removes the lease of a process that is gone; whether nobody holds the folder, as far as is seen from here."""
    try:
        found, touched = _read(path)
        if touched is not None and found is not None and found.is_over():
            _take_away(path, found)
        return _read(path)[1] is None
    except OSError:  # it may be that of a living run
        return False


def _create(path: Path, lease: Lease) -> bool:
    """Makes the file with all its content, unless there is one; whether it was made."""
    temporary = path.with_name(f"{path.name}.{lease.token}")
    try:
        temporary.write_text(json.dumps(asdict(lease)), encoding="utf-8")
        with contextlib.suppress(FileExistsError):
            return _link(temporary, path)
        return False
    except OSError as error:
        raise unwritable(path.parent, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _link(temporary: Path, path: Path) -> bool:
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:
        # NFS may say no to a link that it has made; and some file systems have none at all.
        if temporary.stat().st_nlink == 2:
            return True
        with path.open("x", encoding="utf-8") as file:
            file.write(temporary.read_text(encoding="utf-8"))
    return True


def _take_away(path: Path, judged: Lease | None) -> None:
    """Removes a lease that is over, and no other that was made meanwhile."""
    if read_lease(path)[0] != judged:
        return
    aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, aside)
        if read_lease(aside)[0] != judged:
            with contextlib.suppress(OSError):
                os.link(aside, path)
        aside.unlink()


class _Holder:
    """Touches the file for as long as the run goes on."""

    def __init__(self, path: Path, lease: Lease) -> None:
        self._path = path
        self._lease = lease
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        self._ended.set()
        # Not for ever: a file system that hangs must not keep the process.
        self._thread.join(BEAT_SECONDS)
        if read_lease(self._path)[0] == self._lease:
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            found, touched = read_lease(self._path)
            if found is not None and found != self._lease:
                # This process stood still for so long that the run was taken for dead: two would write here.
                Terminal().fail(f"{str(self._path.parent)!r} was taken over by {found}; this run ends")
                os._exit(1)
            with contextlib.suppress(OSError, ToolkitError):  # as on a disk that is full or cannot be written
                if touched is None:
                    _create(self._path, self._lease)
                os.utime(self._path)
