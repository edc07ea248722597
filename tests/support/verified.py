"""Runs of `toolkit verify` in tests: launch configurations, and one rank without a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from toolkit.recipe.recipe import Recipe
from toolkit.verify import ShardedRun, ranks
from toolkit.verify.sharded import _run_sharded


def save_launches(folder: Path) -> None:
    """Writes `one.yaml` and `two.yaml`, of so many ranks under zero3 on the CPU."""
    for name, count in (("one", 1), ("two", 2)):
        launched = {"distributed_type": "FSDP", "use_cpu": True, "num_processes": count, "mixed_precision": "no"}
        launched["fsdp_config"] = {"fsdp_version": 2, "fsdp_sharding_strategy": "zero3"}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(launched))


def run_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `verify` run its one rank here, so that what a test has changed holds there, too."""

    def run(recipe: Recipe, _launch: Any, steps: int, folder: Path, _seconds: float) -> ShardedRun:
        result = _run_sharded(recipe, steps, folder)
        return ranks._merge_results([result], load_file(folder / "weights.safetensors"))

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)  # what another test left behind
    monkeypatch.setattr("toolkit.verify.run_ranks", run)
