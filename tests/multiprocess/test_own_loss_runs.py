"""A loss of the user's: each run is a plain loop of transformers' own model, with each row in a forward of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.plain_rows import plain_rows
from support.ranks import meet, run_on_ranks
from support.runs import losses_of, records_of
from support.texts import make_texts, write_rows
from support.tiny import recipe_values, save_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

STEPS, G = 3, 8
"""Optimizer steps, and samples of each."""

SOURCE = """
import torch
import torch.nn.functional as F


def focal(logits, labels, gamma=2.0):
    log_p = -F.cross_entropy(logits, labels, reduction="none")
    return -((1 - log_p.exp()) ** gamma * log_p).sum(), len(labels)


def by_row(log_probabilities, weights, num_rows):
    return -(weights * log_probabilities).sum(), num_rows


def weighted(logits, labels):
    weights = torch.where(labels % 3 == 0, 2.0, 0.5)
    return (weights * F.cross_entropy(logits, labels, reduction="none")).sum(), weights.sum()
"""

Losses = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, float]]


def focal(log_p: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, float]:
    return -((1 - log_p.exp()).square() * log_p).sum(), len(labels)


def by_row(log_p: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, float]:
    return -log_p.mean(), 1


def weighted(log_p: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, float]:
    weights = torch.tensor([2.0 if label % 3 == 0 else 0.5 for label in labels.tolist()])
    return -(weights * log_p).sum(), float(weights.sum())


BY_HAND: dict[str, Losses] = {"focal": focal, "by_row": by_row, "weighted": weighted}
"""The sum and the count of one row, from the log-probabilities (N,) and the labels (N,) of its targets."""

PADDED = {"data": {"packing": False}}
BY_BLOCK = {"strategy": "zero3", "accumulate": "by_block"}
IN_TENSOR_GROUPS = {"strategy": "zero3", "tensor": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "focal-zero3": ("focal", {"sharding": {"strategy": "zero3"}}),
    "focal-ddp-padded": ("focal", {"sharding": {"strategy": "ddp"}, **PADDED}),
    "by_row-offload": ("by_row", {"sharding": {"strategy": "zero2", "offload": "optimizer"}}),
    "by_row-zero3-padded": ("by_row", {"sharding": {"strategy": "zero3"}, **PADDED}),
    "weighted-by_block": ("weighted", {"sharding": BY_BLOCK}),
    "by_row-tensor": ("by_row", {"sharding": IN_TENSOR_GROUPS}),
    "weighted-tensor-padded": ("weighted", {"sharding": IN_TENSOR_GROUPS, **PADDED}),
    "weighted-zero1-padded": ("weighted", {"sharding": {"strategy": "zero1"}, **PADDED}),
}


def recipe_of(folder: Path, name: str, micro_batch_size: int = 2, accumulation: int = 2) -> Any:
    import toolkit

    loss, sections = CASES[name]
    run = f"{name}-{micro_batch_size}-{accumulation}"
    values = recipe_values(folder / "model", folder / "rows.jsonl", folder / run, folder / "cache", max_steps=STEPS)
    values["optimizer"] = {"learning_rate": 1e-2, "weight_decay": 0.0}
    values["schedule"] = {"kind": "constant"}
    copies = sections.get("sharding", {}).get("tensor", 1)  # ranks that have the same rows
    values["training"] |= {"micro_batch_size": copies * micro_batch_size, "gradient_accumulation_steps": accumulation}
    values["data"] |= {"validation": str(folder / "held_out.jsonl")}
    values["objective"] = {"loss": f"{folder}/mine.py:{loss}"}
    values["export"] = {"enabled": False}
    for section, fields in sections.items():
        values[section] = {**values.get(section, {}), **fields}
    return toolkit.Recipe.from_mapping(values)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own_loss")
    texts = [" ".join(text.split()[: 2 + number % 5]) for number, text in enumerate(make_texts(60))]
    save_llama(folder / "model", texts, tied=False)
    (folder / "mine.py").write_text(SOURCE)
    for name, part in (("rows", texts[:50]), ("held_out", texts[50:])):
        write_rows(folder / f"{name}.jsonl", ({"text": text} for text in part))
    return folder


def on_two_ranks(folder: Path) -> None:
    import toolkit

    for name in CASES:
        meet()
        toolkit.finetune(recipe_of(folder, name))


@pytest.fixture(scope="module")
def on_two(folder: Path) -> Path:
    run_on_ranks(on_two_ranks, 2, folder)
    return folder


def samples_of(folder: Path, name: str, file: str) -> list[list[torch.Tensor]]:
    """The rows of each sample in order, (n,) each."""
    if "padded" not in name:
        packed = plain_rows(folder / "model", folder / file)
        found = []
        for ids, labels, positions in packed:
            starts = (positions == 0).nonzero()[:, 0].tolist()
            ends = [*starts[1:], int((labels != -100).nonzero()[-1]) + 1]
            found.append([ids[start:end] for start, end in zip(starts, ends, strict=True)])
        return found
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    lines = [json.loads(line)["text"] for line in (folder / file).read_text().splitlines()]
    return [[torch.tensor([*tokenizer(text)["input_ids"], tokenizer.eos_token_id])] for text in lines]


def sums_by_hand(model: Any, rows: list[torch.Tensor], losses: Losses) -> tuple[torch.Tensor, float]:
    total, count = torch.zeros(()), 0.0
    for ids in rows:
        log_p = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        of_row = losses(log_p.gather(1, ids[1:, None])[:, 0], ids[1:])
        total, count = total + of_row[0], count + of_row[1]
    return total, count


def plain(folder: Path, name: str) -> tuple[list[list[float]], list[float]]:
    """Loss and gradient norm of each step, and the held-out losses before and after."""
    losses = BY_HAND[CASES[name][0]]
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    samples, held_out = samples_of(folder, name, "rows.jsonl"), samples_of(folder, name, "held_out.jsonl")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    steps = []

    def held_out_loss() -> float:
        with torch.no_grad():
            total, count = sums_by_hand(model, [row for sample in held_out for row in sample], losses)
        return float(total) / count

    evaluations = [held_out_loss()]
    for step in range(STEPS):
        chosen = [samples[number % len(samples)] for number in range(step * G, (step + 1) * G)]
        total, count = sums_by_hand(model, [row for sample in chosen for row in sample], losses)
        (total / count).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        steps.append([total.item() / count, norm.item()])
        optimizer.step()
        optimizer.zero_grad()
    return steps, [*evaluations, held_out_loss()]


def curve(run: Path) -> tuple[list[list[float]], list[float]]:
    records = records_of(run)
    steps = [[record["loss"], record["grad_norm"]] for record in records if record["split"] == "train"]
    return steps, losses_of(records, "eval")


@pytest.mark.parametrize("name", CASES)
def test_a_run_is_the_plain_loop(name: str, on_two: Path) -> None:
    expected, found = plain(on_two, name), curve(on_two / f"{name}-2-2")
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(expected[0]), rtol=2e-4, atol=1e-5)
    assert found[1] == pytest.approx(expected[1], rel=2e-4)
    records, told = ((on_two / f"{name}-2-2" / file).read_text() for file in ("metrics.jsonl", "run.json"))
    step, value = min(zip((0, STEPS), expected[1], strict=True), key=lambda pair: pair[1])
    assert json.loads(told)["best"] == {"step": step, "by": "loss", "value": pytest.approx(value), "checkpoint": None}
    assert ('"rows_per_second"' in records) == name.startswith("by_row"), "what a step is divided by"


@pytest.mark.parametrize("split", [(8, 1), (1, 8)])
def test_the_split_into_micro_batches_changes_nothing(split: tuple[int, int], folder: Path) -> None:
    import toolkit

    assert os.environ.get("WORLD_SIZE", "1") == "1"
    name = "weighted-zero1-padded"
    toolkit.finetune(recipe_of(folder, name, *split))
    expected, found = plain(folder, name), curve(folder / f"{name}-{split[0]}-{split[1]}")
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(expected[0]), rtol=2e-4, atol=1e-5)
    assert found[1] == pytest.approx(expected[1], rel=2e-4)
