"""`sharding.accumulate: auto`: by block where a rank then sends less and it fits, and why it is not elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from toolkit.cli.shared.plan_console import row_as_json
from toolkit.errors import BadInputError
from toolkit.planning import check
from toolkit.planning.accumulation import settle
from toolkit.planning.hardware import Hardware, hardware_of
from toolkit.planning.launch import launch_of
from toolkit.planning.planner import Planner
from toolkit.planning.setup import asked_setup
from toolkit.planning.table import plan
from toolkit.planning.workload.workload import workload_of
from toolkit.recipe.recipe import Recipe
from toolkit.sharding.plan.strategy import STRATEGIES, MeshShape

H100 = hardware_of("h100_sxm")
LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3}
EXPERTS = {"model_type": "mixtral", "num_local_experts": 4, "router_aux_loss_coef": 0.01}


def recipe(config: dict[str, Any] | None = None, **changes: Any) -> Recipe:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    training = {"output_dir": "out", "max_steps": 1, "gradient_accumulation_steps": 4, "micro_batch_size": 1}
    return Recipe.from_mapping(
        {
            "model": {"config": {**LLAMA, **sizes, **(config or {})}, "train_tokenizer_vocab_size": 2048},
            "data": {"train": "text.txt", "max_length": 128},
            "optimizer": {"learning_rate": 1e-3},
            "training": {**training, **changes.pop("training", {})},
            "sharding": {"accumulate": "auto", "activation_checkpointing": "auto", **changes.pop("sharding", {})},
            **changes,
        }
    )


def settled(own: Recipe, hardware: Hardware, precision: str = "bf16", strategy: str = "zero3") -> tuple[bool, str]:
    planner = Planner(own, workload_of(own, precision), hardware)
    setup, why = settle(planner, asked_setup(own, 8, hardware, strategy, False, 4), lambda row: row.verdict == "fits")
    assert setup.by_block == (setup.checkpointing is not None)
    return setup.by_block, why


def test_it_is_by_block_where_a_rank_then_sends_less() -> None:
    own = recipe()
    planner = Planner(own, workload_of(own, "bf16"), H100)
    before = asked_setup(own, 8, H100, "zero3", False, None)
    chosen, why = settle(planner, before, lambda row: row.verdict == "fits")
    # 2 gathers and a reduction in float32 for each of 4 micro-batches, or once.
    assert planner.row(before).traffic.sent / planner.row(chosen).traffic.sent == pytest.approx(4, rel=0.01)
    assert why.startswith("a rank sends ")
    one = asked_setup(own, 1, H100, "zero3", False, None)
    assert settle(planner, one, lambda row: True) == (one, "by block a rank would send as much")


@pytest.mark.parametrize(
    ("own", "precision", "strategy", "told"),
    [
        (
            recipe(training={"gradient_accumulation_steps": 1}),
            "bf16",
            "zero3",
            "sharding.accumulate by_block has no effect with training.gradient_accumulation_steps 1",
        ),
        (recipe(), "bf16", "zero2", "sharding.accumulate by_block has no effect with sharding.strategy zero2"),
        (recipe(), "fp16", "zero3", "training.mixed_precision fp16 is not possible with sharding.accumulate by_block"),
        (recipe(EXPERTS), "bf16", "zero3", "the balance loss of experts would be over the whole step"),
    ],
)
def test_what_stays_by_micro_batch(own: Recipe, precision: str, strategy: str, told: str) -> None:
    is_by_block, why = settled(own, H100, precision, strategy)
    assert not is_by_block
    assert why.startswith(told)


@pytest.mark.slow
def test_experts_without_a_balance_loss_and_hybrid_may_run_by_block() -> None:
    assert settled(recipe(EXPERTS, objective={"router_aux_coef": 0.0}), H100)[0]
    assert settled(recipe(), H100, strategy="hybrid")[0]


def test_what_has_no_room_stays_by_micro_batch() -> None:
    own = recipe()
    planner = Planner(own, workload_of(own, "bf16"), H100)
    before = asked_setup(own, 8, H100, "zero3", False, None)
    setup, why = settle(planner, before, lambda row: False)
    assert setup == before
    assert why.startswith("with the inputs of all blocks of 4 micro-batches a rank would hold")


def planned(own: Recipe, num_ranks: int = 2) -> check.Planned:
    ways = (
        (None, check.Checkpointing(1)) if own.sharding.activation_checkpointing == "auto" else (check.Checkpointing(1),)
    )
    workload, mesh = workload_of(own, "no"), MeshShape(1, num_ranks)
    return check.plan_run(own, workload, STRATEGIES["zero3"], mesh, False, ways, torch.device("cpu"))


def test_a_run_goes_by_its_plan() -> None:
    """Checkpoints follow: every block by block, none where there is room."""
    chosen, alone = planned(recipe()), planned(recipe(), num_ranks=1)
    assert (chosen.by_block, chosen.checkpointing) == (True, check.Checkpointing(1))
    assert "instead of" in chosen.why
    assert (alone.by_block, alone.checkpointing) == (False, None)
    asked = planned(recipe(sharding={"accumulate": "by_block", "activation_checkpointing": 1}))
    assert (asked.by_block, asked.why) == (True, "")
    assert asked.peak is not None
    assert chosen.peak == asked.peak


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


def test_auto_wants_checkpoints_that_it_may_choose() -> None:
    with pytest.raises(BadInputError, match=r"sharding.activation_checkpointing=auto or 1"):
        recipe(sharding={"activation_checkpointing": None})


def encoder_decoder() -> Recipe:
    """Of T5, on sources and targets."""
    sizes = {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
    training = {"output_dir": "out", "max_steps": 1, "gradient_accumulation_steps": 4, "micro_batch_size": 1}
    return Recipe.from_mapping(
        {
            "model": {"config": sizes, "train_tokenizer_vocab_size": 512},
            "data": {"train": "text.jsonl", "max_length": 64},
            "objective": {"kind": "seq2seq"},
            "optimizer": {"learning_rate": 1e-3},
            "training": training,
            "sharding": {"accumulate": "auto", "activation_checkpointing": 1},
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "precision", "there"),
    [
        (recipe(sharding={"activation_checkpointing": 1}), "bf16", True),
        (recipe(sharding={"activation_checkpointing": 1}), "fp16", False),
        (encoder_decoder(), "bf16", False),
    ],
    ids=["bf16", "fp16", "seq2seq"],
)
def test_the_table_offers_no_row_by_block_that_a_run_refuses(own: Recipe, precision: str, there: bool) -> None:
    found = plan(own, H100, 2, mixed_precision=precision, strategy="zero3", with_levers=False)
    assert any(row.setup.by_block for row in found.rows) == there
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
    assert len(set(names)) == len(names), "rows that say the same are told apart"
