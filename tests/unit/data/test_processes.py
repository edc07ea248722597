"""Tokenising in several processes (data.num_proc)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.ranks import LIMIT_SECONDS
from test_build import TEXTS, jsonl, rows_of, section

from toolkit.data import build
from toolkit.data.documents import documents
from toolkit.data.rows import sources
from toolkit.data.tokens import tokenizer
from toolkit.errors import DataError
from toolkit.recipe.schema import SourceSection


@pytest.fixture
def byte_pairs() -> Any:
    return tokenizer._train_byte_pairs(iter(TEXTS), 320)


@pytest.mark.slow
def test_tokenised_in_several_processes_the_rows_are_the_same(
    tmp_path: Path, byte_pairs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "SHARD_BYTES", 700)
    lines = [json.dumps({"text": text}) for text in TEXTS]
    lines[7] = lines[30] = "no row"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    found = []
    for number, num_proc in enumerate((1, 3)):
        data = section(tmp_path, tmp_path / "a.jsonl", num_proc=num_proc)
        data = data.model_copy(update={"cache_dir": str(tmp_path / f"cache-{number}")})
        built = build.build(data, byte_pairs, seed=0)
        dropped = built.report.to_dict()["train"]["dropped"]
        assert dropped == {"not JSON": {"count": 2, "rows": ["a.jsonl:8", "a.jsonl:31"]}}
        found.append(rows_of(built.train))
    assert found[0] == found[1]
    assert len(sources.open_source(SourceSection(path=str(tmp_path / "a.jsonl")), "data.train").shards) > 3


def many_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sources, "SHARD_BYTES", 700)
    return jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])


@pytest.mark.slow
def test_no_process_is_forked_for_tokenising(tmp_path: Path, byte_pairs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that another thread holds at that moment would stay locked in it for good."""
    forks: list[int] = []
    os.register_at_fork(after_in_parent=lambda: forks.append(1))
    build.build(section(tmp_path, many_lines(tmp_path, monkeypatch), num_proc=2), byte_pairs, seed=0)
    assert forks == []


@pytest.mark.slow
def test_a_script_without_a_guard_can_tokenise_in_several_processes(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_SECONDS
    )
    assert done.stdout.split() == ["runs", "tokenised"], done.stderr


SCRIPT = f"""
from toolkit.data import build; from toolkit.data.rows import sources; from toolkit.data.tokens import tokenizer
from toolkit.recipe.schema import DataSection

print("runs")
sources.SHARD_BYTES = 700
tokens = tokenizer._train_byte_pairs(iter({TEXTS}), 320)
data = DataSection(train="a.jsonl", num_proc=2, max_length=16, cache_dir="cache")
print("tokenised" if len(build.build(data, tokens, seed=0).train) else "none")
"""


@pytest.mark.slow
def test_a_process_that_is_killed_is_an_error_with_a_cure(
    tmp_path: Path, byte_pairs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "_rows", killed)
    with pytest.raises(DataError, match=r"^data\.num_proc: a process that tokenises was killed"):
        build.build(section(tmp_path, many_lines(tmp_path, monkeypatch), num_proc=2), byte_pairs, seed=0)
    assert not list(tmp_path.glob("cache/*/*.arrow"))


def killed(**_: Any) -> Iterator[dict[str, Any]]:
    os.kill(os.getpid(), signal.SIGKILL)
    yield {}
