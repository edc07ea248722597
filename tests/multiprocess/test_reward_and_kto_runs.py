"""Reward models and KTO: the run is a plain loop with one forward for each completion, on 1, 2 and 4 ranks."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.ranks import meet, run_on_ranks
from support.texts import make_texts
from support.tiny import recipe_values, save_llama
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, pipeline

STEPS, PAIRS_PER_STEP, CENTERING = 4, 8, 0.05
BETA, GOOD_WEIGHT, BAD_WEIGHT = 0.3, 1.5, 0.75
TEXTS = make_texts(80, seed=3)
PAIRS: list[dict[str, Any]] = [
    {
        "prompt": " ".join(TEXTS[i].split()[:3]),
        "chosen": " " + " ".join(TEXTS[i + 26].split()[: 2 + i % 5]),
        "rejected": " " + " ".join(TEXTS[i + 52].split()[: 1 + i % 4]),
        "margin": (i % 3) / 4,
    }
    for i in range(26)
]
JUDGED = [
    {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
    for pair in PAIRS[:13]
    for side in ("rejected", "chosen")
]
STRATEGIES = {1: "zero3", 2: "zero3", 4: "zero1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    save_llama(folder / "model", make_texts(60), tied=True)
    torch.manual_seed(5)
    scoring = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
    scoring.save_pretrained(folder / "scoring")
    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(folder / "scoring")
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    (folder / "judged.jsonl").write_text("".join(json.dumps(row) + "\n" for row in JUDGED))
    return folder


def score(model: Any, tokenizer: Any, pair: dict[str, Any], side: str) -> torch.Tensor:
    """Of one completion, alone in its row."""
    ids = tokenizer(pair["prompt"] + pair[side])["input_ids"] + [tokenizer.eos_token_id]
    return model(input_ids=torch.tensor([ids])).logits[0, 0]


def plain_rewards(folder: Path) -> list[float]:
    """Bradley-Terry with margins and centring, pair by pair."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder / "scoring")
    model = AutoModelForSequenceClassification.from_pretrained(folder / "scoring", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0, foreach=False)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for i in range(PAIRS_PER_STEP):
            pair = PAIRS[(step * PAIRS_PER_STEP + i) % len(PAIRS)]
            chosen, rejected = (score(model, tokenizer, pair, side) for side in ("chosen", "rejected"))
            loss = -F.logsigmoid(chosen - rejected - pair["margin"]) + CENTERING * (chosen + rejected) ** 2
            (loss / PAIRS_PER_STEP).backward()
            total += loss.item() / PAIRS_PER_STEP
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def log_probability(model: Any, tokenizer: Any, prompt: str, completion: str) -> torch.Tensor:
    asked = tokenizer(prompt)["input_ids"]
    ids = torch.tensor([tokenizer(prompt + completion)["input_ids"] + [tokenizer.eos_token_id]])
    each = -F.cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="none")
    return each[len(asked) - 1 :].sum()


