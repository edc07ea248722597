"""One run at a time in an output folder: held while its process lives, taken over when it does not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import BadInputError, RankError, ToolkitError
from toolkit.run.folder.folder import clear_killed
from toolkit.supervise import lease, output_place
from toolkit.supervise.lease import LEASE, Lease, acquire, owned, read_lease

ELSEWHERE = {"host": "other", "boot": "another boot", "pid": 1}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(lease, "STALE_SECONDS", 0.6)
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.1)
    for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / LEASE


def put(path: Path, held: Lease) -> Lease:
    path.write_text(json.dumps(asdict(held)))
    return held


def test_a_second_start_is_refused_and_told_who_holds_it(path: Path) -> None:
    with owned(path.parent):
        mine, _ = read_lease(path)
        assert mine is not None
        with pytest.raises(BadInputError, match="another run is writing to") as error, owned(path.parent):
            pytest.fail("two runs in one folder")
        for told in (f"process {os.getpid()} on {mine.host}", mine.since, "kill", "training.output_dir"):
            assert told in str(error.value)
        assert read_lease(path)[0] == mine
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize(("error", "waits"), [(BadInputError, True), (RankError, False)])
def test_another_rank_ends_after_rank_0_has_cleaned_up(
    error: type[ToolkitError], waits: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a launcher ends all ranks when the first one has ended; but not if it has failed alone."""
    monkeypatch.setattr(lease, "BEAT_SECONDS", 60.0)
    monkeypatch.setattr(lease.ranks, "rank", lambda: 1)
    monkeypatch.setattr(lease.ranks, "on_first_rank", lambda action: [])
    monkeypatch.setattr(lease.ranks, "alone_on_first_rank", lambda action: None)
    path.touch()
    of_rank_0 = threading.Timer(0.5, path.unlink)
    of_rank_0.start()
    with pytest.raises(error), owned(path.parent):
        raise error("the data is wrong")
    assert path.exists() is not waits
    of_rank_0.join()


def test_a_folder_that_was_made_for_nothing_is_taken_back(path: Path) -> None:
    with owned(path.parent / "outputs" / "new"):
        assert (path.parent / "outputs" / "new" / LEASE).exists()
    assert list(path.parent.iterdir()) == []
    with owned(path.parent / "new"):
        (path.parent / "new" / "recipe.yaml").touch()
    assert [found.name for found in (path.parent / "new").iterdir()] == ["recipe.yaml"]


