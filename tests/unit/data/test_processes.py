"""Tokenising in several processes (data.num_proc)."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.ranks import LIMIT_SECONDS
from support.texts import write_rows
from test_build import TEXTS, rows_of, section

from toolkit.data import build
from toolkit.data.documents import processes
from toolkit.data.tokens import tokenizer
from toolkit.errors import DataError


@pytest.fixture
def byte_pairs() -> Any:
    return tokenizer._train_byte_pairs(iter(TEXTS), 320)


@pytest.mark.slow
def test_tokenised_in_several_processes_the_rows_are_the_same(
    tmp_path: Path, byte_pairs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever tokenises a batch: with a byte-order mark before the first row, and a last one that is no text."""
    monkeypatch.setattr(processes, "BATCH_ROWS", 8)
    lines = [json.dumps({"text": text}) for text in TEXTS]
    lines[7] = lines[30] = "no row"
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + "\n".join(lines).encode() + b"\n\xff\n")
    found = []
    monkeypatch.setattr(processes, "ALONE_SECONDS", 1e-9)  # one batch here, and the rest in others
    monkeypatch.setattr(processes, "affordable_processes", lambda: 2)
    for number, num_proc in enumerate((1, 3, "auto")):
        data = section(tmp_path, tmp_path / "a.jsonl", num_proc=num_proc)
        data = data.model_copy(update={"cache_dir": str(tmp_path / f"cache-{number}")})
        built = build.build(data, byte_pairs, seed=0)
        dropped = built.report.to_dict()["train"]["dropped"]
        assert dropped == {
            "not JSON": {"count": 2, "rows": ["a.jsonl:8", "a.jsonl:31"]},
            "not UTF-8": {"count": 1, "rows": ["a.jsonl:41"]},
        }
        found.append(rows_of(built.train))
    assert found[0] == found[1] == found[2]
    assert not multiprocessing.active_children()
    assert forkserver._forkserver._forkserver_pid is None  # type: ignore[attr-defined]


def many_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(processes, "BATCH_ROWS", 8)
    return write_rows(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])


@pytest.mark.slow
def test_no_process_is_forked_for_tokenising(tmp_path: Path, byte_pairs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that another thread holds at that moment would stay locked in it for good."""
    forks: list[int] = []
    os.register_at_fork(after_in_parent=lambda: forks.append(1))
    build.build(section(tmp_path, many_lines(tmp_path, monkeypatch), num_proc=2), byte_pairs, seed=0)
    assert forks == []


@pytest.mark.slow
def test_a_script_without_a_guard_can_tokenise_in_several_processes(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_SECONDS
    )
    assert done.stdout.split() == ["runs", "tokenised"], done.stderr


SCRIPT = f"""
from toolkit.data import build; from toolkit.data.documents import processes; from toolkit.data.tokens import tokenizer
from toolkit.recipe.schema import DataSection

print("runs")
processes.BATCH_ROWS = 8
tokens = tokenizer._train_byte_pairs(iter({TEXTS}), 320)
data = DataSection(train="a.jsonl", num_proc=2, max_length=16, cache_dir="cache")
print("tokenised" if len(build.build(data, tokens, seed=0).train) else "none")
"""


@pytest.mark.slow
def test_a_process_that_is_killed_is_an_error_with_a_cure(
    tmp_path: Path, byte_pairs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(KILLED)
    data = section(tmp_path, many_lines(tmp_path, monkeypatch), num_proc=2, map=f"{tmp_path}/mine.py:killed")
    with pytest.raises(DataError, match=r"^data\.num_proc: a process that tokenises was killed"):
        build.build(data, byte_pairs, seed=0)
    assert not list(tmp_path.glob("cache/*/*.arrow"))


@pytest.mark.slow
def test_no_process_outlives_the_one_that_reads_the_rows(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    (tmp_path / "mine.py").write_text(SLEEPS)
    (tmp_path / "script.py").write_text(SCRIPT.replace("num_proc=2", "num_proc=2, map='mine.py:sleeps'"))
    reader = subprocess.Popen([sys.executable, "script.py"], cwd=tmp_path, start_new_session=True)
    wait_until(lambda: len(list(tmp_path.glob("asleep-*"))) == 2)
    reader.kill()
    reader.wait()
    wait_until(lambda: not any(psutil.pid_exists(int(file.name.split("-")[1])) for file in tmp_path.glob("asleep-*")))


KILLED = """
import multiprocessing, os


def killed(row):
    if multiprocessing.parent_process():  # the one that reads the rows looks at the first ones
        os.kill(os.getpid(), 9)
    return row
"""

SLEEPS = """
import multiprocessing, os, pathlib, time


def sleeps(row):
    if not multiprocessing.parent_process():
        return row
    (pathlib.Path(__file__).parent / f"asleep-{os.getpid()}").touch()
    time.sleep(600)
"""


def wait_until(is_so: Callable[[], bool]) -> None:
    ends = time.monotonic() + LIMIT_SECONDS
    while not is_so():
        assert time.monotonic() < ends
        time.sleep(0.1)
