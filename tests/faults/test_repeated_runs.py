"""`finetune` again and again in one process, as a notebook does: every run gives back all that it took."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import alone, run_on_ranks
from support.texts import make_texts
from support.tiny import recipe_values, save_llama

from toolkit import Recipe, finetune


def held() -> dict[str, int]:
    """What this process holds."""
    gc.collect()
    return {
        "tensors": sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects()),
        "threads": threading.active_count(),
        "threads of the system": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


@alone
def repeat(values: dict[str, Any], folder: Path, num_runs: int) -> list[dict[str, int]]:
    """What is held after each run."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]  # as without a launcher
    found = []
    for number in range(num_runs):
        values["training"]["output_dir"] = str(folder / str(number))
        finetune(Recipe.from_mapping(values))
        found.append(held())
    return found


@pytest.mark.parametrize(
    "sharding",
    [
        {"strategy": "ddp"},
        {"strategy": "zero3"},
        {"strategy": "zero2", "offload": "optimizer", "offload_executor": "cpu_torch"},
    ],
    ids=lambda sharding: "+".join(sharding.values()),
)
def test_a_run_leaves_nothing_behind(sharding: dict[str, Any], text_file: Path, tmp_path: Path) -> None:
    model = save_llama(tmp_path / "model", make_texts(20), tied=True)
    values = recipe_values(model, text_file, tmp_path / "run", tmp_path / "cache", max_steps=2)
    values |= {"sharding": sharding, "checkpoint": {"every_steps": 1}, "export": {"enabled": False}}
    first, *later = run_on_ranks(repeat, 1, values, tmp_path, 3)[0]
    assert not list(tmp_path.glob("*/.*")), "a lock is left"
    # The first run imports and starts what the process keeps.
    assert later == [first] * 2
