"""Accumulation by block: the run that reduces once a step, to the last bit, with the gathers of one micro-batch."""

from __future__ import annotations

import functools
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import make_texts
from ranks import meet, run_on_ranks
from tiny import llama, recipe_values, save_llama
from torch.distributed.device_mesh import init_device_mesh
from traffic import Traffic

from toolkit.errors import BadInputError
from toolkit.recipe.recipe import Recipe
from toolkit.sharding import Checkpointing, plan_units
from toolkit.sharding.apply import apply
from toolkit.sharding.by_block import ByBlock
from toolkit.sharding.strategy import STRATEGIES

STEPS, MICRO_BATCHES = 3, 3
TEXTS = [" ".join(text.split()[:16]) for text in make_texts(40, seed=2)]
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {},
    "bf16": {"training": {"mixed_precision": "bf16"}},
    "offload": {"sharding": {"offload": "optimizer", "offload_executor": "cpu_torch"}},
    "lora": {"adapter": {"kind": "lora", "r": 2}, "training": {"mixed_precision": "bf16"}},
    "packed": {"data": {"packing": True, "max_length": 64}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("by_block")
    save_llama(folder / "model", TEXTS, tied=False, layers=3)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return folder


def recipe(folder: Path, name: str, strategy: str, accumulate: str, changes: dict[str, dict[str, Any]]) -> Recipe:
    values = recipe_values(folder / "model", folder / "rows.jsonl", folder / name, folder / "cache")
    values["data"] |= {"packing": False}
    values["schedule"] = {"kind": "constant"}
    values["training"] |= {
        "max_steps": STEPS,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
    }
    values["sharding"] = {"strategy": strategy, "accumulate": accumulate, "activation_checkpointing": 1}
    for section, fields in changes.items():
        values[section] = {**values.get(section, {}), **fields}
    return Recipe.from_mapping(values)


def rows_of(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(10 + rank)
    return [torch.randint(0, 131, (1, 20 + number), generator=generator) for number in range(4)]


def window() -> dict[str, Any]:
    """Two windows of rows of unequal lengths, and what a rank sends in the second; then a forward that fails."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = llama(num_hidden_layers=3)
    plan = plan_units(model)
    apply(model, plan, STRATEGIES["zero3"], mesh, "no", lambda: True, Checkpointing(1))
    runner = ByBlock(model, plan)

    def forward(row: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=row, labels=row).loss
        return loss / 4

    forwards = [functools.partial(forward, row) for row in rows_of(dist.get_rank())]
    for _ in range(2):
        model.zero_grad()
        with Traffic() as traffic:
            losses = runner.run(forwards, torch.Tensor.backward)
    gradients = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}

    threads = threading.active_count()
    with pytest.raises(IndexError):
        runner.run(
            [*forwards[:2], functools.partial(forward, torch.tensor([[1000]])), forwards[3]], torch.Tensor.backward
        )
    return {
        "losses": [float(loss) for loss in losses],
        "gradients": gradients,
        "calls": dict(traffic.calls),
        "threads": threading.active_count() - threads,
    }


def test_a_window_is_gathered_twice_and_reduced_once_whatever_the_lengths_of_its_rows() -> None:
    found = run_on_ranks(window, 2)
    plain = llama(num_hidden_layers=3)
    for rank in range(2):
        losses = [plain(input_ids=row, labels=row).loss / 4 for row in rows_of(rank)]
        assert found[rank]["losses"] == pytest.approx([float(loss) for loss in losses], rel=1e-6)
        torch.stack(losses).sum().div(2).backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[0]["gradients"][name], parameter.grad, rtol=0, atol=1e-6)
    # The embeddings and three blocks twice; the tail, which the loss needs at once, once.
    calls = found[0]["calls"]
    assert (calls["all_gather"], calls["reduce_scatter"]) == (2 * 4 + 1, 4 + 1)
    assert found[0]["threads"] == 0, "a forward that fails ends the others'"


def runs(folder: Path) -> dict[str, Any]:
    from toolkit import finetune

    found: dict[str, Any] = {}
    for case, changes in CASES.items():
        for strategy, accumulate in (("zero1", "by_micro_batch"), ("zero3", "by_block")):
            meet()
            name = f"{case}-{strategy}-{accumulate}"
            result = finetune(recipe(folder, name, strategy, accumulate, changes))
            found[name] = [
                (record["loss"], record["grad_norm"]) for record in result.metrics if record["split"] == "train"
            ]
    return found


def test_a_run_by_block_is_the_run_that_reduces_once_a_step(folder: Path) -> None:
    found = run_on_ranks(runs, 2, folder)[0]
    for name, records in found.items():
        case = name.partition("-")[0]
        assert records == found[f"{case}-zero1-by_micro_batch"], name
        assert len(records) == STEPS


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"training": {"gradient_accumulation_steps": 1}}, "one micro-batch a step"),
        ({"sharding": {"activation_checkpointing": None}}, "set sharding.activation_checkpointing=1"),
        ({"training": {"compile": True}}, "training.compile is not possible"),
    ],
)
def test_what_by_block_cannot_run_is_refused(changes: dict[str, dict[str, Any]], told: str, folder: Path) -> None:
    with pytest.raises(BadInputError, match=told):
        recipe(folder, "refused", "zero3", "by_block", changes)


def test_a_strategy_that_gathers_once_a_step_has_no_use_for_it(folder: Path) -> None:
    refused = run_on_ranks(refuses, 1, folder)[0]
    assert "by_block has no effect with strategy zero2" in refused


def refuses(folder: Path) -> str:
    from toolkit import finetune

    with pytest.raises(BadInputError) as error:
        finetune(recipe(folder, "zero2", "zero2", "by_block", {}))
    return str(error.value)
