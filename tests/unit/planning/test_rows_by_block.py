"""Rows of a plan by block next to those by micro-batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from toolkit.cli.shared.plan_console import row_as_json
from toolkit.planning.hardware import hardware_of
from toolkit.planning.launch import launch_of
from toolkit.planning.table import plan
from toolkit.recipe.recipe import Recipe

H100 = hardware_of("h100_sxm")
LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3}


def recipe(**changes: Any) -> Recipe:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    training = {"output_dir": "out", "max_steps": 1, "gradient_accumulation_steps": 4, "micro_batch_size": 1}
    return Recipe.from_mapping(
        {
            "model": {"config": {**LLAMA, **sizes}, "train_tokenizer_vocab_size": 2048},
            "data": {"train": "text.txt", "max_length": 128},
            "optimizer": {"learning_rate": 1e-3},
            "training": {**training, **changes.pop("training", {})},
            "sharding": {"accumulate": "by_block", "activation_checkpointing": 1, **changes.pop("sharding", {})},
            **changes,
        }
    )


@pytest.mark.slow
def test_the_table_has_both_ways_and_a_command_that_says_which() -> None:
    found = plan(recipe(), H100, 8)
    assert found.asked.setup.by_block
    assert found.recommended is not None
    rows = [replace(row.setup, by_block=False) for row in found.rows if row.setup.by_block]
    assert {setup.strategy.name for setup in rows} == {"zero3", "hybrid"}
    assert all(setup.accumulation > 1 and setup.checkpointing is not None for setup in rows)
    assert set(rows) < {row.setup for row in found.rows}
    by_block = next(row for row in found.rows if row.setup.by_block)
    for row, told in ((by_block, "by_block"), (found.rows[-1], "by_micro_batch")):
        assert row.setup.by_block == (told == "by_block")
        command = launch_of(found, row, "mine", []).command
        assert f"sharding.accumulate={told}" in command
    assert not any(row.setup.by_block for row in plan(recipe(sharding={"accumulate": "by_micro_batch"}), H100, 8).rows)


@pytest.mark.slow
def test_rows_that_say_the_same_are_told_apart() -> None:
    found = plan(recipe(), H100, 2, mixed_precision="bf16", strategy="zero3", with_levers=False)
    told = [row_as_json(row) for row in found.rows]
    settings = (
        "strategy",
        "offload",
        "replicate",
        "shard",
        "reshard_after_forward",
        "checkpointing",
        "micro_batch_size",
    )
    settings += ("by_block", "sequence", "gradient_accumulation_steps")
    names = [str([row[name] for name in settings]) for row in told]
    assert len(set(names)) == len(names)
