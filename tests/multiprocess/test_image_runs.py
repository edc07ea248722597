"""Rows with images: losses and weights of a plain loop on transformers' own model and processor, row by row."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from support.ranks import meet, run_on_ranks
from support.sights import EYES, can_be_read, drawn_image, save_rows, save_seeing
from support.texts import make_texts
from support.tiny import recipe_values
from transformers import AutoModelForImageTextToText, AutoProcessor

STEPS, ROWS, RATE = 3, 4, 3e-3
TEXTS = [" ".join(text.split()[: 3 + i % 6]) for i, text in enumerate(make_texts(STEPS * ROWS, seed=4))]
# In the first step on both ranks, in the second on neither, in the third on the second rank alone.
COUNTS = [1, 0, 2, 0, 0, 0, 0, 0, 0, 0, 1, 3]
KINDS = [
    pytest.param(kind, marks=pytest.mark.skipif(not can_be_read(kind), reason="needs the extra vision"))
    for kind in EYES
]
PROJECTORS = ("multi_modal_projector", "connector", "merger", "embed_vision")
LANGUAGE = ("language_model", "lm_head", "embed_tokens", "text_model")
# Linear attention runs over the ends of rows.
NOT_PACKED = ("qwen3_5",)
ROUNDING = {"gemma4": 1e-4}
"""Of weights. The plain loop in float32 is 2e-5 from the same loop in float64; a step is 3e-3."""
CASES: dict[str, dict[str, Any]] = {
    "packed": {
        "data": {"packing": True},
        "training": {"micro_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": None, "num_epochs": 1},
    },
    "padded": {"data": {"packing": False}},
    # LLaVA's last layer and Gemma 3's pooling get no gradient.
    "ddp": {"sharding": {"strategy": "ddp"}, "model": {"train": ["language", "projector", "vision"]}},
    # LLaVA goes on from a state inside of its tower.
    "by block": {
        "model": {"train": ["language", "projector", "vision"]},
        "sharding": {"strategy": "zero3", "accumulate": "by_block", "activation_checkpointing": 1},
        "training": {"gradient_accumulation_steps": 2, "micro_batch_size": 1},
    },
    "zero1": {"sharding": {"strategy": "zero1"}, "training": {"gradient_accumulation_steps": 2, "micro_batch_size": 1}},
    "checkpoints": {"sharding": {"activation_checkpointing": 1}},
    "offload": {"sharding": {"strategy": "zero2", "offload": "optimizer", "offload_executor": "cpu_torch"}},
    "all": {
        "model": {"train": ["language", "projector", "vision"]},
        "optimizer": {"projector_learning_rate": RATE / 2, "vision_learning_rate": RATE / 8},
    },
    "projector": {"model": {"train": ["projector"]}},
}


def rows_by_hand(folder: Path, kind: str) -> list[tuple[dict[str, Any], torch.Tensor]]:
    """What transformers' processor makes of each row, and its labels: the answer and the token that ends it."""
    processor = AutoProcessor.from_pretrained(folder / kind)
    found, number = [], 0
    for text, count in zip(TEXTS, COUNTS, strict=True):
        words = text.split()
        asked = (EYES[kind]["written"] + words[0]) * count or words[0]
        answer = " ".join(words[1:]) + "<|im_end|>"
        whole = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n{answer}\n"
        images = [drawn_image(number + i) for i in range(count)]
        number += count
        inputs = processor(text=[whole], images=[images] if images else None, return_tensors="pt")
        learned = len(processor.tokenizer(answer)["input_ids"])
        behind = len(processor.tokenizer("\n")["input_ids"])
        labels = inputs["input_ids"].clone()
        labels[0, : -(learned + behind)] = -100
        labels[0, -behind:] = -100
        assert processor.tokenizer.decode(labels[0][labels[0] >= 0]) == answer
        inputs.pop("attention_mask")
        floats = {name: tensor.float() for name, tensor in inputs.items() if tensor.is_floating_point()}
        found.append(({**inputs, **floats}, labels))
    return found


