"""A host's only rank that is stopped is ended, and one that waits for a rank that never starts ends itself."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from toolkit.supervise import rendezvous
from toolkit.supervise.rank_status import read_statuses
from toolkit.supervise.rendezvous import timed_rendezvous
from toolkit.supervise.watchdog_process import guarded
from toolkit.training.extensions.heartbeat import RECORD_BYTES, Heartbeat, mark_watched
from toolkit.training.phase import Phase


def test_a_stopped_rank_that_is_alone_on_its_host_is_ended_and_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    local, shared = tmp_path / "local", tmp_path / "run" / ".beats"
    local.mkdir()
    shared.mkdir(parents=True)
    rank = subprocess.Popen(["sleep", "60"])
    memory = bytearray(RECORD_BYTES)
    Heartbeat(memory).enter_phase(Phase.BACKWARD, 7)
    mark_watched(memory, time.monotonic_ns(), rank.pid)
    (local / "rank_00003").write_bytes(memory)
    rank.send_signal(signal.SIGSTOP)
    try:
        with guarded(local, shared, 1.0, 0.1):
            assert rank.wait(400) == -signal.SIGKILL
            assert [(found.rank, found.state) for found in read_statuses(tmp_path / "run", time.time())] == [(3, "T")]
    finally:
        rank.kill()
    told = (tmp_path / "run" / "stall.txt").read_text()
    assert f"(pid {rank.pid}) is behind: backward of step 7" in told
    assert "its process is stopped (SIGSTOP)" in told
    assert told in capfd.readouterr().err


def test_a_guard_ends_with_its_rank_even_where_a_child_keeps_the_pipe(tmp_path: Path) -> None:
    (tmp_path / "rank_00000").write_bytes(bytes(RECORD_BYTES))
    pid = os.fork()
    if not pid:
        with guarded(tmp_path, tmp_path, 60.0, 0.1):
            if os.fork():
                os.kill(os.getpid(), signal.SIGKILL)
            wait_for((tmp_path / "over").exists)  # holds the other end of the guard's standard input
        os._exit(0)
    os.waitpid(pid, 0)
    try:
        assert wait_for(lambda: not _guards(tmp_path))
    finally:
        (tmp_path / "over").touch()


def wait_for(holds: Callable[[], bool]) -> bool:
    """Whether it holds within half a minute."""
    until = time.monotonic() + 30.0
    while not holds() and time.monotonic() < until:
        time.sleep(0.05)
    return holds()


def _guards(folder: Path) -> list[str]:
    """Processes that watch over this folder."""
    found = subprocess.run(["ps", "-ww", "-eo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in found if "toolkit.supervise.watchdog_process" in line and str(folder) in line]


def test_ranks_that_do_not_meet_say_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr(rendezvous, "SHORTEST_SECONDS", 0.05)
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "node0"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, value)
    with timed_rendezvous(0.1):  # six seconds
        time.sleep(0.2)
    with timed_rendezvous(None):
        time.sleep(0.2)
    assert left == []
    with timed_rendezvous(0.0001):
        time.sleep(0.5)
    assert left == [4]
    told = capsys.readouterr().err
    assert "error: rank 1 on " in told
    assert "has waited 0 s for all 2 ranks to meet at node0:29500 (training.stall_minutes" in told
    monkeypatch.setenv("WORLD_SIZE", "1")
    with timed_rendezvous(0.0001):
        time.sleep(0.2)
    assert left == [4]
