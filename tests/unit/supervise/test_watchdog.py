"""Which rank is late, who waits for whom, and what a watching thread does, on a clock of the tests' own."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cases import cases

from toolkit.pages.run_page import RunSummary, write_report
from toolkit.pages.status import Status, state_of
from toolkit.supervise import watched as watch_module
from toolkit.supervise.rank_status import RankStatus, account, behind, read_statuses, verdict
from toolkit.supervise.watched import STALL_FILE, Watch, interval_of
from toolkit.training.extensions.heartbeat import RECORD_BYTES, Heartbeat, mark_watched, read_heartbeat
from toolkit.training.phase import Phase

TABLES = cases(__file__)

LIMIT = 60.0
WAITING = RankStatus(0, "one", 10, "S", "backward", 7, 41, 70.0, 1.0)


def test_a_record_is_read_back() -> None:
    memory = bytearray(RECORD_BYTES)
    assert read_heartbeat(memory) is None
    beats = Heartbeat(memory)
    beats.enter_phase(Phase.DATA, 3)
    beats.enter_phase(Phase.FORWARD, 3)
    mark_watched(memory, 5, 6)
    beat = read_heartbeat(memory)
    assert beat is not None
    assert (beat.sequence, beat.phase, beat.step, beat.watched_ns, beat.pid) == (2, Phase.FORWARD, 3, 5, 6)
    memory[0] += 1  # half of the next one
    assert read_heartbeat(memory) is None


@pytest.mark.parametrize(("phase", "state", "seconds", "late"), TABLES["LATE"])
def test_late_is_what_stands_for_longer_than_its_phase_may_take(
    phase: str, state: str, seconds: float, late: bool
) -> None:
    silent = 0.0 if state == "S" else seconds
    rank = replace(WAITING, phase=phase, state=state, seconds=seconds, silent_seconds=silent)
    assert rank.is_late(LIMIT) is late


@pytest.mark.parametrize(("silent", "late"), [(179.0, False), (181.0, True)])
def test_a_process_of_which_nothing_is_heard_is_late_in_any_phase(silent: float, late: bool) -> None:
    """Its host is gone, or does not say that it is stopped."""
    assert replace(WAITING, phase="start", state="S", seconds=200.0, silent_seconds=silent).is_late(LIMIT) is late


def test_the_frozen_rank_is_behind_even_where_it_is_ahead() -> None:
    frozen = replace(WAITING, rank=1, pid=11, state="T", sequence=42, silent_seconds=70.0)
    assert behind([WAITING, frozen], LIMIT) == [frozen]
    text = verdict([WAITING, frozen], LIMIT)
    assert "Rank 1 on one (pid 11) is behind: backward of step 7, for 70 s; its process is stopped (SIGSTOP)." in text
    assert "Rank 0 waits for it." in text


def test_the_rank_with_the_fewest_beats_is_behind() -> None:
    reads = replace(WAITING, rank=2, phase="data", sequence=39)
    ranks = [WAITING, replace(WAITING, rank=1), reads]
    assert behind(ranks, LIMIT) == [reads]
    assert "Ranks 0, 1 wait for it." in verdict(ranks, LIMIT)
    assert behind(ranks[:2], LIMIT) == []
    assert "none is behind" in verdict(ranks[:2], LIMIT)


def test_the_account_has_a_row_and_a_stack_for_each_rank() -> None:
    lines = account([WAITING, replace(WAITING, rank=1)], {0: "  File x, in step\n"}, LIMIT).splitlines()
    assert lines[0].split() == ["rank", "host", "pid", "phase", "step", "sequence", "seconds", "process"]
    assert lines[1].split() == ["0", "one", "10", "backward", "7", "41", "70.0", "runs"]
    assert lines[lines.index("Stack of rank 0:") + 1] == "  File x, in step"
    assert lines[-1] == "Stack of rank 1: none, it did not run."


class Host:
    """A host with ranks whose records the test writes, and the watch of one of them."""

    def __init__(self, folder: Path, name: str, ranks: list[int]) -> None:
        self.local, self.shared = folder / name, folder / "run" / ".beats"
        self.local.mkdir()
        self.shared.mkdir(parents=True, exist_ok=True)
        self.records: dict[int, bytearray] = {}
        self.left: list[int] = []
        for rank in ranks:
            self.beat(rank, Phase.START, 0.0)

    def beat(self, rank: int, phase: Phase, at: float, step: int = 0) -> None:
        memory = self.records.setdefault(rank, bytearray(RECORD_BYTES))
        sequence = (getattr(read_heartbeat(memory), "sequence", 0)) + 1
        beats = Heartbeat(memory)
        beats._sequence = sequence - 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("time.monotonic_ns", lambda: int(at * 1e9))
            beats.enter_phase(phase, step)
        self.alive(rank, at)

    def alive(self, rank: int, at: float) -> None:
        """The watching thread of a rank runs, and its record is where the others read it."""
        mark_watched(self.records[rank], int(at * 1e9), os.getpid())
        (self.local / f"rank_{rank:05d}").write_bytes(self.records[rank])

    def watch(self, rank: int) -> Watch:
        memory, thread = self.records[rank], threading.get_ident()
        return Watch(memory, rank, self.local, self.shared, LIMIT, 3.0, thread, self.left.append)


@pytest.fixture(autouse=True)
def killed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    pids: list[int] = []
    monkeypatch.setattr(watch_module, "_kill_soon", pids.append)
    return pids


def looks(watch: Watch, host: Host, rank: int, start: int, end: int) -> float | None:
    """When the watch ends its process, looking every 3 s; None: it does not."""
    for now in range(start, end, 3):
        host.alive(rank, now)
        watch.look(now)
        if host.left:
            return now
    return None


def test_a_rank_that_is_frozen_is_told_by_the_other_and_killed(
    tmp_path: Path, killed: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    host = Host(tmp_path, "one", [0, 1])
    page = tmp_path / "run" / "report.html"
    status = Status("running", 6, 10, None, 0.0, 30)
    write_report(page, RunSummary("run", "", [], {}, [], {}, {}, status=status))
    for rank in (0, 1):
        host.beat(rank, Phase.BACKWARD, 100.0, step=7)
    watch = host.watch(0)
    assert looks(watch, host, 0, 100, 158) is None
    assert looks(watch, host, 0, 160, 200) == 169  # late at 163: the third look
    assert host.left == [4]
    assert killed == [os.getpid()]
    text = (tmp_path / "run" / STALL_FILE).read_text()
    assert "Rank 1 on" in text
    assert "backward of step 7, for 69 s; its process does not answer" in text
    assert "test_a_rank_that_is_frozen" in text, "the stack of the rank that runs"
    assert "training.stall_minutes: 1" in capsys.readouterr().err
    assert state_of(page) == "stalled"
    assert "backward of step 7, for 69 s; its process does not answer. Rank 0 waits for it. See" in page.read_text()


def test_other_ranks_leave_the_telling_to_the_lowest(tmp_path: Path, killed: list[int]) -> None:
    host = Host(tmp_path, "one", [0, 1])
    for rank in (0, 1):
        host.beat(rank, Phase.BACKWARD, 100.0)
    watch, ended = host.watch(1), None
    for now in range(100, 200, 3):
        host.alive(0, now)
        ended = ended or looks(watch, host, 1, now, now + 1)
    assert ended == 178, "the sixth look after 160"
    assert not (tmp_path / "run" / STALL_FILE).exists()
    assert killed == []


def test_a_beat_in_time_starts_anew(tmp_path: Path) -> None:
    host = Host(tmp_path, "one", [0])
    watch = host.watch(0)
    for beat in (0, 58, 116, 174):
        host.beat(0, Phase.FORWARD, beat)
        assert looks(watch, host, 0, beat, beat + 58) is None


def test_a_wait_for_a_slow_disk_holds_nobody_up(tmp_path: Path) -> None:
    """Rank 1 waits for its last save, which goes on; rank 0 waits for rank 1 in a collective, and cannot say so."""
    host = Host(tmp_path, "one", [0, 1])
    host.beat(0, Phase.COLLECTIVE, 0.0, step=7)
    watch, beats = host.watch(0), Heartbeat(host.records[1])
    with pytest.MonkeyPatch.context() as patch:
        beats.enter_phase(Phase.SAVE, 7)
        for now in range(0, 900, 30):
            patch.setattr("time.monotonic_ns", lambda now=now: int(now * 1e9))
            beats.wait()
            host.alive(1, now)
            assert looks(watch, host, 0, now, now + 30) is None, "fifteen minutes, of one that is allowed"
    host.alive(1, 1000)
    beat = read_heartbeat(host.records[1])
    assert beat is not None
    assert (beat.sequence, beat.phase, beat.step) == (1, Phase.WAIT, 7), "it is no beat that ranks count alike"
    ended = next(now for now in range(900, 2000, 3) if host.alive(1, now) or looks(watch, host, 0, now, now + 1))
    assert ended == 870 + 3 * LIMIT + 9, "a disk that hangs is a stall: the third look after three minutes"


def test_a_rank_that_is_dead_is_waited_for_a_minute(
    tmp_path: Path, killed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(tmp_path, "one", [0, 1])
    for rank in (0, 1):
        host.beat(rank, Phase.START, 100.0)
    monkeypatch.setattr(watch_module, "_state_of", lambda pid: "X")
    watch = host.watch(1)
    monkeypatch.setattr(watch, "_rank", 1)
    assert looks(watch, host, 1, 100, 200) == 169, "rank 0 cannot tell, and 1 does"
    assert {place.rank for place in watch.dead_ranks()} == {0, 1}
    assert killed == [], "its number may be another process's by now"


def test_a_process_that_was_paused_does_not_blame_the_others(tmp_path: Path) -> None:
    host = Host(tmp_path, "one", [0, 1])
    for rank in (0, 1):
        host.beat(rank, Phase.FORWARD, 0.0)
    watch = host.watch(0)
    assert looks(watch, host, 0, 0, 3) is None
    assert looks(watch, host, 0, 1000, 1030) is None, "both stood still, as the whole job was stopped"
    assert looks(watch, host, 0, 1030, 1100) == 1069


def test_hosts_see_each_other_through_the_shared_folder(tmp_path: Path, killed: list[int]) -> None:
    one, two = Host(tmp_path, "one", [0]), Host(tmp_path, "two", [1])
    far = two.watch(1)
    two.beat(1, Phase.FORWARD, 5000.0, step=2)  # its clock began at another time
    far.look(5000.0)
    near = one.watch(0)
    for now in range(0, 70, 3):
        one.beat(0, Phase.FORWARD, now, step=2)
        near.look(now)
    assert one.left == [4], "the other host wrote no more"
    assert killed == [], "what runs on another host is not killed from here"
    assert "Rank 1" in (tmp_path / "run" / STALL_FILE).read_text()


def test_the_files_of_many_hosts_are_read_less_often() -> None:
    expected = {(600.0, 1): 5.0, (600.0, 20): 5.0, (600.0, 64): 16.0, (600.0, 1000): 30.0, (60.0, 64): 3.0}
    expected |= {(1.0, 1): 0.2, (float("inf"), 1): 5.0, (float("inf"), 64): 16.0}
    assert {given: interval_of(*given) for given in expected} == expected


def test_a_run_is_read_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(tmp_path, "one", [0, 1])
    monkeypatch.setattr("time.time", lambda: 1000.0)
    host.beat(1, Phase.DATA, 10.0, step=4)
    host.watch(0).look(12.0)
    found: list[Any] = [(r.rank, r.phase, r.step, r.seconds) for r in read_statuses(tmp_path / "run", 1005.0)]
    assert found == [(0, "start", 0, 17.0), (1, "data", 4, 7.0)]
    assert read_statuses(tmp_path, 1005.0) == []


@pytest.mark.parametrize("error", [FileNotFoundError(2, "no such folder"), OSError(116, "stale file handle")])
def test_a_folder_that_cannot_be_listed_ends_no_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    """Rank 0 removes the shared folder at its end, perhaps between the two calls with which another rank lists it."""

    def raises(*_: object) -> None:
        raise error

    host = Host(tmp_path, "one", [0])
    host.beat(0, Phase.FORWARD, 0.0, step=2)
    watch = host.watch(0)
    monkeypatch.setattr(os, "scandir", raises)
    assert looks(watch, host, 0, 0, 100) == 69
    assert read_statuses(tmp_path / "run", 1005.0) == []