def plain_kto(folder: Path) -> dict[str, list[float]]:
    """KTO as its paper writes it, row by row; the KL of a step is of its prompts with the next rows' completions."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0, foreach=False)
    losses, kls = [], []

    def log_ratio(prompt: str, completion: str) -> torch.Tensor:
        with torch.no_grad():
            of_reference = log_probability(reference, tokenizer, prompt, completion)
        return log_probability(model, tokenizer, prompt, completion) - of_reference

    for step in range(STEPS):
        numbers = [(step * PAIRS_PER_STEP + i) % len(JUDGED) for i in range(PAIRS_PER_STEP)]
        with torch.no_grad():
            others = [(JUDGED[n]["prompt"], JUDGED[(n + 1) % len(JUDGED)]["completion"]) for n in numbers]
            kl = max(0.0, sum(log_ratio(*other).item() for other in others) / len(others))
        total = 0.0
        for row in (JUDGED[n] for n in numbers):
            ratio = log_ratio(row["prompt"], row["completion"])
            if row["label"]:
                loss = GOOD_WEIGHT * (1 - torch.sigmoid(BETA * (ratio - kl)))
            else:
                loss = BAD_WEIGHT * (1 - torch.sigmoid(BETA * (kl - ratio)))
            (loss / PAIRS_PER_STEP).backward()
            total += loss.item() / PAIRS_PER_STEP
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        kls.append(kl)
    return {"loss": losses, "kl": kls}


def runs(folder: Path) -> dict[str, Any]:
    from toolkit import Recipe, finetune

    ranks = int(os.environ["WORLD_SIZE"])
    found: dict[str, Any] = {}

    def run(name: str, model: str, data: dict[str, Any], objective: dict[str, Any], **sections: Any) -> None:
        meet()
        rows = "judged.jsonl" if objective["kind"] == "kto" else "pairs.jsonl"
        values = recipe_values(folder / model, folder / rows, folder / f"{name}-{ranks}", folder / f"c-{ranks}")
        values["data"] |= {"max_length": 64, **data}
        values["objective"] = objective
        values["optimizer"] = {"learning_rate": 3e-3, "weight_decay": 0.0}
        values["schedule"] = {"kind": "constant"}
        values["sharding"] = {"strategy": STRATEGIES[ranks], **sections.pop("sharding", {})}
        values["training"] |= {"max_steps": STEPS, "seed": 2, **sections.pop("training", {})}
        found[name] = finetune(Recipe.from_mapping({**values, **sections})).metrics

    # Unpacked, a step holds the pairs of the plain loop; packed, as many as fit.
    size = {"micro_batch_size": 4 // ranks, "gradient_accumulation_steps": 2}
    reward = {"kind": "reward", "center_rewards_coefficient": CENTERING}
    run("reward", "scoring", {"packing": False}, reward, training=size, export={"enabled": False})
    kto = {"kind": "kto", "beta": BETA, "desirable_weight": GOOD_WEIGHT, "undesirable_weight": BAD_WEIGHT}
    run("kto", "model", {"packing": False}, kto, training=size, export={"enabled": False})
    if ranks == 2:
        together = {"accumulate": "by_block", "activation_checkpointing": 1}
        more = {"training": size, "export": {"enabled": False}, "sharding": together}
        run("reward by block", "scoring", {"packing": False}, reward, **more)
        run("kto by block", "model", {"packing": False}, kto, **more)
        whole = {"micro_batch_size": 4, "gradient_accumulation_steps": 2}
        more = {"training": whole, "export": {"enabled": False}, "sharding": {"sequence": 2}}
        run("reward on shared rows", "scoring", {"packing": False}, reward, **more)
        apart = {"packing": False, "cache_dir": str(folder / "c-shared")}  # so that it makes its own reference
        more["sharding"] = {"sequence": 2, **together}
        run("kto on shared rows", "model", apart, kto, **more)
        held_out = {"validation": str(folder / "pairs.jsonl")}
        adapter = {"kind": "lora", "r": 2}
        run("packed", "model", held_out, {"kind": "reward"}, training={"micro_batch_size": 2})
        merged = {"adapter": adapter, "export": {"merge": True}}
        run("lora", "model", held_out, {"kind": "reward"}, training={"max_steps": 2}, **merged)
        held_out = {"validation": str(folder / "judged.jsonl")}
        run("kto-packed", "model", held_out, {"kind": "kto"}, training={"micro_batch_size": 2})
        run("kto-lora", "model", held_out, {"kind": "kto"}, **merged)
    return found


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.grid)])
def test_the_runs_are_the_plain_loops(ranks: int, folder: Path) -> None:
    found = run_on_ranks(runs, ranks, folder)[0]
    plain_reward, plain = plain_rewards(folder), plain_kto(folder)
    for way in ("", " by block", " on shared rows") if ranks == 2 else ("",):
        check_losses(found[f"reward{way}"], plain_reward, found[f"kto{way}"], plain)
    assert max(plain["kl"]) > 0.01, "the KL says something"
    if ranks == 2:
        check_exports(folder, found)
        for name in ("kto-packed", "kto-lora"):
            first, last = (record for record in found[name] if record["split"] == "eval")
            assert (first["rows"], first["loss"], first["kl"]) == pytest.approx((len(JUDGED), 0.5, 0.0), abs=1e-5)
            assert last["loss"] < first["loss"], name
            assert last["chosen_reward"] > last["rejected_reward"], name
        report = json.loads((folder / "kto-packed-2/data_report.json").read_text())["train"]
        assert report["samples"] < len(JUDGED), "rows share samples"
        assert report["labels"] == {"true": 13, "false": 13}


def check_losses(
    reward: list[dict[str, Any]], plain_reward: list[float], kto: list[dict[str, Any]], plain: dict[str, list[float]]
) -> None:
    steps = [record for record in reward if record["split"] == "train"]
    assert [record["loss"] for record in steps] == pytest.approx(plain_reward, rel=1e-5)
    for record in steps:
        assert record["chosen_reward"] - record["rejected_reward"] == pytest.approx(record["margin"], abs=1e-6)
        assert record["pairs"] == PAIRS_PER_STEP * record["step"]
        assert 0 <= record["accuracy"] <= 1
    steps = [record for record in kto if record["split"] == "train"]
    assert [record["loss"] for record in steps] == pytest.approx(plain["loss"], rel=1e-5)
    assert [record["kl"] for record in steps] == pytest.approx(plain["kl"], rel=1e-3, abs=1e-5)
    assert steps[-1]["rows"] == PAIRS_PER_STEP * STEPS


def check_exports(folder: Path, found: dict[str, Any]) -> None:
    """Packed and with adapters, a reward model learns, and transformers' own pipeline gives its rewards."""
    for name in ("packed", "lora"):
        first, last = (record for record in found[name] if record["split"] == "eval")
        assert first["pairs"] == last["pairs"] == len(PAIRS), "each pair once"
        assert last["loss"] < first["loss"], name
        assert last["margin"] > first["margin"], name
    assert json.loads((folder / "packed-2/data_report.json").read_text())["train"]["samples"] < len(PAIRS)
    for name in ("packed", "lora"):
        scores = pipeline("text-classification", model=f"{folder}/{name}-2/export", device="cpu")
        text = PAIRS[0]["prompt"] + PAIRS[0]["chosen"] + scores.tokenizer.eos_token
        margins = []
        for pair in PAIRS:
            chosen, rejected = (
                scores(pair["prompt"] + pair[side] + scores.tokenizer.eos_token)[0]["score"]
                for side in ("chosen", "rejected")
            )
            margins.append(chosen - rejected)
        last = [record for record in found[name] if record["split"] == "eval"][-1]
        assert sum(margins) / len(margins) == pytest.approx(last["margin"], rel=1e-3), name
        assert scores(text)[0]["label"] == "reward"
