"""One run at a time in an output folder: locked while its process lives, and free when it does not."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from toolkit.errors import BadInputError, RankError, ToolkitError
from toolkit.supervise import lock, output_place
from toolkit.supervise.lock import LOCK, acquire, owned, release

ELSEWHERE = "process 1 on other, since today"


def test_a_second_start_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    """In one process, too, and whoever reads or copies the file."""
    with owned(tmp_path):
        for _ in range(2):
            with pytest.raises(BadInputError, match="another run is writing to") as error, owned(tmp_path):
                pytest.fail("two runs in one folder")
            told = (tmp_path / LOCK).read_text()
            assert told.startswith(f"process {os.getpid()} on {platform.node()}, since 20")
            for words in (told, "training.output_dir", f"delete '{tmp_path / LOCK}'"):
                assert words in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_runs_one_after_another_and_what_earlier_versions_left(tmp_path: Path) -> None:
    (tmp_path / ".lease.json").write_text('{"host": "other", "pid": 1}')
    (tmp_path / LOCK).write_text(ELSEWHERE)  # of a killed run
    for _ in range(5):
        with owned(tmp_path):
            assert (tmp_path / LOCK).read_text().startswith(f"process {os.getpid()} on")
        assert not (tmp_path / LOCK).exists()


@pytest.mark.parametrize(("error", "waits"), [(BadInputError, True), (RankError, False)])
def test_another_rank_ends_after_rank_0_has_cleaned_up(
    error: type[ToolkitError], waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a launcher ends all ranks when the first one has ended; but not if it has failed alone."""
    path = tmp_path / LOCK
    monkeypatch.setattr(lock, "CLEAN_UP_SECONDS", 60.0)
    monkeypatch.setattr(lock.ranks, "rank", lambda: 1)
    monkeypatch.setattr(lock.ranks, "on_first_rank", lambda action: [])
    monkeypatch.setattr(lock.ranks, "alone_on_first_rank", lambda action: None)
    path.touch()
    of_rank_0 = threading.Timer(0.5, path.unlink)
    of_rank_0.start()
    with pytest.raises(error), owned(tmp_path):
        raise error("the data is wrong")
    assert path.exists() is not waits
    of_rank_0.join()


def test_a_folder_that_was_made_for_nothing_is_taken_back(tmp_path: Path) -> None:
    with owned(tmp_path / "outputs" / "new"):
        assert (tmp_path / "outputs" / "new" / LOCK).exists()
    assert list(tmp_path.iterdir()) == []
    with owned(tmp_path / "new"):
        (tmp_path / "new" / "recipe.yaml").touch()
    assert [found.name for found in (tmp_path / "new").iterdir()] == ["recipe.yaml"]


HOLDER = """
import multiprocessing, sys, time
from toolkit.supervise.lock import *
file = acquire(Path(sys.argv[1]))
worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=[60])
worker.start()
print(worker.pid, flush=True)
time.sleep(60)
"""


def test_a_killed_owner_holds_nothing(tmp_path: Path) -> None:
    """Even where nobody has waited for the process, and although a worker that it forked lives on."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    with pytest.raises(BadInputError, match=f"process {process.pid} on"):
        acquire(tmp_path)  # not waited for: it is on this host
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it is gone, and stays unwaited for
    file = acquire(tmp_path)
    assert is_alive(worker)
    os.kill(worker, signal.SIGKILL)
    assert (tmp_path / LOCK).read_text().startswith(f"process {os.getpid()} on"), "of this run alone"
    release(file, tmp_path)
    process.wait()


def test_a_worker_that_ends_lets_nothing_go(tmp_path: Path) -> None:
    with owned(tmp_path):
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=[0])
        worker.start()
        worker.join()
        with pytest.raises(BadInputError, match="another run is writing to"):
            acquire(tmp_path)


@pytest.mark.parametrize("goes", [True, False])
def test_a_holder_on_another_host_is_waited_for(
    goes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file server takes its time to see that the host is gone."""
    monkeypatch.setattr(lock, "LOST_HOST_SECONDS", 60.0 if goes else 0.3)
    file = acquire(tmp_path)
    (tmp_path / LOCK).write_text(ELSEWHERE)
    server = threading.Timer(0.5, file.close)
    if goes:
        server.start()
        with owned(tmp_path):
            assert (tmp_path / LOCK).read_text().startswith(f"process {os.getpid()} on")
        server.join()
    else:
        with pytest.raises(BadInputError, match=ELSEWHERE), owned(tmp_path):
            pytest.fail("two runs in one folder")
        release(file, tmp_path)
    assert capsys.readouterr().err.count(f"held by {ELSEWHERE}; waiting") == 1