def test_a_killed_owner_holds_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where nobody has waited for the process, and its pid is not free."""
    code = f"import time; from toolkit.supervise.lease import *; acquire(Path({str(path)!r})); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code])
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    with pytest.raises(BadInputError, match=f"process {process.pid} on"):
        acquire(path)
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it is gone, and stays unwaited for
    monkeypatch.setattr(lease, "STALE_SECONDS", 20.0)
    started = time.monotonic()
    mine = acquire(path)
    assert time.monotonic() - started < lease.STALE_SECONDS / 2
    assert read_lease(path)[0] == mine
    process.wait()


def test_what_a_killed_run_leaves_is_cleared_and_a_living_ones_stays(path: Path) -> None:
    beats = path.parent / ".beats"
    for held in (Lease(), Lease(**ELSEWHERE)):
        beats.mkdir(exist_ok=True)
        put(path, held)
        clear_killed(path.parent)
        assert read_lease(path)[0] == held, "its process is there, or may be"
        assert beats.exists()
    put(path, Lease(born="1"))
    clear_killed(path.parent)
    assert list(path.parent.iterdir()) == []
    beats.mkdir()
    clear_killed(path.parent)
    assert list(path.parent.iterdir()) == []


def test_a_pid_that_is_used_again_is_another_process(path: Path) -> None:
    put(path, Lease(born="1"))
    acquire(path)


def test_on_another_host_it_is_over_when_nobody_touches_it(path: Path) -> None:
    put(path, Lease(**ELSEWHERE))
    started = time.monotonic()
    mine = acquire(path)
    assert time.monotonic() - started >= lease.STALE_SECONDS
    assert read_lease(path)[0] == mine


def test_on_another_host_it_is_held_while_somebody_touches_it(path: Path) -> None:
    held = put(path, Lease(**ELSEWHERE))
    holder = lease._LeaseKeeper(path, held)
    with pytest.raises(BadInputError, match="process 1 on other"):
        acquire(path)
    holder.release()
    assert not path.exists()


@pytest.mark.parametrize(
    ("name", "count"), [("SLURM_JOB_ID", "SLURM_RESTART_COUNT"), ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")]
)
def test_the_next_attempt_of_a_job_does_not_wait(
    path: Path, monkeypatch: pytest.MonkeyPatch, name: str, count: str
) -> None:
    monkeypatch.setenv(name, "77")
    monkeypatch.setattr(lease, "STALE_SECONDS", 60.0)
    put(path, Lease(**ELSEWHERE))
    monkeypatch.setenv(count, "1")
    acquire(path)
    put(path, Lease(**ELSEWHERE, attempt=0, job="another"))
    monkeypatch.setattr(lease, "STALE_SECONDS", 0.1)
    assert Lease(**ELSEWHERE, attempt=0, job="another").is_over() is None


def test_of_many_that_find_it_stale_one_takes_it(path: Path) -> None:
    put(path, Lease(**ELSEWHERE))
    outcomes: list[object] = []

    def attempt() -> None:
        try:
            outcomes.append(acquire(path))
        except BadInputError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=attempt) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [outcome for outcome in outcomes if isinstance(outcome, Lease)]
    assert len(outcomes) == 12
    assert winners == [read_lease(path)[0]]
    assert [found.name for found in path.parent.iterdir()] == [LEASE]


@pytest.mark.parametrize("text", ["", "[]", '{"pid": 1, "x": 2}', "{" * 5000])
def test_a_file_that_says_nothing_is_waited_for(path: Path, text: str) -> None:
    path.write_text(text)
    assert read_lease(path)[0] is None
    assert read_lease(path)[1] is not None
    acquire(path)


def test_a_lease_that_cannot_be_read_is_an_error_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.mkdir()  # as another user's lease is to this one, but to root, too
    create, tries = lease._create_file, []

    def counted(*args: Any) -> bool:
        tries.append(args)
        assert len(tries) < 10, "it tries without end"
        return create(*args)

    monkeypatch.setattr(lease, "_create_file", counted)
    with pytest.raises(BadInputError, match=r"training\.output_dir: .*cannot be read: Is a directory; .*choose"):
        acquire(path)
    assert not lease.let_go(path), "it may be that of a living run"


def test_who_stood_still_and_was_replaced_ends(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    mine = acquire(path)
    holder = lease._LeaseKeeper(path, mine)
    monkeypatch.setattr(lease.os, "_exit", lambda code: (ended.append(code), holder._ended.set()))
    other = put(path, replace(mine, token="another"))
    holder._thread.join(5)
    assert ended == [1]
    holder.release()
    assert read_lease(path)[0] == other, "what is another's stays"


def test_a_lease_that_was_deleted_is_made_again(path: Path) -> None:
    with owned(path.parent):
        mine, _ = read_lease(path)
        path.unlink()
        until = time.monotonic() + 10
        while read_lease(path)[0] != mine:
            assert time.monotonic() < until
            time.sleep(0.02)


def without_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(lease.os, "link", refuse)


@pytest.mark.parametrize("prepare", [without_links])
def test_file_systems_without_links(
    path: Path, monkeypatch: pytest.MonkeyPatch, prepare: Callable[[pytest.MonkeyPatch], None]
) -> None:
    prepare(monkeypatch)
    mine = acquire(path)
    assert read_lease(path)[0] == mine
    with pytest.raises(BadInputError, match="another run is writing"):
        acquire(path)


ORPHAN = """
import sys, time
from pathlib import Path
from toolkit.supervise import parent_death
parent_death.LOOK_SECONDS, parent_death.GRACE_SECONDS = 0.1, 0.3
with parent_death.ended_with_launcher():
    Path(sys.argv[1]).touch()
    time.sleep(60)
"""

LAUNCHER = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", *sys.argv[1:]]).pid, flush=True)
time.sleep(60)
"""


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
    while lease._start_time(rank) is not None and time.monotonic() < until:
        time.sleep(0.02)
    alive = lease._start_time(rank) is not None
    if alive:
        os.kill(rank, signal.SIGKILL)
    assert alive is not by_torch


def test_a_second_process_of_one_attempt_takes_nothing_over(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one shell of a batch job two runs have the same job and the same attempt."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    first = acquire(path)
    assert first.is_over() is False
    with pytest.raises(BadInputError, match="another run is writing to"):
        acquire(path)


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
