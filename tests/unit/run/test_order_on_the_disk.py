"""What says that a run is done, and each page, is on the disk before it gets its name: a power cut leaves no half."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from toolkit.pages.run_page import RunSummary, write_report
from toolkit.run.folder.finished import is_finished, write_finished


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files and folders in the order in which they are synced and renamed."""
    found: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        found.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def renamed(source: Path, target: Path) -> None:
        found.append(f"name {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    return found


def test_a_page_is_synced_before_it_gets_its_name(done: list[str], tmp_path: Path) -> None:
    write_report(tmp_path / "report.html", RunSummary("run", "", [], {}, [], {}, {}))
    assert done == [f"sync .report.html.{os.getpid()}.tmp", "name report.html"]


def test_the_statement_comes_last_and_all_before_it_is_synced(done: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in ("report.html", "metrics.jsonl"):
        (run / name).write_text("x")
    assert not is_finished(run)
    write_finished(run, None)
    assert is_finished(run)
    first, last = done[:2], done[2:]
    assert sorted(first) == ["sync metrics.jsonl", "sync report.html"]
    assert last == [f"sync .finished.json.{os.getpid()}.tmp", "name finished.json", "sync run"]
