"""The plan's peak against the caching allocator's own, for shapes whose tensors are not computed."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support import ranks
from support.pretended_steps import NCCL, Watched, started_anew, watched
from support.texts import make_texts, write_rows
from support.tiny import recipe_values, save_llama
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = [
    pytest.mark.grid,
    pytest.mark.skipif(importlib.util.find_spec("pretended_device") is None, reason="runs inside of tests/cuda/run.py"),
]

WORKSPACE = 32 * 2**20
"""cuBLAS's for each thread that multiplies: the main one, autograd's, and by block one for each micro-batch."""

LORA = {"kind": "lora", "r": 4}
CHECKPOINTED = {"activation_checkpointing": 1}
UNCOMPUTED = {"PRETENDED_NUMBERS": "300000", "PRETENDED_LARGEST_COPY": "2000000"}


@dataclass(frozen=True)
class Shape:
    """A recipe on one rank, in bf16.

    Attributes:
        long_rows: each row is one document of 8,192 tokens, and none is packed. Otherwise documents share rows.
        threads: that multiply.
    """

    sharding: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    micro_batches: int = 1
    long_rows: bool = False
    threads: int = 2


SHAPES = {
    "whole": Shape(),
    "checkpointed": Shape(CHECKPOINTED),
    "LoRA": Shape(CHECKPOINTED, {"adapter": LORA}),
    "nf4": Shape(CHECKPOINTED, {"adapter": LORA | {"quantize": "nf4"}}),
    "offload": Shape(CHECKPOINTED | {"offload": "optimizer", "offload_executor": "cpu_torch"}),
    "streamed": Shape(CHECKPOINTED | {"offload": "optimizer", "offload_executor": "device_stream"}),
    "long rows": Shape(CHECKPOINTED, long_rows=True),
    "inputs on the host": Shape(CHECKPOINTED | {"offload_checkpoints": True}, long_rows=True),
    # The last one: a process keeps the workspaces of threads that have ended.
    "by block": Shape(CHECKPOINTED | {"accumulate": "by_block"}, micro_batches=4, threads=6),
}


@dataclass(frozen=True)
class Found:
    planned: int
    steps: list[Watched]


def run(folder: Path, name: str, shape: Shape) -> Found:
    from toolkit import Recipe, finetune
    from toolkit.objectives.causal_lm import CausalLM

    rows = folder / ("long.jsonl" if shape.long_rows else "rows.jsonl")
    values = recipe_values(folder / "model", rows, folder / name.replace(" ", "_"), folder / "cache")
    values["data"] |= {"packing": not shape.long_rows, "max_length": 8192, "long_rows": "truncate"}
    values["schedule"] = {"kind": "constant"}
    values["training"] |= {"max_steps": 2, "micro_batch_size": 1, "mixed_precision": "bf16"}
    values["training"] |= {"gradient_accumulation_steps": shape.micro_batches}
    values["sharding"] = {"strategy": "zero3", "activation_checkpointing": None, **shape.sharding}
    values |= {"export": {"enabled": False}, **shape.sections}
    ranks.meet()
    # Two losses that are not computed differ, and a run would then use full logits.
    unchecked = mock.patch.object(CausalLM, "check_head_loss", return_value="not checked")
    with unchecked, watched() as steps:
        metrics = finetune(Recipe.from_mapping(values)).metrics
    return Found(next(record["planned_peak_bytes"] for record in metrics if record["split"] == "train"), steps)


def runs(folder: Path, names: list[str]) -> dict[str, Found]:
    os.environ["ACCELERATE_USE_CPU"] = "false"
    torch.cuda.set_device(0)
    return {name: run(folder, name, SHAPES[name]) for name in names}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Found]:
    """Of the shapes whose tests were chosen."""
    chosen = [item.callspec.params for item in request.session.items if getattr(item, "module", None) is request.module]
    names = [name for name in SHAPES if {"name": name} in chosen]
    folder = tmp_path_factory.mktemp("memory")
    save_llama(folder / "model", make_texts(40, seed=2), tied=True)
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
    ends = LlamaConfig.from_pretrained(folder / "model")
    config = LlamaConfig(
        **sizes,
        vocab_size=40_000,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=ends.eos_token_id,
        pad_token_id=ends.pad_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    text = " ".join(make_texts(40, seed=2))
    write_rows(folder / "rows.jsonl", [{"text": text[: 2000 + number]} for number in range(160)])
    write_rows(folder / "long.jsonl", [{"text": (text * 20)[:60_000]} for _ in range(8)])
    (result,) = started_anew(runs, 1, folder, names, **NCCL, **UNCOMPUTED)
    return result  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", SHAPES)
def test_the_allocator_peaks_where_the_plan_says(found: dict[str, Found], name: str) -> None:
    run = found[name]
    peak = max(step.peak for step in run.steps)
    assert peak == pytest.approx(run.planned + SHAPES[name].threads * WORKSPACE, rel=0.02)


@pytest.mark.parametrize("name", SHAPES)
def test_what_comes_before_the_first_step_needs_no_more(found: dict[str, Found], name: str) -> None:
    run = found[name]
    assert run.steps[0].peak_before <= run.planned + 2 * WORKSPACE
