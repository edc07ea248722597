"""Starts the ranks of the sharded side, waits for them, and names the one that fails."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from toolkit.errors import BadInputError, ToolkitError, signal_name
from toolkit.recipe.recipe import Recipe
from toolkit.verify.launch import Launch, rank_environments
from toolkit.verify.results import Outcome, ShardedRun


def run_ranks(recipe: Recipe, launch: Launch, steps: int, folder: Path, seconds: float) -> ShardedRun:
    """Runs the sharded side and reads the results that the ranks have written to `folder`.

    Args:
        recipe: the recipe to verify.
        launch: the Accelerate config.
        steps: the number of optimizer steps.
        folder: a temporary folder.
        seconds: the time limit for all ranks together.

    Raises:
        BadInputError: if a rank refuses the recipe or the config.
        ToolkitError: if a rank fails, dies or does not finish.
    """
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
    return _merge_results(results, load_file(folder / "weights.safetensors"))


def _start_rank(environment: dict[str, str], folder: Path) -> subprocess.Popen[bytes]:
    with (folder / f"rank-{environment['RANK']}.log").open("wb") as log:
        return subprocess.Popen(  # noqa: S603 (this interpreter, this module)
            # -P: a file in the working directory must not stand in for a module.
            [sys.executable, "-P", "-m", "toolkit.cli.ranks.verify_rank", str(folder)],
            env=environment,
            stdin=subprocess.PIPE,  # the rank ends when this pipe closes, so when this process is gone
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _await_ranks(processes: Sequence[subprocess.Popen[bytes]], folder: Path, seconds: float) -> None:
    """Waits until all ranks are done. Raises ToolkitError as soon as one has failed, or the time is over."""
    deadline = time.monotonic() + seconds
    while True:
        codes = [process.poll() for process in processes]
        if any(codes):
            raise _failure_error(codes, folder)
        if None not in codes:
            return
        if time.monotonic() > deadline:
            raise _timeout_error(codes, folder, seconds)
        time.sleep(0.05)


def _timeout_error(codes: Sequence[int | None], folder: Path, seconds: float) -> ToolkitError:
    late = [rank for rank, code in enumerate(codes) if code is None]
    return ToolkitError(
        f"verify: rank {', '.join(map(str, late))}: not done in {seconds:.0f} s, and ended; raise --time-limit, or "
        f"shrink the model with --layers{_log_tail(folder, late[0])}"
    )


def _failure_error(codes: Sequence[int | None], folder: Path) -> ToolkitError:
    """Returns the error of the rank that failed first: one that died silently, or the first that wrote an error."""
    failed = [rank for rank, code in enumerate(codes) if code]
    # First those that died silently: the others most likely failed because of them.
    silent = [rank for rank in failed if not outcome_path(folder, rank).exists()]
    if silent:
        rank, code = silent[0], codes[silent[0]]
        assert code is not None
        how = f"was ended by {signal_name(-code)}" if code < 0 else f"died with exit code {code}"
        return ToolkitError(f"verify: rank {rank} {how}{_log_tail(folder, rank)}")
    rank = min(failed, key=lambda rank: outcome_path(folder, rank).stat().st_mtime_ns)
    outcome = _outcome_of(folder, rank)
    if "error" not in outcome:
        return ToolkitError(f"verify: rank {rank} ended with exit code {codes[rank]}{_log_tail(folder, rank)}")
    if outcome["bad_input"]:
        return BadInputError(outcome["error"])
    return ToolkitError(f"verify: rank {rank} failed: {outcome['error']}")


def _log_tail(folder: Path, rank: int) -> str:
    lines = (folder / f"rank-{rank}.log").read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
    return "\nits last words:\n" + "\n".join(lines) if lines else "; it said nothing"


def outcome_path(folder: Path, rank: int) -> Path:
    """Returns the file in which a rank leaves its result or its error."""
    return folder / f"rank-{rank}.json"


def _outcome_of(folder: Path, rank: int) -> dict[str, Any]:
    return json.loads(outcome_path(folder, rank).read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def _merge_results(results: list[dict[str, Any]], weights: dict[str, torch.Tensor]) -> ShardedRun:
    """Merges the results of all ranks. A parameter has a gradient if its part on any rank has one."""
    first = results[0]
    with_gradient = {name for result in results for name in result["with_gradient"]}
    without = [name for name in first["trainable"] if name not in with_gradient]
    replays = [result["replay"] for result in results if result["replay"] is not None]
    replay = {key: max(one[key] for one in replays) for key in replays[0]} if replays else None
    sizes = {
        name: _global_norm([result["moments"][name] for result in results], whole)
        for name, whole in first["numel"].items()
    }
    figures = (first["losses"], first["grad_norms"], weights, without, sizes, first["loads"], first["balance"])
    outcome = Outcome(*figures)
    return ShardedRun(outcome, first["facts"], first["precision"], first["device"], replay, first["differ"])


def _global_norm(parts: list[tuple[int, float]], whole: int) -> float:
    """Returns the global norm of a sharded tensor. Replicas count once.

    Args:
        parts: for each rank, the number of elements that it holds and the sum of their squares.
        whole: the number of elements of the whole tensor.
    """
    copies = sum(count for count, _ in parts) / whole
    return math.sqrt(sum(squares for _, squares in parts) / max(1.0, copies))
