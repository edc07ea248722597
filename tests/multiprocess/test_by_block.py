"""Accumulation by block: the run that reduces once a step, to the last bit, with the gathers of one micro-batch."""

from __future__ import annotations

import functools
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import cases
from support.ranks import meet, run_on_ranks
from support.texts import make_texts, write_rows
from support.tiny import llama, recipe_values, save_llama
from support.traffic import Traffic
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from toolkit.recipe.recipe import Recipe
from toolkit.sharding import Checkpointing, checkpoint_blocks, plan_units
from toolkit.sharding.apply import apply
from toolkit.sharding.blocks.by_block import ByBlock
from toolkit.sharding.plan.strategy import STRATEGIES

STEPS, MICRO_BATCHES = 3, 3
TEXTS = [" ".join(text.split()[:16]) for text in make_texts(40, seed=2)]
TABLES = cases(__file__)
CASES: dict[str, dict[str, dict[str, Any]]] = TABLES["CASES"]
"""Other objectives, experts and compiled blocks: test_all_pairs.py."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("by_block")
    save_llama(folder / "model", TEXTS, tied=False, layers=3)
    words = [text.split() for text in TEXTS]
    write_rows(folder / "rows.jsonl", [{"text": text} for text in TEXTS])
    sides = [(" ".join(w[:3]), " " + " ".join(w[3:7]), " the " + " ".join(w[7:10])) for w in words]
    write_rows(
        folder / "pairs.jsonl", [dict(zip(("prompt", "chosen", "rejected"), side, strict=True)) for side in sides]
    )
    return folder


def recipe(folder: Path, name: str, strategy: str, accumulate: str, changes: dict[str, dict[str, Any]]) -> Recipe:
    values = recipe_values(folder / "model", folder / "rows.jsonl", folder / name, folder / "cache")
    values["data"] |= {"packing": False}
    values["schedule"] = {"kind": "constant"}
    values["training"] |= {"max_steps": STEPS, "micro_batch_size": 2, "gradient_accumulation_steps": MICRO_BATCHES}
    values["sharding"] = {"strategy": strategy, "accumulate": accumulate, "activation_checkpointing": 1}
    for section, fields in changes.items():
        values[section] = {**values.get(section, {}), **fields}
    values["data"]["train"] = str(folder / values["data"]["train"])
    return Recipe.from_mapping(values)


def rows_of(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(10 + rank)
    return [torch.randint(0, 131, (1, 20 + number), generator=generator) for number in range(4)]


def window() -> dict[str, Any]:
    """Two windows of unequal rows, each after an evaluation; what a rank sends in the second; a forward that fails."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = llama(num_hidden_layers=3)
    plan = plan_units(model)
    checkpoint_blocks(model, plan, Checkpointing(1))
    apply(model, plan, STRATEGIES["zero3"], mesh, "no", lambda: True)
    runner = ByBlock(model, plan)

    def forward(row: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=row, labels=row).loss
        return loss / 4

    forwards = [functools.partial(forward, row) for row in rows_of(dist.get_rank())]
    for _ in range(2):
        model.zero_grad()
        runner.evaluate(forwards)  # whose order of gathers the backward must not take for its own
        with Traffic() as traffic:
            losses = runner.run(forwards, torch.Tensor.backward)
    runner.evaluate(forwards)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters()), "nothing stays gathered"
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


def runs(folder: Path, cases: dict[str, Any], of_one_step: str) -> dict[str, Any]:
    from toolkit import finetune

    found: dict[str, Any] = {}
    for case, changes in cases.items():
        for strategy, accumulate in ((of_one_step, "by_micro_batch"), ("zero3", "by_block")):
            meet()
            strategy = "hybrid" if of_one_step == "hybrid" else strategy
            os.environ["PARALLELISM_CONFIG_DP_SHARD_SIZE"] = "2" if strategy == "hybrid" else "1"
            result = finetune(recipe(folder, f"{case}-{strategy}-{accumulate}", strategy, accumulate, changes))
            found[f"{case} {accumulate}"] = [(record["loss"], record["grad_norm"]) for record in result.metrics]
    return found


def stopped_and_resumed(folder: Path) -> dict[str, Any]:
    """Checkpoints between windows: what goes on from one is the run that was not interrupted."""
    from toolkit import finetune

    found: dict[str, Any] = {}
    for name, checkpoint in (
        ("whole", {"every_steps": 2}),
        ("resumed", {"resume": str(folder / "whole" / "checkpoints" / "step_00000002")}),
    ):
        meet()
        changes = {"checkpoint": checkpoint, "data": {"validation": str(folder / "rows.jsonl")}}
        found[name] = finetune(recipe(folder, name, "zero3", "by_block", changes)).metrics[-2:]
    return {name: [(record["split"], record["step"], record["loss"]) for record in found[name]] for name in found}


def both(folder: Path, cases: dict[str, Any], of_one_step: str) -> Any:
    found = runs(folder, cases, of_one_step)
    return found, stopped_and_resumed(folder) if of_one_step == "zero1" else None


@pytest.mark.parametrize(
    ("num_ranks", "of_one_step", "cases"),
    [
        (2, "zero1", {name: CASES[name] for name in ("plain", "offload", "lora")}),
        pytest.param(2, "zero1", CASES, marks=pytest.mark.grid),
        (4, "hybrid", {"plain": CASES["plain"]}),
        pytest.param(1, "zero1", CASES, marks=pytest.mark.grid),
        # Each replica of a host would hold all offloaded state.
        pytest.param(4, "hybrid", {k: v for k, v in CASES.items() if k != "offload"}, marks=pytest.mark.grid),
    ],
)
def test_a_run_by_block_is_the_run_that_reduces_once_a_step(
    folder: Path, tmp_path: Path, num_ranks: int, of_one_step: str, cases: dict[str, Any]
) -> None:
    for name in ("model", "rows.jsonl", "pairs.jsonl"):
        (tmp_path / name).symlink_to(folder / name)
    found, resumed = run_on_ranks(both, num_ranks, tmp_path, cases, of_one_step)[0]
    for case in cases:
        ways = (found[f"{case} {way}"] for way in ("by_block", "by_micro_batch"))
        by_block, by_micro_batch = (torch.tensor(way, dtype=torch.float64) for way in ways)
        # hybrid reduces each micro-batch, and sums what it has reduced.
        close = 1e-5 if of_one_step == "hybrid" else 0
        torch.testing.assert_close(by_block, by_micro_batch, rtol=close, atol=0, msg=case)
        assert len(by_block) == STEPS
    if resumed is not None:
        assert resumed["resumed"] == resumed["whole"]
        assert [told[:2] for told in resumed["whole"]] == [("train", STEPS), ("eval", STEPS)]
