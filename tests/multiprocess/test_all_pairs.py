"""Every pair of features that may go together, in one run or another: each is the plain loop, step by step.

The rows are a covering array over what the table of combinations allows. The plain loop is written out here, on one
process. Adapters, quantised bases, compiled blocks, other optimizers and objectives have grids of their own.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.covering import Row, covering_array, pairs_of
from support.plain_rows import plain_rows
from support.ranks import meet, run_on_ranks
from support.tiny import VOCAB_SIZE, recipe_values, save_llama
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from toolkit.recipe.combinations import refusals
from toolkit.recipe.features import Settings

STEPS, ROWS_PER_STEP, LEARNING_RATE, DECAY = 3, 4, 2e-3, 0.1

FACTORS: dict[str, tuple[Any, ...]] = {
    "strategy": ("ddp", "zero1", "zero2", "zero3"),
    "offload": ("none", "optimizer"),
    "accumulate": ("one", "by_micro_batch", "by_block"),
    "activation_checkpointing": (None, 1, 2),
    "offload_checkpoints": (False, True),
    "chunk_tokens": (None, 7),
    "prefetch": (None, 2),
    "experts": (0, 1, 2),
    "sequence": (1, 2),
    "max_grad_norm": (None, 0.5),
    "ema": (None, 0.9),
}
"""Experts: 0 for a dense model."""

ON_FOUR = {**FACTORS, "strategy": ("zero1", "zero3", "hybrid"), "reshard_after_forward": (None, 2)}


def settings_of(row: Row) -> Settings:
    return Settings(
        strategy=row["strategy"],
        offload=row["offload"] == "optimizer",
        accumulate="by_block" if row["accumulate"] == "by_block" else "by_micro_batch",
        micro_batches=1 if row["accumulate"] == "one" else 2,
        checkpointing=row["activation_checkpointing"],
        offload_checkpoints=row["offload_checkpoints"],
        chunk_tokens=row["chunk_tokens"] is not None,
        experts=row["experts"] > 1,
        sequence=row["sequence"] > 1,
        node=row.get("reshard_after_forward"),
        prefetch=row["prefetch"] is not None,
    )


def is_allowed(row: Row) -> bool:
    # A model whose every MLP is a mixture has nothing to run in chunks.
    return not refusals(settings_of(row)) and not (row["experts"] and row["chunk_tokens"])


def plain_losses(folder: Path, rows: torch.Tensor, max_norm: float | None) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step: the mean over all targets, clipping, AdamW with decay of matrices alone."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").train()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, foreach=False)
    found = []
    for step in range(STEPS):
        batch = rows[step * ROWS_PER_STEP : (step + 1) * ROWS_PER_STEP]
        ids, labels, positions = batch[:, 0], batch[:, 1], batch[:, 2]
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))
        if max_norm is not None and norm > max_norm:
            for p in model.parameters():
                p.grad.mul_(max_norm / (norm + 1e-6))
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm))
    return found


def runs(folder: Path, data: Path, rows: list[Row]) -> list[list[tuple[float, float]]]:
    """Loss and gradient norm of each step of each row."""
    from toolkit import Recipe, finetune

    ranks, found = int(os.environ["WORLD_SIZE"]), []
    for number, row in enumerate(rows):
        os.environ["PARALLELISM_CONFIG_DP_SHARD_SIZE"] = "2" if row["strategy"] == "hybrid" else "1"
        meet()
        micro_batches = 1 if row["accumulate"] == "one" else 2
        values = recipe_values(
            folder / ("experts" if row["experts"] else "dense"),
            data,
            folder / f"run-{ranks}-{number}",
            folder / "cache",
            max_steps=STEPS,
            micro_batch_size=ROWS_PER_STEP * row["sequence"] // ranks // micro_batches,
            gradient_accumulation_steps=micro_batches,
            max_grad_norm=row["max_grad_norm"],
            ema=row["ema"],
        )
        values["schedule"] = {"kind": "constant"}
        values["export"] = {"enabled": False}
        if row["experts"]:
            values["objective"] = {"router_aux_coef": 0.0}
        if row["offload"] == "optimizer":
            values["sharding"] = {"offload_executor": "cpu_torch"}
        names = ("strategy", "offload", "activation_checkpointing", "offload_checkpoints", "chunk_tokens", "prefetch")
        values["sharding"] = {
            **values.get("sharding", {}),
            **{name: row[name] for name in (*names, "sequence")},
            "accumulate": "by_block" if row["accumulate"] == "by_block" else "by_micro_batch",
            "experts": max(1, row["experts"]),
            "reshard_after_forward": row.get("reshard_after_forward"),
        }
        records = finetune(Recipe.from_mapping(values)).metrics
        found.append([(record["loss"], record["grad_norm"]) for record in records if record["split"] == "train"])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Path:
    folder = tmp_path_factory.mktemp("combinations")
    save_llama(folder / "dense", [json.loads(line)["text"] for line in text_file.read_text().splitlines()], tied=False)
    tokenizer = AutoTokenizer.from_pretrained(folder / "dense")
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2}
    sizes |= {"moe_intermediate_size": 24, "max_position_embeddings": 64, "tie_word_embeddings": False}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **sizes, **ends)).save_pretrained(
        folder / "experts"
    )
    tokenizer.save_pretrained(folder / "experts")
    return folder


def test_the_array_has_every_pair_that_is_allowed() -> None:
    rows = covering_array(FACTORS, is_allowed)
    covered = set().union(*map(pairs_of, rows))
    assert all(is_allowed(row) for row in rows)
    assert {frozenset([("strategy", "ddp"), ("experts", 2)])}.isdisjoint(covered)
    for pair in (("strategy", "zero3"), ("accumulate", "by_block")), (("sequence", 2), ("offload", "optimizer")):
        assert frozenset(pair) in covered
    assert len(rows) < 25


@pytest.mark.parametrize(("ranks", "factors"), [(2, FACTORS), pytest.param(4, ON_FOUR, marks=pytest.mark.slow)])
def test_every_allowed_pair_is_the_plain_loop(
    ranks: int, factors: dict[str, tuple[Any, ...]], folder: Path, text_file: Path
) -> None:
    rows = covering_array(factors, is_allowed)
    packed = plain_rows(folder / "dense", text_file)
    plain = {
        (bool(experts), norm): plain_losses(folder / ("experts" if experts else "dense"), packed, norm)
        for experts in (0, 1)
        for norm in FACTORS["max_grad_norm"]
    }
    found = run_on_ranks(runs, ranks, folder, text_file, rows, seconds=600)[0]
    for row, steps in zip(rows, found, strict=True):
        expected = plain[bool(row["experts"]), row["max_grad_norm"]]
        assert [loss for loss, _ in steps] == pytest.approx([loss for loss, _ in expected], rel=2e-6), row
        assert [norm for _, norm in steps] == pytest.approx([norm for _, norm in expected], rel=1e-5), row
