"""Runs that train towers of which a part gets no gradient go on from their checkpoints bit for bit."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors.torch import load_file
from support.ranks import meet, run_on_ranks
from support.runs import finetuned, records_of
from support.sights import save_all
from support.texts import make_texts
from support.tiny import recipe_values, unfinish

TEXTS = [" ".join(text.split()[:4]) for text in make_texts(16, seed=4)]
COUNTS = [1, 0, 2, 0, 0, 1, 0, 0] * 2
CASES: dict[str, dict[str, Any]] = {
    "zero3": {"strategy": "zero3"},
    "ddp": {"strategy": "ddp"},
    "offload": {"strategy": "zero2", "offload": "optimizer", "offload_executor": "cpu_torch"},
    "by block": {"strategy": "zero3", "accumulate": "by_block"},
}
KINDS = ("llava", "gemma3")
TRIED = [("llava", "by block"), ("llava", "offload"), ("gemma3", "ddp")]
"""LLaVA takes what the last layer but one of its tower makes; Gemma 3 leaves out its tower's pooling."""


def runs(folder: Path) -> None:
    """Each case once whole, and once more from its checkpoint after step 2, with what lies behind it taken away."""
    from toolkit import Recipe, finetune

    for kind, case in TRIED:
        sharding = CASES[case]
        output, kept = folder / f"{kind}-{case}", folder / f"{kind}-{case}-whole"
        values = recipe_values(folder / kind, folder / "rows.jsonl", output, folder / "cache", max_steps=4)
        values["data"]["max_length"] = 64
        values["training"] |= {"micro_batch_size": 1, "gradient_accumulation_steps": 2}
        values["model"]["train"] = ["language", "projector", "vision"]
        values |= {"sharding": sharding, "checkpoint": {"every_steps": 2, "keep_last": None}}
        finetuned(values)
        meet()
        if os.environ["RANK"] == "0":
            shutil.copytree(output, kept)
            shutil.rmtree(output / "checkpoints" / "step_00000004")
            shutil.rmtree(output / "export")
            unfinish(output)
        dist.barrier()
        finetune(Recipe.from_mapping(values))


def told(run: Path) -> list[tuple[Any, ...]]:
    return [(r["step"], r["split"], r["loss"], r.get("grad_norm")) for r in records_of(run)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_all(tmp_path_factory.mktemp("image_resume"), KINDS, TEXTS, COUNTS)
    run_on_ranks(runs, 2, folder)
    return folder


@pytest.mark.parametrize(("kind", "case"), TRIED)
def test_a_resumed_run_is_the_whole_one(folder: Path, kind: str, case: str) -> None:
    whole, resumed = folder / f"{kind}-{case}-whole", folder / f"{kind}-{case}"
    manifest = json.loads((resumed / "checkpoints/step_00000002/manifest.json").read_text())
    trained = {name.removeprefix("model.") for name in manifest["tensors"] if name.startswith("model.")}
    stepped = {name.removeprefix("optimizer.").rpartition(".")[0] for name in manifest["tensors"]}
    assert (trained <= stepped) == (case == "offload"), "parameters without a gradient have state with offload alone"
    assert len(told(whole)) == 4
    assert told(resumed) == told(whole)
    weights = [load_file(run / "export/model.safetensors") for run in (whole, resumed)]
    assert all((weights[0][name] == tensor).all() for name, tensor in weights[1].items())
