"""A rank stands still, and the run ends with exit code 4 and the name of that rank; a checkpoint on request."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

from support import ranks
from support.texts import make_texts
from support.tiny import recipe_values, save_llama

from toolkit.checkpoint import latest

LIMIT_SECONDS = 4.0


def train(folder: str) -> None:
    from toolkit import Recipe, finetune

    home = Path(folder)
    # The server that forks the ranks may have been started by another test, with its own standard error.
    os.dup2(os.open(home / f"told_{os.environ['RANK']}.txt", os.O_CREAT | os.O_WRONLY), 2)
    training = {"max_steps": 100_000, "stall_minutes": LIMIT_SECONDS / 60}
    finetune(
        Recipe.from_mapping(
            recipe_values(home / "model", home / "texts.jsonl", home / "run", home / "cache", **training)
        )
    )


def until(found: Any, seconds: float) -> Any:
    """What `found()` gives once it is true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := found():
            return value
        time.sleep(0.05)
    raise AssertionError(f"nothing in {seconds:.0f} s")


def test_a_checkpoint_on_request_and_a_stopped_rank_that_ends_the_run_by_name(tmp_path: Path) -> None:
    rows = [json.dumps({"text": text}) for text in make_texts(60)]
    (tmp_path / "texts.jsonl").write_text("\n".join(rows))
    save_llama(tmp_path / "model", make_texts(60), tied=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    with ranks.started(train, 2, str(tmp_path)) as processes:
        until(lambda: metrics.exists() and metrics.read_text().count("\n") > 5, 60)
        os.kill(processes[1].pid, signal.SIGUSR1)
        until(lambda: latest(tmp_path / "run"), 30)  # the recipe asks for no checkpoint
        written = metrics.read_text().count("\n")
        until(lambda: metrics.read_text().count("\n") > written + 1, 30)  # no rank is inside the save any more
        os.kill(processes[1].pid, signal.SIGSTOP)
        for process in processes:
            process.join(ranks.LIMIT_SECONDS)
        assert [process.exitcode for process in processes] == [4, -signal.SIGKILL]
    told = (tmp_path / "run" / "stall.txt").read_text()
    held = re.search(
        rf"Rank 1 on \S+ \(pid {processes[1].pid}\) is behind: (\w+) of step (\d+), for \d+ s; (.*)\.", told
    )
    assert held is not None, told
    assert held[1] in ("data", "forward", "backward", "collective", "optimizer")
    assert int(held[2]) > 5
    assert held[3] == "its process is stopped (SIGSTOP)"
    assert "Rank 0 waits for it." in told
    assert "train_step" in told, "the stack of rank 0"
    assert "Stack of rank 1: none" in told
    assert told in (tmp_path / "told_0.txt").read_text()