def test_many_starts_at_once(tmp_path: Path) -> None:
    """Each removes the file when it is done, under the eyes of those that have opened it."""
    inside, most, refused, done = [0], [0], [0], [0]

    def attempt() -> None:
        while done[0] < 50:
            try:
                file = acquire(tmp_path)
            except BadInputError:
                refused[0] += 1
                time.sleep(0)
                continue
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0.0005)
            inside[0] -= 1
            done[0] += 1
            release(file, tmp_path)

    threads = [threading.Thread(target=attempt) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, list(tmp_path.iterdir())) == ([1], [])
    assert refused[0] > 0


def test_what_is_anothers_by_now_stays(tmp_path: Path) -> None:
    """As after somebody has deleted the file of a run, and started another one."""
    file = acquire(tmp_path)
    (tmp_path / LOCK).unlink()
    other = acquire(tmp_path)
    release(file, tmp_path)
    with pytest.raises(BadInputError, match="another run is writing to"):
        acquire(tmp_path)
    release(other, tmp_path)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_file_systems_without_locks(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def flock(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(lock.fcntl, "flock", flock)
    with owned(tmp_path):
        assert (tmp_path / LOCK).exists()
    told = capsys.readouterr().err
    assert told.count("warning") == 1
    assert f"without locks ([Errno {number}] {os.strerror(number)}): a second run" in told


def test_a_file_that_cannot_be_written_is_an_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / LOCK).mkdir()  # as another user's is to this one, but to root, too
    with pytest.raises(BadInputError, match=r"training\.output_dir: .*cannot be written: Is a directory; name another"):
        acquire(tmp_path)
    (tmp_path / LOCK).rmdir()

    def fsync(_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(lock.os, "fsync", fsync)
    with pytest.raises(BadInputError, match="cannot be written: No space left on device"):
        acquire(tmp_path)
    assert list(tmp_path.iterdir()) == []


ORPHAN = """
import sys, time
from pathlib import Path
from toolkit.supervise import parent_death
with parent_death.ended_with_launcher():
    Path(sys.argv[1]).touch()
    time.sleep(60)
"""

LAUNCHER = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", *sys.argv[1:]]).pid, flush=True)
time.sleep(60)
"""


def is_alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.parametrize("by_torch", [True, False])
def test_ranks_end_when_their_launcher_is_gone(tmp_path: Path, by_torch: bool) -> None:
    """And a process that was started otherwise may outlive what started it."""
    environment = {key: value for key, value in os.environ.items() if key != "TORCHELASTIC_RUN_ID"}
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, ORPHAN, str(tmp_path / "started")],
        stdout=subprocess.PIPE,
        text=True,
        env={**environment, **({"TORCHELASTIC_RUN_ID": "none"} if by_torch else {})},
    )
    assert launcher.stdout is not None
    rank = int(launcher.stdout.readline())
    until = time.monotonic() + 60
    while not (tmp_path / "started").exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    launcher.kill()
    launcher.wait()
    until = time.monotonic() + (20 if by_torch else 1.0)
    while is_alive(rank) and time.monotonic() < until:
        time.sleep(0.02)
    alive = is_alive(rank)
    if alive:
        os.kill(rank, signal.SIGKILL)
    assert alive is not by_torch


@pytest.mark.parametrize("folder", [Path("/"), Path.home()])
def test_folders_that_hold_all_else_are_refused(folder: Path) -> None:
    with pytest.raises(BadInputError, match="is your home or root folder"):
        output_place.make_place(folder)


def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    for name in ("run.sh", "slurm-7.out", ".git", "recipe-of-mine.yaml"):
        (tmp_path / name).touch()
    output_place.require_place(tmp_path)
    for name in ("thesis.tex", "lost+found", "photos"):
        (tmp_path / name).mkdir()
    with pytest.raises(BadInputError, match=r"holds something else \(photos, thesis\.tex\) and no run"):
        output_place.make_place(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    assert output_place.make_place(tmp_path) == [], "it is a run's, whatever lies beside it"


def test_a_variable_in_a_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"holds a \$, and variables in a recipe are not replaced"):
        output_place.make_place(tmp_path / "$HOME" / "run")
    assert not list(tmp_path.iterdir())
