"""Tagging words: the run is a plain loop with each row in a forward of its own, and the export knows its tags."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.ranks import meet, run_on_ranks
from support.texts import make_texts
from support.tiny import VOCAB_SIZE, recipe_values
from transformers import (
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertConfig,
    BertForTokenClassification,
    pipeline,
)

from toolkit.data.tokens.tokenizer import _train_byte_pairs
from toolkit.objectives.tagging import entities

NAMES, WEIGHTS = ["O", "B-KING", "I-KING"], [0.5, 2.0, 1.0]
STEPS, ROWS_PER_STEP = 4, 8


def rows(count: int, seed: int) -> list[dict[str, list[str]]]:
    made = []
    for text in make_texts(count, seed=seed):
        words = text.split()[: 4 + len(text) % 9]
        tags = [
            NAMES[0] if len(word) < 5 else NAMES[1 + (i > 0 and len(words[i - 1]) > 4)] for i, word in enumerate(words)
        ]
        made.append({"tokens": words, "tags": tags})
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tagging")
    tokenizer = _train_byte_pairs(iter(make_texts(60)), VOCAB_SIZE)
    tokenizer.save_pretrained(folder / "bert")
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    without = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}
    config = BertConfig(
        vocab_size=len(tokenizer), num_labels=3, pad_token_id=tokenizer.pad_token_id, **sizes, **without
    )
    BertForTokenClassification(config).save_pretrained(folder / "bert")
    for name, count, seed in (("train", 26, 6), ("held_out", 13, 7)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(count, seed)))
    return folder


def runs(folder: Path) -> dict[str, Any]:
    from toolkit import Recipe, finetune

    ranks, found = int(os.environ["WORLD_SIZE"]), {}
    cases: list[tuple[str, dict[str, Any]]] = [("whole", {})]
    if ranks == 2:
        cases += [("ddp", {"sharding": {"strategy": "ddp"}}), ("lora", {"adapter": {"kind": "lora", "r": 2}})]
    for name, sections in cases:
        meet()
        values = recipe_values(
            folder / "bert", folder / "train.jsonl", folder / f"{name}-{ranks}", folder / f"c-{ranks}"
        )
        values["data"] |= {"max_length": 64, "validation": str(folder / "held_out.jsonl")}
        values["objective"] = {"kind": "token_classification", "labels": NAMES, "class_weights": WEIGHTS}
        values["optimizer"] = {"learning_rate": 3e-3, "weight_decay": 0.0, "eps": 1e-4}
        values["schedule"] = {"kind": "constant"}
        values["training"] |= {"max_steps": STEPS, "micro_batch_size": 4 // ranks, "gradient_accumulation_steps": 2}
        values["export"] = {"merge": True} if name == "lora" else {}
        result = finetune(Recipe.from_mapping({**values, "sharding": {"strategy": "zero3"}, **sections}))
        found[name] = (result.metrics, result.logits_difference)
    return found


def encoded(tokenizer: Any, row: dict[str, list[str]]) -> tuple[torch.Tensor, list[int]]:
    """The ids of a row, and the place of each word's first token, by tokenising ever longer beginnings of the text."""
    ids = tokenizer(" ".join(row["tokens"]))["input_ids"]
    places = [len(tokenizer(" ".join(row["tokens"][:n]))["input_ids"]) if n else 0 for n in range(len(row["tokens"]))]
    return torch.tensor([ids]), places


def plain(folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder / "bert")
    model = AutoModelForTokenClassification.from_pretrained(folder / "bert", dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0, eps=1e-4, foreach=False)
    train, losses = rows(26, 6), []

    def logits_of(row: dict[str, list[str]]) -> torch.Tensor:
        ids, places = encoded(tokenizer, row)
        return model(input_ids=ids).logits[0, places]

    def loss_of(row: dict[str, list[str]]) -> torch.Tensor:
        right = torch.tensor([NAMES.index(tag) for tag in row["tags"]])
        return F.cross_entropy(logits_of(row), right, weight=torch.tensor(WEIGHTS), reduction="sum")

    for step in range(STEPS):
        batch = [train[(step * ROWS_PER_STEP + i) % len(train)] for i in range(ROWS_PER_STEP)]
        loss = sum(loss_of(row) for row in batch) / sum(len(row["tokens"]) for row in batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    held_out, found, true, right = rows(13, 7), 0, 0, 0
    with torch.no_grad():
        for row in held_out:
            chosen = entities([NAMES[number] for number in logits_of(row).argmax(-1).tolist()])
            found, true = found + len(chosen), true + len(entities(row["tags"]))
            right += len(chosen & entities(row["tags"]))
        words = sum(len(row["tokens"]) for row in held_out)
        loss = sum(loss_of(row).item() for row in held_out) / words
    return {"losses": losses, "held_out": loss, "f1": 2 * right / max(1, found + true), "words": words}


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_run_is_a_plain_loop(ranks: int, folder: Path) -> None:
    found, expected = run_on_ranks(runs, ranks, folder)[0], plain(folder)
    for name in ("whole", "ddp") if ranks == 2 else ("whole",):
        metrics, difference = found[name]
        steps = [record for record in metrics if record["split"] == "train"]
        assert [record["loss"] for record in steps] == pytest.approx(expected["losses"], rel=1e-5), name
        last = [record for record in metrics if record["split"] == "eval"][-1]
        assert last["loss"] == pytest.approx(expected["held_out"], rel=1e-5), name
        assert (last["f1"], last["samples"]) == pytest.approx((expected["f1"], expected["words"])), name
        assert steps[0]["planned_peak_bytes"] > 0
        assert difference < 1e-5
    assert 0.2 < expected["f1"] < 1, "it says something"
    if ranks == 2:
        for name in ("whole", "lora"):
            tag = pipeline("token-classification", model=str(folder / f"{name}-2/export"), device="cpu")
            assert tag.model.config.id2label == dict(enumerate(NAMES))
            assert {item["entity"] for item in tag(" ".join(rows(13, 7)[0]["tokens"]), ignore_labels=[])} <= {*NAMES}
        assert "pipeline_tag: token-classification" in (folder / "whole-2/export/README.md").read_text()
