"""Starts the sharded side's ranks, waits for them, and names the one that fails."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from toolkit.errors import BadInputError, ToolkitError
from toolkit.recipe.recipe import Recipe
from toolkit.verify.launch import Launch, rank_environments
from toolkit.verify.results import Outcome, ShardedRun


def run_ranks(recipe: Recipe, launch: Launch, steps: int, folder: Path, seconds: float) -> ShardedRun:
    """Runs the sharded side and reads what the ranks have left in `folder`."""
    (folder / "job.json").write_text(json.dumps({"recipe": recipe.to_yaml(), "steps": steps}), encoding="utf-8")
    processes = []
    try:
        for environment in rank_environments(launch, folder):
            processes.append(_start_rank(environment, folder))
        _await_ranks(processes, folder, seconds)
    finally:
        for process in processes:
            # All of them: once one has failed, the others may wait for it in a collective.
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
    results = [_outcome_of(folder, rank)["result"] for rank in range(len(processes))]
    return _merged(results, load_file(folder / "weights.safetensors"))


def _start_rank(environment: dict[str, str], folder: Path) -> subprocess.Popen[bytes]:
    with (folder / f"rank-{environment['RANK']}.log").open("wb") as log:
        return subprocess.Popen(  # noqa: S603 (this interpreter, this module)
            # -P: a file in the working directory must not stand in for a module.
            [sys.executable, "-P", "-m", "toolkit.cli.verify_rank", str(folder)],
            env=environment,
            stdin=subprocess.PIPE,  # its end tells the rank that this process is gone
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _await_ranks(processes: Sequence[subprocess.Popen[bytes]], folder: Path, seconds: float) -> None:
    """Returns when all ranks are done; raises as soon as one is not well, or the time is over."""
    deadline = time.monotonic() + seconds
    while True:
        codes = [process.poll() for process in processes]
        if any(codes):
            raise _failure(codes, folder)
        if None not in codes:
            return
        if time.monotonic() > deadline:
            raise _lateness(codes, folder, seconds)
        time.sleep(0.05)


def _lateness(codes: Sequence[int | None], folder: Path, seconds: float) -> ToolkitError:
    late = [rank for rank, code in enumerate(codes) if code is None]
    return ToolkitError(
        f"verify: rank {', '.join(map(str, late))}: not done in {seconds:.0f} s, and ended; raise --time-limit, or "
        f"shrink the model with --layers{_last_words(folder, late[0])}"
    )


def _failure(codes: Sequence[int | None], folder: Path) -> ToolkitError:
    """The error of the rank that failed first: one that died without a word, or the first that told."""
    failed = [rank for rank, code in enumerate(codes) if code]
    # First those that died without a word: the others most likely failed for want of them.
    silent = [rank for rank in failed if not outcome_path(folder, rank).exists()]
    if silent:
        rank, code = silent[0], codes[silent[0]]
        assert code is not None
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"died with exit code {code}"
        return ToolkitError(f"verify: rank {rank} {how}{_last_words(folder, rank)}")
    rank = min(failed, key=lambda rank: outcome_path(folder, rank).stat().st_mtime_ns)
    outcome = _outcome_of(folder, rank)
    if "error" not in outcome:
        return ToolkitError(f"verify: rank {rank} ended with exit code {codes[rank]}{_last_words(folder, rank)}")
    if outcome["bad_input"]:
        return BadInputError(outcome["error"])
    return ToolkitError(f"verify: rank {rank} failed: {outcome['error']}")


def _last_words(folder: Path, rank: int) -> str:
    lines = (folder / f"rank-{rank}.log").read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
    return "\nits last words:\n" + "\n".join(lines) if lines else "; it said nothing"


def outcome_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def _outcome_of(folder: Path, rank: int) -> dict[str, Any]:
    return json.loads(outcome_path(folder, rank).read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def _merged(results: list[dict[str, Any]], weights: dict[str, torch.Tensor]) -> ShardedRun:
    """One outcome of all ranks: a parameter has a gradient if its part on any rank has."""
    first = results[0]
    with_gradient = {name for result in results for name in result["with_gradient"]}
    without = [name for name in first["trainable"] if name not in with_gradient]
    replays = [result["replay"] for result in results if result["replay"] is not None]
    replay = {key: max(one[key] for one in replays) for key in replays[0]} if replays else None
    sizes = {
        name: _size([result["moments"][name] for result in results], whole) for name, whole in first["numel"].items()
    }
    told = (first["losses"], first["grad_norms"], weights, without, sizes, first["loads"], first["balance"])
    outcome = Outcome(*told)
    return ShardedRun(outcome, first["facts"], first["precision"], first["device"], replay)


def _size(parts: list[tuple[int, float]], whole: int) -> float:
    """Norm of a tensor of so many elements, of which each rank holds some, and all ranks together each equally often.

    Args:
        parts: of each rank, how many elements it holds, and the sum of their squares.
    """
    copies = sum(count for count, _ in parts) / whole
    return math.sqrt(sum(squares for _, squares in parts) / max(1.0, copies))
