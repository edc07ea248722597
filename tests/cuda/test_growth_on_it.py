"""Fifty steps take no more memory than five: the caching allocator's bytes, pinned memory and the process's own."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ranks
from support.pretended_steps import NCCL, Watched, started_anew, watched
from support.texts import make_texts, write_rows
from support.tiny import recipe_values, save_llama
from test_recipes_on_it import BF16, BY_BLOCK, OFFLOAD

pytestmark = [
    pytest.mark.grid,
    pytest.mark.skipif(importlib.util.find_spec("pretended_device") is None, reason="runs inside of tests/cuda/run.py"),
]

EARLY, LATE = 5, 50
"""Steps after which memory is compared."""
HOST_GROWTH = 8 * 2**20
"""Bytes that a process may have taken between them: the first run of a process takes 4 MiB, later ones less than 1."""
PINNED_GROWTH = 1024
"""Batches that share rows have as many numbers as they have documents."""
COLLECTED = 5
"""Steps between collections of Python's cycles, in place of fifty: a step leaves 0.6 MB of them here."""


@dataclass(frozen=True)
class Run:
    sharding: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)


RUNS = {"plain": Run(training=BF16), "offload": Run(OFFLOAD, BF16), "by block": Run(BY_BLOCK, BF16)}


def fifty_steps(folder: Path, name: str) -> list[Watched]:
    from toolkit import Recipe, finetune
    from toolkit.training import trainer

    trainer.EVERY_STEPS = COLLECTED
    run = RUNS[name]
    output = folder / name.replace(" ", "_")
    values = recipe_values(folder / "model", folder / "rows.jsonl", output, folder / "cache")
    values["schedule"] = {"kind": "constant"}
    values["data"] |= {"packing": True, "max_length": 64}
    values["training"] |= {"max_steps": LATE, "gradient_accumulation_steps": 2, **run.training}
    values |= {"sharding": {"strategy": "zero3", **run.sharding}, "export": {"enabled": False}}
    ranks.meet()
    with watched() as steps:
        finetune(Recipe.from_mapping(values))
    return steps


def runs(folder: Path) -> dict[str, list[Watched]]:
    os.environ["ACCELERATE_USE_CPU"] = "false"
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return {name: fifty_steps(folder, name) for name in RUNS}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Watched]]]:
    folder = tmp_path_factory.mktemp("growth")
    texts = make_texts(200, seed=2)
    save_llama(folder / "model", texts, tied=True)
    write_rows(folder / "rows.jsonl", [{"text": text} for text in texts])
    return started_anew(runs, 1, folder, **NCCL)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", RUNS)
def test_fifty_steps_take_no_more_memory_than_five(found: list[dict[str, list[Watched]]], name: str) -> None:
    for rank in found:
        assert len(rank[name]) == LATE
        early, late = rank[name][EARLY - 1], rank[name][LATE - 1]
        print(name, [(step.allocated, step.reserved, step.pinned, step.resident) for step in rank[name][4::15]])
        assert late.allocated == early.allocated
        assert late.reserved == early.reserved
        assert late.pinned - early.pinned <= PINNED_GROWTH
        assert max(step.peak for step in rank[name][EARLY:]) <= max(step.peak for step in rank[name][:EARLY])
        assert late.resident - early.resident <= HOST_GROWTH
