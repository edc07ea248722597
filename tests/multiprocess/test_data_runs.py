"""Whole runs on conversations, streams and labelled texts, against plain loops on one row at a time."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.ranks import meet, run_on_ranks
from support.texts import make_texts
from support.tiny import VOCAB_SIZE, recipe_values, save_llama, unfinish
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    pipeline,
)

from toolkit.data.templates.templates import MARKERS
from toolkit.data.tokens.tokenizer import _train_byte_pairs

NUM_CHATS = 41
LABELS = ["calm", "loud", "odd"]
WEIGHTS = [0.5, 2.0, 1.0]


def chats() -> list[dict[str, Any]]:
    texts = make_texts(NUM_CHATS * 4, seed=2)
    rows = []
    for i in range(NUM_CHATS):
        words = [" ".join(text.split()[: 2 + (i + k) % 5]) for k, text in enumerate(texts[4 * i : 4 * i + 4])]
        turns = [("user", words[0]), ("assistant", words[1]), ("user", words[2]), ("assistant", words[3])]
        rows.append({"messages": [{"role": role, "content": text} for role, text in turns[: 2 + 2 * (i % 2)]]})
    return rows


def labelled(count: int, seed: int) -> list[dict[str, str]]:
    texts = [" ".join(text.split()[:12]) for text in make_texts(count, seed=seed)]
    return [{"text": text, "label": LABELS[len(text) % 3 if i % 4 else 1]} for i, text in enumerate(texts)]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data-runs")
    save_llama(folder / "model", make_texts(60), tied=True)
    _train_byte_pairs(iter(make_texts(60)), VOCAB_SIZE, MARKERS["chatml"]).save_pretrained(folder / "model")
    config = json.loads((folder / "model/config.json").read_text())
    (folder / "model/config.json").write_text(json.dumps({**config, "max_position_embeddings": 256}))
    write(folder / "chats.jsonl", chats())
    write(folder / "texts.jsonl", [{"text": " ".join(text.split()[:20])} for text in make_texts(50, seed=4)])
    write(folder / "more.jsonl", [{"text": " ".join(text.split()[:20])} for text in make_texts(9, seed=5)])
    write(folder / "labelled.jsonl", labelled(26, seed=6))
    write(folder / "held_out.jsonl", labelled(13, seed=7))
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=tokenizer.pad_token_id,
    )
    BertForSequenceClassification(config).save_pretrained(folder / "bert")
    tokenizer.save_pretrained(folder / "bert")
    return folder


def runs(folder: Path) -> dict[str, Any]:
    from toolkit import Recipe, finetune

    def run(name: str, model: str, data: dict[str, Any], objective: Any = None, **sections: dict[str, Any]) -> Any:
        meet()
        values = recipe_values(folder / model, folder / "chats.jsonl", folder / name, folder / f"cache-{name}")
        values["data"] |= data
        if objective is not None:
            values["objective"] = objective
        for section, fields in sections.items():
            values[section] = {**values.get(section, {}), **fields}
        values["training"] = {key: value for key, value in values["training"].items() if value is not None}
        values["schedule"] = {key: value for key, value in values["schedule"].items() if value is not None}
        return finetune(Recipe.from_mapping(values))

    import os

    ranks = int(os.environ["WORLD_SIZE"])
    found = {}
    one_step = {"num_epochs": 1.0, "max_steps": None, "micro_batch_size": 8 // ranks, "gradient_accumulation_steps": 12}
    for packing in (True, False):
        name = f"chat-{packing}-{ranks}"
        found[name] = run(
            name, "model", {"chat_template": "chatml", "max_length": 160, "packing": packing}, training=one_step
        )
    found["classes"] = run(
        f"classes-{ranks}",
        "bert",
        {
            "train": str(folder / "labelled.jsonl"),
            "validation": str(folder / "held_out.jsonl"),
            "max_length": 48,
        },
        {"kind": "sequence_classification", "labels": LABELS, "class_weights": WEIGHTS},
        training={"max_steps": 6, "micro_batch_size": 4 // ranks, "gradient_accumulation_steps": 2},
    )
    streamed = {
        "train": [
            {"path": str(folder / "texts.jsonl"), "weight": 3.0},
            {"path": str(folder / "more.jsonl"), "weight": 1.0},
        ],
        "validation": str(folder / "more.jsonl"),
        "streaming": True,
        "shuffle": True,
    }
    for name, steps, resume in (("whole", 12, "never"), ("cut", 5, "never"), ("rest", 12, "auto")):
        folder_name = f"{'whole' if name == 'whole' else 'cut'}-stream-{ranks}"
        found[name] = run(
            folder_name,
            "model",
            streamed,
            training={"max_steps": steps, "micro_batch_size": 8 // ranks, "gradient_accumulation_steps": 2},
            checkpoint={"every_steps": 5, "resume": resume, "asynchronous": False},
            export={"enabled": False},
            schedule={"kind": "constant", "warmup_steps": None},
        )
        if name == "cut":
            unfinish(folder / folder_name)
    return {name: (result.metrics, str(result.output_dir)) for name, result in found.items()}


@pytest.fixture(scope="module")
def results(folder: Path) -> tuple[int, dict[str, Any]]:
    """Two ranks; one rank is tried by tests/traces and test_parity.py."""
    return 2, run_on_ranks(runs, 2, folder)[0]


def losses(metrics: list[dict[str, Any]], split: str = "train") -> list[float]:
    return [record["loss"] for record in metrics if record["split"] == split]


def test_a_step_on_conversations_is_the_mean_over_the_assistants_words(
    results: tuple[int, dict[str, Any]], folder: Path
) -> None:
    ranks, found = results
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    total, count = 0.0, 0
    for row in chats():
        ids: list[int] = []
        targets: list[bool] = []
        for message in row["messages"]:
            head = tokenizer(f"<|im_start|>{message['role']}\n")["input_ids"]
            words = tokenizer(f"{message['content']}<|im_end|>")["input_ids"]
            close = tokenizer("\n")["input_ids"]
            ids += head + words + close
            mine = message["role"] == "assistant"
            targets += [False] * len(head) + [mine] * len(words) + [False] * len(close)
        assert tokenizer.decode(ids).count("<|im_start|>") == len(row["messages"])
        tokens = torch.tensor([ids])
        with torch.no_grad():
            each = F.cross_entropy(model(input_ids=tokens).logits[0, :-1], tokens[0, 1:], reduction="none")
        total += float(each[torch.tensor(targets[1:])].double().sum())
        count += sum(targets)
    for packing in (True, False):
        metrics, output = found[f"chat-{packing}-{ranks}"]
        [step] = [record for record in metrics if record["split"] == "train"]
        report = json.loads(Path(output, "data_report.json").read_text())
        assert (report["train"]["samples"] < NUM_CHATS) == packing, "rows share samples"
        assert step["samples"] == report["train"]["samples"], "all rows are in the one step"
        assert step["target_tokens"] == report["train"]["target_tokens"] == count
        assert step["loss"] == pytest.approx(total / count, rel=1e-6)


def plain_classifier(folder: Path) -> dict[str, Any]:
    """AdamW on batches of 8 rows, each row in a forward of its own."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "bert")
    model = AutoModelForSequenceClassification.from_pretrained(folder / "bert", dtype=torch.float32).train()
    rows = labelled(26, seed=6)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        foreach=False,
    )
    weights = torch.tensor(WEIGHTS)

    def loss_of(row: dict[str, str]) -> tuple[torch.Tensor, int]:
        logits = model(**tokenizer(row["text"], return_tensors="pt")).logits[0]
        label = LABELS.index(row["label"])
        return -weights[label] * logits.log_softmax(-1)[label], int(logits.argmax()) == label

    def evaluate() -> dict[str, float]:
        with torch.no_grad():
            outcomes = [loss_of(row) for row in labelled(13, seed=7)]
        return {"loss": sum(float(loss) for loss, _ in outcomes) / 13, "accuracy": sum(hit for _, hit in outcomes) / 13}

    found: dict[str, Any] = {"loss": [], "eval": [evaluate()]}
    for step in range(6):
        batch = [rows[(8 * step + i) % 26] for i in range(8)]
        loss = torch.stack([loss_of(row)[0] for row in batch]).sum() / 8
        loss.backward()
        norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None))
        for p in model.parameters():
            if p.grad is not None and norm > 0.5:
                p.grad.mul_(0.5 / (norm + 1e-6))
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * ((step + 1) / 5 if step < 4 else (6 - step) / (6 - 4))
        optimizer.step()
        optimizer.zero_grad()
        found["loss"].append(loss.item())
    found["eval"].append(evaluate())
    return found


