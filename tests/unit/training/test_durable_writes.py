"""On a full disk records wait, in order, and catch up; half a line is never left."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import BadInputError, ToolkitError
from toolkit.training import durable_writes
from toolkit.training.durable_writes import LinesFile, patiently


class Disk:
    """Takes `room` bytes, and no more; with `error` it takes none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room, self.error = 10**9, errno.ENOSPC
        self._write = os.pwrite
        monkeypatch.setattr(durable_writes.os, "pwrite", self.pwrite)

    def pwrite(self, descriptor: int, data: bytes, offset: int) -> int:
        if self.room == 0:
            raise OSError(self.error, os.strerror(self.error))
        written = self._write(descriptor, data[: self.room], offset)
        self.room -= written
        return written


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(durable_writes.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(durable_writes.time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_records_wait_and_catch_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    disk, clock, told = Disk(monkeypatch), Clock(monkeypatch), []
    path = tmp_path / "metrics.jsonl"
    file = LinesFile(path, told.append)
    disk.room, disk.error = 20, error
    lines = [f'{{"step": {step:03}}}\n' for step in range(100)]
    for line in lines[:90]:
        file.append(line)
        clock.sleep(2.0)
        assert path.read_text() == lines[0], "the second line does not fit, and half of it is none"
    assert len(told) == 3, "once a minute in three minutes"
    assert told[0].endswith(f"({os.strerror(error)}): training goes on, and 1 records wait for room")
    assert " 61 records wait for room" in told[2]
    disk.room = 10**9
    for line in lines[90:]:
        clock.sleep(2.0)
        file.append(line)
    assert file.catch_up()
    assert path.read_text() == "".join(lines)
    assert told[3:] == [f"{path} is written again, and holds all records"]


def test_a_resumed_file_keeps_what_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, path = Disk(monkeypatch), tmp_path / "metrics.jsonl"
    path.write_text("1\n2\n3\nhal")
    disk.room = 0
    file = LinesFile(path, pytest.fail)
    file.replace(["1\n", "2\n"])
    assert path.read_text() == "1\n2\n", "later records and half a line are dropped, although the disk is full"
    disk.room = 100
    file.append("x\n")
    assert path.read_text() == "1\n2\nx\n"
    file.replace(["1\n", "y\n"])
    assert path.read_text() == "1\ny\n"


def failing(times: int, error: Exception) -> Callable[[], None]:
    left = [error] * times

    def write() -> None:
        if left:
            raise left.pop()

    return write


def test_the_end_of_a_run_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    told: list[str] = []
    waits: list[None] = []
    full = OSError(errno.ENOSPC, "No space left on device")
    wrapped = BadInputError("cannot be written")
    wrapped.__cause__ = full
    for error in (full, wrapped):
        told.clear()
        waits.clear()
        patiently(failing(30, error), "the report", told.append, lambda: waits.append(None))
        assert told == ["the report cannot be written (No space left on device); waiting for room"] * 3
        assert len(waits) == 30, "the watch hears of each"
    with pytest.raises(ToolkitError, match="start the same command again"):
        patiently(failing(10**4, full), "the report", told.append, lambda: None)
    with pytest.raises(PermissionError):
        patiently(failing(1, PermissionError(errno.EACCES, "no")), "the report", told.append, lambda: None)


def test_a_run_goes_on_while_its_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Metrics` itself, whose trackers still get each record."""
    from types import SimpleNamespace

    from toolkit.training.metrics import Metrics

    disk, given = Disk(monkeypatch), []
    accelerator: Any = SimpleNamespace(is_main_process=True)
    told: list[str] = []
    monkeypatch.setattr(Metrics, "warn", lambda self, message: told.append(message))
    path = tmp_path / "metrics.jsonl"
    with Metrics(accelerator, path, 10, 10, to_trackers=lambda *record: given.append(record)) as metrics:
        for step in range(6):
            disk.room = 10**9 if step in (0, 5) else 0
            metrics.evaluation({"step": step, "loss": 1.0, "what": "text"})
    assert len(path.read_text().splitlines()) == 6
    assert told[0].startswith(f"{path} cannot be written")
    assert given == [("eval", {"step": step, "loss": 1.0}, step) for step in range(6)]


def deleted(path: Path) -> None:
    path.unlink()


def renamed(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def rotated(path: Path) -> None:
    path.rename(path.with_name("metrics.jsonl.1"))
    path.touch()


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def cut(path: Path) -> None:
    os.truncate(path, 7)


def grown(path: Path) -> None:
    with path.open("a") as file:
        file.write("a line of somebody else\n")


@pytest.mark.parametrize("change", [deleted, renamed, rotated, emptied, cut, grown])
def test_all_records_are_there_whatever_becomes_of_the_file(change: Callable[[Path], None], tmp_path: Path) -> None:
    told: list[str] = []
    path = tmp_path / "metrics.jsonl"
    file = LinesFile(path, told.append)
    lines = [f'{{"step": {step:03}}}\n' for step in range(9)]
    for line in lines[:5]:
        file.append(line)
    change(path)
    for line in lines[5:]:
        file.append(line)
    assert path.read_text() == "".join(lines)
    assert not told


def test_records_are_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "metrics.jsonl").symlink_to("precious")
    told: list[str] = []
    LinesFile(tmp_path / "metrics.jsonl", told.append).append("{}\n")
    assert (tmp_path / "precious").read_text() == "mine"
    assert "cannot be written" in told[0]
