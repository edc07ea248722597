"""Whole runs on conversations, against one row at a time, and on streams."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.ranks import run_on_ranks
from support.runs import finetuned, losses_of
from support.texts import make_texts, write_rows
from support.tiny import VOCAB_SIZE, recipe_values, save_llama, unfinish, with_sections
from transformers import AutoModelForCausalLM, AutoTokenizer

from toolkit.data.templates.templates import MARKERS
from toolkit.data.tokens.tokenizer import _train_byte_pairs

NUM_CHATS = 41


def chats() -> list[dict[str, Any]]:
    texts = make_texts(NUM_CHATS * 4, seed=2)
    rows = []
    for i in range(NUM_CHATS):
        words = [" ".join(text.split()[: 2 + (i + k) % 5]) for k, text in enumerate(texts[4 * i : 4 * i + 4])]
        turns = [("user", words[0]), ("assistant", words[1]), ("user", words[2]), ("assistant", words[3])]
        rows.append({"messages": [{"role": role, "content": text} for role, text in turns[: 2 + 2 * (i % 2)]]})
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data-runs")
    save_llama(folder / "model", make_texts(60), tied=True)
    _train_byte_pairs(iter(make_texts(60)), VOCAB_SIZE, MARKERS["chatml"]).save_pretrained(folder / "model")
    config = json.loads((folder / "model/config.json").read_text())
    (folder / "model/config.json").write_text(json.dumps({**config, "max_position_embeddings": 256}))
    write_rows(folder / "chats.jsonl", chats())
    write_rows(folder / "texts.jsonl", [{"text": " ".join(text.split()[:20])} for text in make_texts(50, seed=4)])
    write_rows(folder / "more.jsonl", [{"text": " ".join(text.split()[:20])} for text in make_texts(9, seed=5)])
    return folder


def runs(folder: Path) -> dict[str, Any]:
    def run(name: str, data: dict[str, Any], **sections: dict[str, Any]) -> Any:
        values = recipe_values(folder / "model", folder / "chats.jsonl", folder / name, folder / f"cache-{name}")
        values = with_sections(values, {"data": data, **sections})
        values["training"] = {key: value for key, value in values["training"].items() if value is not None}
        values["schedule"] = {key: value for key, value in values["schedule"].items() if value is not None}
        return finetuned(values)

    found = {}
    one_step = {"num_epochs": 1.0, "max_steps": None, "micro_batch_size": 4, "gradient_accumulation_steps": 12}
    for packing in (True, False):
        name = f"chat-{packing}"
        found[name] = run(name, {"chat_template": "chatml", "max_length": 160, "packing": packing}, training=one_step)
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
        folder_name = f"{'whole' if name == 'whole' else 'cut'}-stream"
        found[name] = run(
            folder_name,
            streamed,
            training={"max_steps": steps, "micro_batch_size": 4, "gradient_accumulation_steps": 2},
            checkpoint={"every_steps": 5, "resume": resume, "asynchronous": False},
            export={"enabled": False},
            schedule={"kind": "constant", "warmup_steps": None},
        )
        if name == "cut":
            unfinish(folder / folder_name)
    return {name: (result.metrics, str(result.output_dir)) for name, result in found.items()}


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    return run_on_ranks(runs, 2, folder)[0]


def test_a_step_on_conversations_is_the_mean_over_the_assistants_words(found: dict[str, Any], folder: Path) -> None:
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
        metrics, output = found[f"chat-{packing}"]
        [step] = [record for record in metrics if record["split"] == "train"]
        report = json.loads(Path(output, "data_report.json").read_text())
        assert (report["train"]["samples"] < NUM_CHATS) == packing, "rows share samples"
        assert step["samples"] == report["train"]["samples"], "all rows are in the one step"
        assert step["target_tokens"] == report["train"]["target_tokens"] == count
        assert step["loss"] == pytest.approx(total / count, rel=1e-6)


def test_a_stream_that_is_cut_off_goes_on_exactly(found: dict[str, Any]) -> None:
    whole, rest = found["whole"][0], found["rest"][0]
    assert losses_of(found["cut"][0]) == losses_of(whole)[:5]
    assert losses_of(rest) == losses_of(whole)
    assert [r["samples"] for r in rest if r["split"] == "train"] == [16 * (step + 1) for step in range(12)]
    evaluated = [r for r in whole if r["split"] == "eval"]
    assert len({r["target_tokens"] for r in evaluated}) == 1
    report = json.loads(Path(found["whole"][1], "data_report.json").read_text())
    assert report["train"]["read"] >= 50
