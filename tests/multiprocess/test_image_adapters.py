"""Adapters with rows of images, by part of the model: losses and adapters of peft's loop, row by row."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from support.four_bits import read_by_hand
from support.peft_by_hand import SEED, adapted
from support.ranks import meet, run_on_ranks
from support.sights import EYES, drawn_image, save_rows, save_seeing
from support.texts import make_texts
from support.tiny import recipe_values
from transformers import AutoModelForImageTextToText, AutoProcessor, BitsAndBytesConfig

STEPS, ROWS, RATE = 3, 4, 1e-2
TEXTS = [" ".join(text.split()[: 3 + i % 6]) for i, text in enumerate(make_texts(STEPS * ROWS, seed=4))]
# In the first step on both ranks, in the second on neither, in the third on the second rank alone.
COUNTS = [1, 0, 2, 0, 0, 0, 0, 0, 0, 0, 1, 2]
KIND = "llava"
ALL = ["language", "projector", "vision"]
NF4 = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=False, bnb_4bit_compute_dtype=torch.float32
)
QUERIES = {"target_modules": ["q_proj", "v_proj"]}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # Settings of the recipe, and what of peft's target_modules they are; without model.train the language model alone.
    "language": ({"adapter": QUERIES}, {"target_modules": r".*language_model.*(q_proj|v_proj)"}),
    "all": ({"adapter": QUERIES, "model": {"train": ALL}}, QUERIES),
    "linear": (
        {"adapter": {"target_modules": "all-linear"}, "model": {"train": ["language", "projector"]}},
        {"target_modules": r".*(language_model.*_proj|projector\.linear_.)"},
    ),
    "projector in full": (
        {
            "adapter": {**QUERIES, "modules_to_save": ["multi_modal_projector"]},
            "model": {"train": ["language", "projector"]},
        },
        {"target_modules": r".*language_model.*(q_proj|v_proj)", "modules_to_save": ["multi_modal_projector"]},
    ),
    "nf4": ({"adapter": {**QUERIES, "quantize": "nf4"}}, {"target_modules": r".*language_model.*(q_proj|v_proj)"}),
}
Run = tuple[str, str, dict[str, Any]]
FAST: list[Run] = [
    ("all", "ddp", {}),  # the last layer of its tower is not used
    ("linear", "zero3", {"accumulate": "by_block", "activation_checkpointing": 1}),
    ("projector in full", "zero3", {}),
    ("nf4", "zero2", {"offload": "optimizer", "offload_executor": "cpu_torch"}),
]
OTHERS: list[Run] = [(case, "zero3", {}) for case in CASES if case != "projector in full"]


def row_loss(model: Any, processor: Any, text: str, numbers: list[int]) -> tuple[torch.Tensor, int]:
    words = text.split()
    asked = (EYES[KIND]["written"] + words[0]) * len(numbers) or words[0]
    answer = " ".join(words[1:]) + "<|im_end|>"
    whole = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n{answer}\n"
    images = [[drawn_image(number) for number in numbers]] if numbers else None
    inputs = processor(text=[whole], images=images, return_tensors="pt")
    inputs.pop("attention_mask")
    logits = model(**inputs, use_cache=False).logits[0, :-1]
    behind = len(processor.tokenizer("\n")["input_ids"])
    labels = torch.full_like(inputs["input_ids"], -100)
    learned = slice(-len(processor.tokenizer(answer)["input_ids"]) - behind, -behind)
    labels[0, learned] = inputs["input_ids"][0, learned]
    return F.cross_entropy(logits, labels[0, 1:], reduction="sum"), int((labels >= 0).sum())


@cache
def plain(folder: Path, case: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.set_num_threads(1)
    processor = AutoProcessor.from_pretrained(folder / "model")
    read_by_hand()
    how = {"quantization_config": NF4} if case == "nf4" else {}
    base = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32, **how)
    model = adapted(base, {"r": 2, "lora_alpha": 4, **CASES[case][1]}).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0, eps=1e-3)
    losses, number = [], 0
    for step in range(STEPS):
        total, targets = torch.zeros(()), 0
        for row in range(step * ROWS, (step + 1) * ROWS):
            loss, count = row_loss(model, processor, TEXTS[row], list(range(number, number + COUNTS[row])))
            total, targets, number = total + loss, targets + count, number + COUNTS[row]
        (total / targets).backward()
        for parameter in trained:  # in a step without images a gradient of 0
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item() / targets)
    import peft

    return losses, {name: tensor.detach().clone() for name, tensor in peft.get_peft_model_state_dict(model).items()}


def runs(folder: Path, asked: list[Run]) -> dict[str, Any]:
    from toolkit import Recipe, finetune

    found = {}
    for case, strategy, sharding in asked:
        meet()
        name = f"{case}-{strategy}-{len(sharding)}"
        values = recipe_values(folder / "model", folder / "rows.jsonl", folder / name, folder / "cache")
        values["data"] |= {"max_length": 128, "shuffle": False, "packing": False}
        values["adapter"] = {"kind": "lora", "r": 2, **CASES[case][0]["adapter"]}
        values["model"] |= CASES[case][0].get("model", {})
        values["optimizer"] = {"learning_rate": RATE, "weight_decay": 0.0, "eps": 1e-3}
        values["schedule"] = {"kind": "constant"}
        values["training"] |= {"max_steps": STEPS, "max_grad_norm": None, "seed": SEED, "micro_batch_size": 2}
        if "accumulate" in sharding:
            values["training"] |= {"micro_batch_size": 1, "gradient_accumulation_steps": 2}
        values["sharding"] = {"strategy": strategy, **sharding}
        result = finetune(Recipe.from_mapping(values))
        found[name] = [record["loss"] for record in result.metrics if record["split"] == "train"]
    return found


@pytest.mark.parametrize("asked", [FAST, pytest.param(OTHERS, marks=pytest.mark.grid)], ids=["fast", "others"])
def test_adapters_are_trained_as_by_peft(asked: list[Run], tmp_path: Path) -> None:
    save_seeing(KIND, tmp_path / "model", TEXTS)
    save_rows(tmp_path, TEXTS, COUNTS)
    found = run_on_ranks(runs, 2, tmp_path, asked)[0]
    for case, strategy, sharding in asked:
        losses, adapter = plain(tmp_path, case)
        name = f"{case}-{strategy}-{len(sharding)}"
        assert found[name] == pytest.approx(losses, rel=1e-6), name
        saved = load_file(tmp_path / name / "export/adapter_model.safetensors")
        assert saved.keys() == adapter.keys(), name
        for key, tensor in adapter.items():
            assert float((saved[key] - tensor).abs().max()) < 1e-5, (name, key)
        in_tower = [key for key in adapter if "vision_tower" in key and "lora_B" in key]
        assert bool(in_tower) is (case == "all")
        assert not in_tower or max(float(adapter[key].abs().max()) for key in in_tower) > 1e-4
