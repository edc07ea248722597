"""A stand-in for torch's launcher: it starts the ranks of a host, and ends the others when one has failed.

Its ranks run `recipes/finetune.py`'s own command. They are forked from the server of ranks.py, so that a start costs
milliseconds, where a real launcher's ranks import for seconds. On two hosts, each has its own network, name, folder for
temporary files, and time since it was started.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import mmap
import os
import platform
import signal
import socket
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from support import ranks
from support.two_hosts import ADDRESSES, Host
from toolkit.ranks import free_port

NUM_RANKS = 2
SECONDS_TO_END = 5.0
"""Of a rank that is asked to after another has failed; torch gives 30."""

NEW_TIME, NEW_NAME, NEW_NETWORK = 0x80, 0x04000000, 0x40000000
"""Linux's CLONE_NEWTIME, CLONE_NEWUTS and CLONE_NEWNET."""


@dataclass
class Attempt:
    """A start of a run.

    Attributes:
        launchers: a process for each host.
        folder: where they write the process ids of their ranks, and then how these have ended.
    """

    launchers: list[Any]
    folder: Path
    started: float = field(default_factory=time.monotonic)

    @property
    def ranks(self) -> list[int]:
        """Process ids, by rank; empty until all are started."""
        found = sorted(self.folder.glob("pids_*.json"))
        return [pid for path in found for pid in json.loads(path.read_text())] if self._is_all(found) else []

    @property
    def codes(self) -> list[int]:
        """Exit codes by rank, negative where a signal ended it; empty where a launcher could not say."""
        found = sorted(self.folder.glob("codes_*.json"))
        return [code for path in found for code in json.loads(path.read_text())] if self._is_all(found) else []

    def _is_all(self, found: list[Path]) -> bool:
        return len(found) == len(self.launchers)

    @property
    def has_ended(self) -> bool:
        """Whether neither a launcher nor a rank is left."""
        return not any(launcher.is_alive() for launcher in self.launchers) and not any(map(_is_alive, self.ranks))

    def wait(self, seconds: float) -> bool:
        """Waits for the end for so long; whether it has come."""
        until = time.monotonic() + seconds
        while not self.has_ended:
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
        return True

    def tell_where(self) -> None:
        """Ranks that are left write their stacks into the log."""
        for pid in filter(_is_alive, self.ranks):
            os.kill(pid, signal.SIGUSR2)
        time.sleep(2.0)

    def kill(self) -> None:
        for launcher in self.launchers:
            launcher.kill()
            launcher.join()
        for pid in self.ranks:
            if _is_alive(pid):
                os.kill(pid, signal.SIGKILL)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@contextmanager
def attempt(arguments: list[str], log: Path, hosts: list[Host], clock: Path) -> Iterator[Attempt]:
    """Starts the ranks of a run: on one host, or where two are given one on each. Whatever is left is killed.

    Args:
        arguments: of `recipes/finetune.py`.
        log: what the ranks print is appended there.
        clock: a file with 8 bytes, a double: seconds by which the ranks' clocks are wrong.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        port = free_port()
        launchers = []
        for number in range(len(hosts) or 1):
            host = hosts[number] if hosts else None
            starting = ranks.started(_launch, 1, number, host, port, arguments, folder, str(log), str(clock))
            launchers += stack.enter_context(starting)
        found = Attempt(launchers, Path(folder))
        try:
            yield found
        finally:
            found.kill()


@ranks.alone
def _launch(number: int, host: Host | None, port: int, arguments: list[str], folder: str, log: str, clock: str) -> None:
    """What a launcher does."""
    if host is not None:
        _move_to(host, number)
    mine = range(NUM_RANKS) if host is None else [number]
    terms = {"MASTER_ADDR": ADDRESSES[0] if host else "127.0.0.1", "MASTER_PORT": str(port)}
    terms |= {"WORLD_SIZE": str(NUM_RANKS), "LOCAL_WORLD_SIZE": str(len(mine)), "TORCHELASTIC_RUN_ID": "none"}
    started = [_fork(rank, rank - mine[0], terms, arguments, log, clock) for rank in mine]
    asked: list[int] = []

    def hand_on(signum: int, frame: FrameType | None) -> None:
        asked.append(signum)
        _send(started, signum)

    signal.signal(signal.SIGTERM, hand_on)
    _write(Path(folder) / f"pids_{number}.json", started)
    _write(Path(folder) / f"codes_{number}.json", _end_together(started, asked))


def _end_together(started: list[int], asked: list[int]) -> list[int]:
    """Exit codes, once all have ended."""
    codes: dict[int, int] = {}
    until = float("inf")
    while len(codes) < len(started):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            time.sleep(0.02)
        else:
            codes[pid] = os.waitstatus_to_exitcode(status)
        left = [pid for pid in started if pid not in codes]
        if any(codes.values()) and until == float("inf") and not asked:
            until = time.monotonic() + SECONDS_TO_END
            _send(left, signal.SIGTERM)
        elif time.monotonic() > until:
            _send(left, signal.SIGKILL)
    return [codes[pid] for pid in started]


def _send(pids: list[int], number: int) -> None:
    for pid in pids:
        if _is_alive(pid):
            os.kill(pid, number)


def _write(path: Path, numbers: list[int]) -> None:
    path.with_suffix(".new").write_text(json.dumps(numbers))
    path.with_suffix(".new").rename(path)


def _move_to(host: Host, number: int) -> None:
    """This process and its children live on that host from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{host.name}") as namespace:
        assert libc.setns(namespace.fileno(), NEW_NETWORK) == 0, os.strerror(ctypes.get_errno())
    assert libc.unshare(NEW_NAME | NEW_TIME) == 0, os.strerror(ctypes.get_errno())
    socket.sethostname(f"node{number}")
    platform._uname_cache = None  # type: ignore[attr-defined]
    # Of the children: how long a host has been up is its own affair.
    Path("/proc/self/timens_offsets").write_text(f"monotonic {number * 1_000_000} 0\nboottime {number * 1_000_000} 0\n")
    temporary = Path(tempfile.gettempdir()) / f"{host.name}-{number}"
    temporary.mkdir(exist_ok=True)
    # torch asks for the name of each address, and there is no name server: it would wait for 20 s.
    resolver = {"RES_OPTIONS": "timeout:1 attempts:1"}
    os.environ |= {"TMPDIR": str(temporary), "GLOO_SOCKET_IFNAME": host.interface, **resolver}
    tempfile.tempdir = None


def _fork(rank: int, local: int, terms: dict[str, str], arguments: list[str], log: str, clock: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ |= {**terms, "RANK": str(rank), "LOCAL_RANK": str(local)}
        descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        faulthandler.register(signal.SIGUSR2, all_threads=True)
        _read_clock_from(clock)
        from toolkit.cli.ranks.finetune import finetune_command

        code = finetune_command(arguments)
    finally:
        os._exit(code)
    return 0


def _read_clock_from(path: str) -> None:
    """Moves what Python tells of the time of day, and of a file's."""
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 8)
    now, utime, strftime, localtime = time.time, os.utime, time.strftime, time.localtime

    def moved() -> float:
        return now() + float(struct.unpack("d", memory)[0])

    time.time = moved
    time.strftime = lambda form, at=None: strftime(form, localtime(moved()) if at is None else at)  # type: ignore[assignment]

    def touch(path: Any, times: Any = None, **rest: Any) -> None:
        utime(path, times if times or "ns" in rest else (moved(), moved()), **rest)

    os.utime = touch
