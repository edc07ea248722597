"""Rows with images: losses and weights of a plain loop on transformers' own model and processor, row by row.

In full and with peft's adapters. The gradients of 12 families under each strategy: test_image_grid.py.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from support.four_bits import read_by_hand
from support.peft_by_hand import SEED, adapted
from support.plain_loop import Trained, plain_loop
from support.ranks import run_on_ranks
from support.runs import finetuned, losses_of
from support.sights import EYES, can_be_read, drawn_image, save_rows, save_seeing
from support.texts import make_texts
from support.tiny import recipe_values, with_sections
from transformers import AutoModelForImageTextToText, AutoProcessor, BitsAndBytesConfig

STEPS, ROWS, RATE = 3, 4, 3e-3
TEXTS = [" ".join(text.split()[: 3 + i % 6]) for i, text in enumerate(make_texts(STEPS * ROWS, seed=4))]
# In the first step on both ranks, in the second on neither, in the third on the second rank alone.
COUNTS = [1, 0, 2, 0, 0, 0, 0, 0, 0, 0, 1, 3]
OTHERS = [
    pytest.param(
        kind,
        marks=[
            pytest.mark.skipif(not can_be_read(kind), reason="needs the extra vision"),
            *([pytest.mark.grid] if kind == "idefics3" else []),
        ],
    )
    for kind in EYES
    if kind != "llava"
]
ALL = ["language", "projector", "vision"]
PROJECTORS = ("multi_modal_projector", "connector", "merger", "embed_vision")
LANGUAGE = ("language_model", "lm_head", "embed_tokens", "text_model")
# Linear attention runs over the ends of rows.
NOT_PACKED = ("qwen3_5",)
ROUNDING = {"gemma4": 1e-4}
"""Of weights. The plain loop in float32 is 2e-5 from the same loop in float64; a step is 3e-3."""
NF4 = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=False, bnb_4bit_compute_dtype=torch.float32
)
TWO_MICRO_BATCHES = {"gradient_accumulation_steps": 2, "micro_batch_size": 1}
BY_BLOCK = {"strategy": "zero3", "accumulate": "by_block", "activation_checkpointing": 1}
OFFLOADED = {"strategy": "zero2", "offload": "optimizer", "offload_executor": "cpu_torch"}
QUERIES = {"target_modules": ["q_proj", "v_proj"]}
CASES: dict[str, dict[str, Any]] = {
    "packed": {
        "data": {"packing": True},
        "training": {"micro_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": None, "num_epochs": 1},
    },
    "stream": {"data": {"streaming": True}},
    # The last layer of LLaVA's tower and Gemma 3's pooling get no gradient.
    "ddp": {"sharding": {"strategy": "ddp"}, "model": {"train": ALL}},
    # LLaVA goes on from a state inside of its tower.
    "by block": {"model": {"train": ALL}, "sharding": BY_BLOCK, "training": TWO_MICRO_BATCHES},
    "all": {
        "model": {"train": ALL},
        "optimizer": {"learning_rates": {"projector": RATE / 2, "vision": RATE / 8}},  # see `patterns`
    },
    "projector": {"model": {"train": ["projector"]}},
    "offload": {"sharding": OFFLOADED},
}
FEW = ("packed", "all")
"""Of the other families."""

ADAPTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "adapters, ddp": ({"adapter": QUERIES, "model": {"train": ALL}, "sharding": {"strategy": "ddp"}}, QUERIES),
    "adapters, by block": (
        {
            "adapter": {"target_modules": "all-linear"},
            "model": {"train": ["language", "projector"]},
            "sharding": BY_BLOCK,
            "training": TWO_MICRO_BATCHES,
        },
        {"target_modules": r".*(language_model.*_proj|projector\.linear_.)"},
    ),
    "projector in full": (
        {
            "adapter": {**QUERIES, "modules_to_save": ["multi_modal_projector"]},
            "model": {"train": ["language", "projector"]},
        },
        {"target_modules": r".*language_model.*(q_proj|v_proj)", "modules_to_save": ["multi_modal_projector"]},
    ),
    # Without model.train the language model alone.
    "nf4": (
        {"adapter": {**QUERIES, "quantize": "nf4"}, "sharding": OFFLOADED},
        {"target_modules": r".*language_model.*(q_proj|v_proj)"},
    ),
}
"""The recipe's sections, and peft's settings."""

MIXTURES: dict[str, dict[str, Any]] = {
    "llava": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0},
    "qwen3_vl_moe": {},
}
"""Type -> changed fields of its language model, which has no balance loss: test_image_grid.py compares that."""

SPREAD: dict[str, dict[str, Any]] = {
    "experts": {"sharding": {"strategy": "zero3", "experts": 2}, "model": {"train": ALL}},
    "experts, by block": {"sharding": {**BY_BLOCK, "experts": 2}, "training": TWO_MICRO_BATCHES},
}
SPREAD_ADAPTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "adapters, experts": (
        {"adapter": QUERIES, "sharding": {"strategy": "zero3", "experts": 2}},
        {"target_modules": r".*language_model.*(q_proj|v_proj)"},
    )
}
FOR_ADAPTERS = {"learning_rate": 1e-2, "eps": 1e-3}


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


def loss_of(model: Any, rows: Sequence[tuple[dict[str, Any], torch.Tensor]]) -> torch.Tensor:
    """The mean of all targets; what no row has reached has a gradient of 0, whatever else the step holds."""
    total = 0.0 * torch.stack([p.sum() for p in model.parameters() if p.requires_grad]).sum()
    for inputs, labels in rows:
        logits = model(**inputs, use_cache=False).logits
        total = total + F.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum")
    return total / sum(int((labels >= 0).sum()) for _, labels in rows)


@cache
def plain(
    folder: Path, kind: str, parts: tuple[str, ...], at_once: bool, rates: tuple[tuple[str, float], ...]
) -> tuple[Trained, dict[str, torch.Tensor]]:
    """With the weights and buffers after the last step; `at_once`: after one step on all rows.

    `rates` are those of parts that have their own.
    """
    model: Any = AutoModelForImageTextToText.from_pretrained(folder / kind, dtype=torch.float32).train()
    groups: dict[str, list[torch.nn.Parameter]] = {part: [] for part in ALL}
    for name, parameter in model.named_parameters():
        part = "language" if any(word in name for word in LANGUAGE) else "vision"
        part = "projector" if any(word in name for word in PROJECTORS) else part
        parameter.requires_grad_(part in parts)
        groups[part].append(parameter)
    held = [{"params": groups[part], "lr": dict(rates).get(part, RATE)} for part in parts]
    rows = rows_by_hand(folder, kind)
    found = plain_loop(
        model,
        [rows] if at_once else [rows[step * ROWS :][:ROWS] for step in range(STEPS)],
        lambda batch: loss_of(model, batch),
        max_norm=None,
        optimizer=torch.optim.AdamW(held, weight_decay=0.0, eps=1e-4),
    )
    return found, {name: tensor.detach() for name, tensor in model.state_dict().items()}


def by_peft(folder: Path, kind: str, case: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and the adapter after the last step."""
    read_by_hand()
    how = {"quantization_config": NF4} if case == "nf4" else {}
    base = AutoModelForImageTextToText.from_pretrained(folder / kind, dtype=torch.float32, **how)
    model = adapted(base, {"r": 2, "lora_alpha": 4, **(ADAPTED | SPREAD_ADAPTED)[case][1]}).train()
    rows = rows_by_hand(folder, kind)
    steps = [rows[step * ROWS :][:ROWS] for step in range(STEPS)]
    found = plain_loop(model, steps, lambda batch: loss_of(model, batch), rates=1e-2, eps=1e-3, max_norm=None)
    return found.losses, peft.get_peft_model_state_dict(model)


