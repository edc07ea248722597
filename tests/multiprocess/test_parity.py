"""Every strategy is the plain loop: same losses, same norms, same weights, on 1, 2 and 4 ranks.

The plain loop is written out here, on one process, without any of the toolkit's code.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from support.plain_loop import Trained, in_turn, plain_loop
from support.plain_rows import plain_rows
from support.ranks import meet, run_on_ranks
from support.tiny import recipe_values, save_llama
from transformers import AutoModelForCausalLM

STEPS = 12
ROWS_PER_STEP = 12
LEARNING_RATE, WARMUP, DECAY, MAX_NORM = 2e-3, 4, 0.1, 0.5

STRATEGIES = ("zero3", "ddp", "zero1", "zero2", "hybrid", "zero3 in nodes")


def cases(num_ranks: int) -> list[tuple[str, bool, int]]:
    """(strategy, tied, accumulation); hybrid needs two groups of two, and so do gathers of backward inside nodes.

    Each strategy tied and untied, with and without accumulation: two of these four on 2 ranks, one on 1 and on 4.
    """
    pairs = [(False, 3), (True, 1), (False, 1), (True, 3)]
    found = []
    for number, strategy in enumerate(STRATEGIES):
        turned = [pairs[(number + i) % 4] for i in range(4)]
        if strategy == "hybrid":
            chosen = turned[:2] if num_ranks == 4 else []
        elif strategy == "zero3 in nodes":
            chosen = turned[:1] if num_ranks == 4 else []
        else:
            chosen = {1: turned[:1], 2: turned[1:3], 4: turned[3:]}[num_ranks]
        found += [(strategy, *pair) for pair in chosen]
    return found


RATES = [
    LEARNING_RATE * ((step + 1) / (WARMUP + 1) if step < WARMUP else (STEPS - step) / (STEPS - WARMUP))
    for step in range(STEPS)
]


def plain(model_folder: Path, data: Path) -> Trained:
    """AdamW with decay and no-decay groups, clipping, linear warm-up and decay, 12 rows a step."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).train()

    def loss_of(batch: list[torch.Tensor]) -> torch.Tensor:
        ids, labels, positions = torch.stack(batch).unbind(1)
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)

    steps = in_turn(plain_rows(model_folder, data), ROWS_PER_STEP, STEPS)
    return plain_loop(model, steps, loss_of, rates=RATES, decay=DECAY, max_norm=MAX_NORM)


def toolkit_runs(folder: Path, data: Path) -> dict[str, Any]:
    """All cases on the ranks at hand."""
    from toolkit import Recipe, finetune

    world_size = int(os.environ["WORLD_SIZE"])
    results = {}
    for strategy, tied, accumulation in cases(world_size):
        os.environ["PARALLELISM_CONFIG_DP_SHARD_SIZE"] = "2" if strategy == "hybrid" else "1"
        meet()
        output = folder / f"{strategy}-{tied}-{accumulation}-{world_size}"
        values = recipe_values(
            folder / f"model-{tied}",
            data,
            output,
            folder / "cache",
            micro_batch_size=ROWS_PER_STEP // world_size // accumulation,
            gradient_accumulation_steps=accumulation,
            max_steps=STEPS,
        )
        word, _, in_nodes = strategy.partition(" ")
        values["sharding"] = {"strategy": word, "reshard_after_forward": 2 if in_nodes else None}
        result = finetune(Recipe.from_mapping(values))
        results[strategy, tied, accumulation] = (result.metrics, result.logits_difference)
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Path:
    folder = tmp_path_factory.mktemp("parity")
    texts = [json.loads(line)["text"] for line in text_file.read_text().splitlines()]
    for tied in (False, True):
        save_llama(folder / f"model-{tied}", texts, tied=tied)
    return folder


@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(4, marks=pytest.mark.grid)])
def test_parity_with_the_plain_loop(num_ranks: int, folder: Path, text_file: Path) -> None:
    by_hand = {tied: plain(folder / f"model-{tied}", text_file) for tied in (False, True)}
    results = run_on_ranks(toolkit_runs, num_ranks, folder, text_file)[0]
    assert set(results) == set(cases(num_ranks))
    for case in cases(num_ranks):
        strategy, tied, accumulation = case
        records, logits_difference = results[case]
        expected = by_hand[tied]
        assert max(expected.norms) > MAX_NORM, "clipping must be active"
        # A norm is a square root of a sum over all gradients, whose rounding it adds up.
        for name, figures, exact in (
            ("loss", expected.losses, 1e-6),
            ("grad_norm", expected.norms, 1e-5),
            ("learning_rate", RATES, 1e-6),
        ):
            assert [record[name] for record in records] == pytest.approx(figures, rel=exact), (case, name)
        exported = load_file(folder / f"{strategy}-{tied}-{accumulation}-{num_ranks}" / "export" / "model.safetensors")
        assert set(exported) == set(expected.weights), case
        differences = torch.cat(
            [(exported[name] - weight).abs().flatten() for name, weight in expected.weights.items()]
        )
        # AdamW divides by a gradient's own size: where that is next to nothing, rounding moves the weight.
        assert float(differences.max()) < 3e-5, case
        assert int((differences > 1e-5).sum()) <= 2, f"{case}: of {len(differences)} elements"
        assert logits_difference < 1e-6, case
