"""Starts the ranks of the sharded side, waits for them, and merges their results."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from toolkit.errors import ToolkitError
from toolkit.recipe.recipe import Recipe
from toolkit.supervise.launched_ranks import last_words, launch_ranks
from toolkit.verify.launch import Launch, ranks_environment
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
    from torch.distributed.elastic.multiprocessing.api import SignalException

    job = folder / "job.json"
    job.write_text(json.dumps({"recipe": recipe.to_yaml(), "steps": steps}), encoding="utf-8")
    environment = ranks_environment(launch, folder)
    results = [folder / f"rank-{rank}.json" for rank in range(launch.num_processes)]
    try:
        launch_ranks("toolkit.cli.ranks.verify_rank", job, len(results), environment, quiet=True, seconds=seconds)
    except SignalException as error:
        if error.sigval != signal.SIGALRM:
            signal.raise_signal(error.sigval)  # as if there were no launcher
            raise
        late = [rank for rank, file in enumerate(results) if not file.exists()] or [0]
        raise ToolkitError(
            f"rank {', '.join(map(str, late))}: not done in {seconds:.0f} s, and ended; raise --time-limit, or set "
            f"model.name_or_path to a smaller model{last_words(folder, late[0])}"
        ) from None
    found = [json.loads(file.read_text(encoding="utf-8")) for file in results]
    return _merge_results(found, load_file(folder / "weights.safetensors"))


def _merge_results(results: list[dict[str, Any]], weights: dict[str, torch.Tensor]) -> ShardedRun:
    """Merges the results of all ranks. A parameter has a gradient if its part on any rank has one."""
    first = results[0]
    with_gradient = {name for result in results for name in result["with_gradient"]}
    without = [name for name in first["trainable"] if name not in with_gradient]
    sizes = {
        name: _global_norm([result["moments"][name] for result in results], whole)
        for name, whole in first["numel"].items()
    }
    figures = (first["losses"], first["grad_norms"], weights, without, sizes, first["loads"], first["balance"])
    outcome = Outcome(*figures)
    return ShardedRun(outcome, first["facts"], first["precision"], first["differ"])


def _global_norm(parts: list[tuple[int, float]], whole: int) -> float:
    """Returns the global norm of a sharded tensor. Replicas count once.

    Args:
        parts: for each rank, the number of elements that it holds and the sum of their squares.
        whole: the number of elements of the whole tensor.
    """
    copies = sum(count for count, _ in parts) / whole
    return math.sqrt(sum(squares for _, squares in parts) / max(1.0, copies))