def patterns(model: Path, projector: float, vision: float) -> dict[str, float]:
    """Rates by patterns of the names that this family has."""
    words = dict.fromkeys(PROJECTORS, projector) | {"visual": vision, "vision": vision}
    names = load_file(model / "model.safetensors").keys()
    return {f"*{word}*": rate for word, rate in words.items() if any(word in name for name in names)}


def runs(folder: Path, kind: str, cases: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for case, sections in cases.items():
        values = recipe_values(folder / kind, folder / "rows.jsonl", folder / f"{kind}-{case}", folder / "cache")
        # An image is 70 tokens of Gemma 4's, at the least.
        values["data"] |= {"max_length": 512 if kind == "gemma4" else 128, "shuffle": False, "packing": False}
        values["optimizer"] = {"learning_rate": RATE, "weight_decay": 0.0, "eps": 1e-4}
        values["schedule"] = {"kind": "constant"}
        values["training"] |= {"max_steps": STEPS, "max_grad_norm": None, "seed": SEED}
        values["training"]["micro_batch_size"] = ROWS // int(os.environ["WORLD_SIZE"])
        values = with_sections(values, sections)
        if "learning_rates" in values["optimizer"]:
            values["optimizer"]["learning_rates"] = patterns(folder / kind, **values["optimizer"]["learning_rates"])
        if "adapter" in sections:
            values["adapter"] |= {"kind": "lora", "r": 2}
            values["optimizer"] |= FOR_ADAPTERS
        if kind in NOT_PACKED and case == "packed":
            values["data"]["packing"] = None
        result = finetuned(values)
        found[case] = losses_of(result.metrics)
    return found


def require_plain(folder: Path, kind: str, case: str, losses: list[float]) -> None:
    """Losses, and the weights of the export; towers that are not trained are the base's bit for bit."""
    sections, export = (CASES | SPREAD)[case], folder / f"{kind}-{case}" / "export"
    parts = tuple(sections.get("model", {}).get("train", ("language", "projector")))
    rates = tuple(sections.get("optimizer", {}).get("learning_rates", {}).items())
    expected, weights = plain(folder, kind, parts, case == "packed", rates)
    assert losses == pytest.approx(expected.losses, rel=1e-5), case
    base, exported = (load_file(place / "model.safetensors") for place in (folder / kind, export))
    assert exported.keys() == base.keys()
    model: Any = AutoModelForImageTextToText.from_pretrained(export)
    for name, tensor in model.state_dict().items():
        close = {"rtol": 1e-5, "atol": ROUNDING.get(kind, 2e-6)}
        torch.testing.assert_close(tensor, weights[name], **close, msg=lambda m, n=name: f"{case} {n} {m}")
    frozen = [name for name in base if "vision" in name or "visual" in name]
    assert frozen
    if "vision" not in parts:
        towers = [name for name in frozen if not any(part in name for part in PROJECTORS)]
        assert all(torch.equal(exported[name], base[name]) for name in towers)


def require_pefts(folder: Path, kind: str, case: str, losses: list[float]) -> None:
    expected, adapter = by_peft(folder, kind, case)
    assert losses == pytest.approx(expected, rel=1e-6), case
    saved = load_file(folder / f"{kind}-{case}" / "export/adapter_model.safetensors")
    assert saved.keys() == adapter.keys(), case
    for key, tensor in adapter.items():
        assert float((saved[key] - tensor).abs().max()) < 1e-5, (case, key)
    in_tower = [key for key in adapter if "vision_tower" in key and "lora_B" in key]
    assert bool(in_tower) is (case == "adapters, ddp")
    assert not in_tower or max(float(adapter[key].abs().max()) for key in in_tower) > 1e-4


def test_a_run_is_the_plain_loop_in_full_and_with_adapters(tmp_path: Path) -> None:
    save_seeing("llava", tmp_path / "llava", TEXTS)
    save_rows(tmp_path, TEXTS, COUNTS)
    cases = CASES | {case: sections for case, (sections, _) in ADAPTED.items()}
    found, other = run_on_ranks(runs, 2, tmp_path, "llava", cases)
    assert found == other
    for case in CASES:
        require_plain(tmp_path, "llava", case, found[case])
    for case in ADAPTED:
        require_pefts(tmp_path, "llava", case, found[case])


@pytest.mark.parametrize("kind", ["llava", *(each for each in OTHERS if each.values == ("qwen3_vl_moe",))])
def test_a_run_with_spread_experts_is_the_plain_loop(kind: str, tmp_path: Path) -> None:
    save_seeing(kind, tmp_path / kind, TEXTS, MIXTURES[kind])
    save_rows(tmp_path, TEXTS, COUNTS)
    cases = SPREAD | {case: sections for case, (sections, _) in SPREAD_ADAPTED.items()}
    found = run_on_ranks(runs, 2, tmp_path, kind, cases)[0]
    for case in SPREAD:
        require_plain(tmp_path, kind, case, found[case])
    for case in SPREAD_ADAPTED:
        require_pefts(tmp_path, kind, case, found[case])


@pytest.mark.parametrize("kind", OTHERS)
def test_a_run_of_another_family_is_the_plain_loop(kind: str, tmp_path: Path) -> None:
    save_seeing(kind, tmp_path / kind, TEXTS)
    save_rows(tmp_path, TEXTS, COUNTS)
    found = run_on_ranks(runs, 2, tmp_path, kind, {case: CASES[case] for case in FEW})[0]
    for case in FEW:
        require_plain(tmp_path, kind, case, found[case])


def losses_of_named(folder: Path) -> list[dict[str, float]]:
    """The losses of a run of one step on two rows of each of two named sources; in each source one row has images."""

    lines = (folder / "rows.jsonl").read_text().splitlines()
    named = {"first": lines[:2], "second": lines[2:4]}
    values = recipe_values(folder / "llava", folder / "rows.jsonl", folder / "named", folder / "cache", max_steps=1)
    if os.environ["RANK"] == "0":
        for name, rows in named.items():
            (folder / f"{name}.jsonl").write_text("\n".join(rows))
    train = [{"path": str(folder / f"{name}.jsonl"), "name": name} for name in named]
    values["data"] |= {"train": train, "max_length": 128, "packing": False, "shuffle": False}
    values["training"] |= {"micro_batch_size": 1, "gradient_accumulation_steps": 2}
    found = finetuned(values).metrics
    return [{key: record[key] for key in record if key.startswith("loss")} for record in found]


def test_losses_by_source_of_rows_with_images(tmp_path: Path) -> None:
    save_seeing("llava", tmp_path / "llava", TEXTS)
    save_rows(tmp_path, TEXTS, COUNTS)
    rows = rows_by_hand(tmp_path, "llava")
    model: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "llava", dtype=torch.float32)
    with torch.no_grad():
        by_hand = {name: float(loss_of(model, part)) for name, part in (("", rows[:4]), ("/first", rows[:2]))}
        by_hand["/second"] = float(loss_of(model, rows[2:4]))
    assert len(set(by_hand.values())) == 3
    for records in run_on_ranks(losses_of_named, 2, tmp_path):
        assert records == [{f"loss{name}": pytest.approx(loss, rel=1e-6) for name, loss in by_hand.items()}]