@cache
def plain(
    folder: Path, kind: str, parts: tuple[str, ...], at_once: bool, rates: tuple[tuple[str, float], ...]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and the weights after the last step; `at_once`: after one step on all rows.

    `rates` are those of parts that have their own.
    """
    torch.set_num_threads(1)
    model: Any = AutoModelForImageTextToText.from_pretrained(folder / kind, dtype=torch.float32)
    groups: dict[str, list[torch.nn.Parameter]] = {"language": [], "projector": [], "vision": []}
    for name, parameter in model.named_parameters():
        part = "language" if any(word in name for word in LANGUAGE) else "vision"
        part = "projector" if any(word in name for word in PROJECTORS) else part
        parameter.requires_grad_(part in parts)
        groups[part].append(parameter)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rate_of = {"language": RATE, "projector": RATE, "vision": RATE, **dict(rates)}
    optimizer = torch.optim.AdamW(
        [{"params": groups[part], "lr": rate_of[part]} for part in groups if part in parts], weight_decay=0.0, eps=1e-4
    )
    rows, losses = rows_by_hand(folder, kind), []
    for step in range(1 if at_once else STEPS):
        total, count = torch.zeros(()), 0
        for inputs, labels in rows if at_once else rows[step * ROWS :][:ROWS]:
            logits = model.train()(**inputs, use_cache=False).logits
            total = total + F.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum")
            count += int((labels >= 0).sum())
        if total.requires_grad:
            (total / count).backward()
        for parameter in trained:  # what no row has reached has a gradient of 0, whatever else the step holds
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item() / count)
    return losses, {name: tensor.detach() for name, tensor in model.state_dict().items()}


def runs(folder: Path, kind: str, cases: list[str]) -> dict[str, list[float]]:
    from toolkit import Recipe, finetune

    found: dict[str, list[float]] = {}
    for case in cases:
        meet()
        values = recipe_values(folder / kind, folder / "rows.jsonl", folder / f"{kind}-{case}", folder / "cache")
        # An image is 70 tokens of Gemma 4's, at the least.
        values["data"] |= {"max_length": 512 if kind == "gemma4" else 128, "shuffle": False}
        values["optimizer"] = {"learning_rate": RATE, "weight_decay": 0.0, "eps": 1e-4}
        values["schedule"] = {"kind": "constant"}
        values["training"] |= {"max_steps": STEPS, "max_grad_norm": None, "seed": 3}
        values["training"]["micro_batch_size"] = ROWS // int(os.environ["WORLD_SIZE"])
        values["data"]["packing"] = False
        for section, fields in CASES[case].items():
            values[section] = {**values.get(section, {}), **fields}
        if kind in NOT_PACKED and case == "packed":
            values["data"]["packing"] = None
        result = finetune(Recipe.from_mapping(values))
        found[case] = [record["loss"] for record in result.metrics if record["split"] == "train"]
    return found


def expected(folder: Path, kind: str, case: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    fields = CASES[case].get("optimizer", {})
    rates = tuple((field.removesuffix("_learning_rate"), rate) for field, rate in fields.items())
    return plain(folder, kind, parts_of(case), case == "packed", rates)


def parts_of(case: str) -> tuple[str, ...]:
    return tuple(CASES[case].get("model", {}).get("train", ("language", "projector")))


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_the_plain_loop(kind: str, tmp_path: Path) -> None:
    save_seeing(kind, tmp_path / kind, TEXTS)
    save_rows(tmp_path, TEXTS, COUNTS)
    for found in run_on_ranks(runs, 2, tmp_path, kind, list(CASES)):
        for case, losses in found.items():
            assert losses == pytest.approx(expected(tmp_path, kind, case)[0], rel=1e-5), case
    base = load_file(tmp_path / kind / "model.safetensors")
    for case in CASES:
        exported = load_file(tmp_path / f"{kind}-{case}" / "export" / "model.safetensors")
        assert exported.keys() == base.keys()
        weights = expected(tmp_path, kind, case)[1]
        model: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / f"{kind}-{case}" / "export")
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(
                tensor,
                weights[name],
                rtol=1e-5,
                atol=ROUNDING.get(kind, 2e-6),
                msg=lambda m, n=name, c=case: f"{c} {n} {m}",
            )
        frozen = [name for name in base if "vision" in name or "visual" in name]
        assert frozen
        if "vision" not in parts_of(case):
            towers = [name for name in frozen if not any(part in name for part in PROJECTORS)]
            assert all(torch.equal(exported[name], base[name]) for name in towers)
