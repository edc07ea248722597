"""A step of a mixture of experts on ranks: that of a plain loop with the balance loss written out."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.moe import MODELS, mixture, plain_step
from support.moe_steps import Case, compare_step, sharded_step, windows_of
from support.ranks import meet, run_on_ranks
from support.tiny import recipe_values, save_llama
from transformers import AutoTokenizer

from toolkit import Recipe, finetune
from toolkit.training.extensions import expert_loads
from toolkit.training.trainer import Trainer

COEF, Z = 0.3, 0.05
SMALL: list[Case] = [
    ("mixtral", "zero3", 3, True, "by_block"),
    ("mixtral", "zero3", 3, False, "by_micro_batch"),
    ("qwen3_moe", "ddp", 3, True, "by_micro_batch"),
    ("deepseek_v3", "zero3", 1, True, "by_micro_batch"),
    ("gpt_oss", "zero2", 3, True, "by_micro_batch"),
    ("olmoe", "zero3", 1, False, "by_micro_batch"),
    ("granitemoe", "zero1", 3, False, "by_micro_batch"),
]
WHOLE: list[Case] = [
    *itertools.product(MODELS, ("zero3", "ddp"), (1, 3), (False, True), ("by_micro_batch",)),
    *((kind, "zero3", 3, True, "by_block") for kind in MODELS),
]


def steps_of(cases: list[Case]) -> list[Any]:
    found = []
    for case in cases:
        meet()
        found.append(sharded_step(case, COEF, Z))
    return found


def compare(case: Case, num_ranks: int, found: dict[str, Any]) -> None:
    kind, _, accumulation, _, accumulate = case
    plain = plain_step(mixture(kind), windows_of(num_ranks, accumulation), COEF, Z, accumulate == "by_block")
    compare_step(found, plain)


def test_a_step_is_that_of_a_plain_loop_with_the_balance_loss_written_out() -> None:
    for case, found in zip(SMALL, run_on_ranks(steps_of, 2, SMALL)[0], strict=True):
        compare(case, 2, found)


RATE = 0.01


class CutError(Exception):
    """Power is gone."""


def runs_with_moving_biases(folder: Path, data: Path) -> dict[str, Any]:
    """A whole run, and one cut in step 4 that goes on from the checkpoint of step 2: losses, then loads of experts."""
    train_step, found = Trainer.train_step, {}
    expert_loads.LOAD_EVERY = 5

    def dies(trainer: Any, window: Any) -> Any:
        if trainer.global_step == 3:
            raise CutError
        return train_step(trainer, window)

    for name in ("whole", "cut"):
        values = recipe_values(folder / "model", data, folder / name, folder / "cache", max_steps=5)
        values["objective"] = {"router_bias_rate": RATE}
        values["optimizer"] |= {"kind": "muon", "router_learning_rate": 1e-3}
        values["checkpoint"] = {"every_steps": 2} if name == "cut" else {}
        if name == "cut":
            Trainer.train_step = dies  # type: ignore[method-assign]
            meet()
            with pytest.raises(CutError):
                finetune(Recipe.from_mapping(values))
            Trainer.train_step = train_step  # type: ignore[method-assign]
        meet()
        metrics = finetune(Recipe.from_mapping(values)).metrics
        found[name] = [record["loss"] for record in metrics]
        found[name] += [record["expert_load"] for record in metrics if "expert_load" in record]
    return found


def test_a_run_whose_biases_move_goes_on_bit_for_bit(tmp_path: Path, text_file: Path) -> None:
    texts = [json.loads(line)["text"] for line in text_file.read_text().splitlines()]
    folder = save_llama(tmp_path / "model", texts, tied=True)  # for its tokenizer
    size = len(AutoTokenizer.from_pretrained(folder))
    mixture("deepseek_v3", vocab_size=size).save_pretrained(folder)
    losses = run_on_ranks(runs_with_moving_biases, 2, tmp_path, text_file)[0]
    assert losses["cut"] == losses["whole"]
    whole, cut = (load_file(tmp_path / name / "export" / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    for layer in range(2):
        bias = whole[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"]
        moves = bias / RATE
        torch.testing.assert_close(moves, moves.round(), rtol=0, atol=1e-4)
        assert bias.any()
        assert float(bias.abs().max()) <= 5.001 * RATE


@pytest.mark.grid
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_model_on_any_ranks_with_any_accumulation(num_ranks: int) -> None:
    for case, found in zip(WHOLE, run_on_ranks(steps_of, num_ranks, WHOLE)[0], strict=True):
        compare(case, num_ranks, found)