def test_a_classifier_trains_as_the_plain_loop(results: tuple[int, dict[str, Any]], folder: Path) -> None:
    _, found = results
    metrics, output = found["classes"]
    expected = plain_classifier(folder)
    assert losses(metrics) == pytest.approx(expected["loss"], rel=1e-5)
    evaluations = [record for record in metrics if record["split"] == "eval"]
    for record, plain in zip(evaluations, expected["eval"], strict=True):
        assert record["samples"] == 13, "every row once, on any number of ranks"
        assert record["loss"] == pytest.approx(plain["loss"], rel=1e-5)
        assert record["accuracy"] == pytest.approx(plain["accuracy"])
        assert 0.0 <= record["f1_macro"] <= 1.0
        confusion = record["confusion"]
        assert sum(map(sum, confusion)) == record["samples"]
        assert sum(confusion[i][i] for i in range(len(confusion))) == round(record["accuracy"] * record["samples"])
    classify = pipeline("text-classification", model=f"{output}/export", device="cpu")
    assert classify("the king sang")[0]["label"] in LABELS
    assert classify.model.config.id2label == dict(enumerate(LABELS))


def test_a_stream_that_is_cut_off_goes_on_exactly(results: tuple[int, dict[str, Any]]) -> None:
    ranks, found = results
    whole, rest = found["whole"][0], found["rest"][0]
    assert losses(found["cut"][0]) == losses(whole)[:5]
    assert losses(rest) == losses(whole)
    assert [r["samples"] for r in rest if r["split"] == "train"] == [16 * (step + 1) for step in range(12)]
    evaluated = [r for r in whole if r["split"] == "eval"]
    assert len({r["target_tokens"] for r in evaluated}) == 1
    report = json.loads(Path(found["whole"][1], "data_report.json").read_text())
    assert report["train"]["read"] >= 50
    _STREAMED[ranks] = losses(whole)
    if len(_STREAMED) == 2:
        assert _STREAMED[1] == pytest.approx(_STREAMED[2], rel=1e-5), "the same samples on any number of ranks"


_STREAMED: dict[int, list[float]] = {}
