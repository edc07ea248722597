"""Distillation: the run is a plain loop with two forwards for each row, on 1, 2 and 4 ranks, and goes on exactly."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import meet, run_on_ranks
from support.texts import make_texts
from support.tiny import recipe_values, save_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

STEPS, ROWS_PER_STEP, TEMPERATURE, RATIO, BETA = 4, 8, 1.5, 0.7, 0.3
TEXTS = [" ".join(text.split()[:9]) for text in make_texts(26, seed=3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distillation")
    save_llama(folder / "student", make_texts(60), tied=True)
    for name, seed in (("teacher", 7), ("another", 8)):
        save_llama(folder / name, make_texts(60), tied=False, layers=3, seed=seed)
        # Drawn weights give every token nearly the same probability, which any student has, too.
        teacher = AutoModelForCausalLM.from_pretrained(folder / name)
        torch.nn.init.normal_(teacher.lm_head.weight, std=0.5)
        teacher.save_pretrained(folder / name)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return folder


def plain(folder: Path) -> list[dict[str, float]]:
    """Generalised JSD and cross-entropy, row by row, from whole logits."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder / "student")
    student, teacher = (AutoModelForCausalLM.from_pretrained(folder / name) for name in ("student", "teacher"))
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3, weight_decay=0.0, foreach=False)
    rows = [torch.tensor([tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]]) for text in TEXTS]
    found = []
    for step in range(STEPS):
        own = [rows[(step * ROWS_PER_STEP + i) % len(rows)] for i in range(ROWS_PER_STEP)]
        count = sum(ids.shape[1] - 1 for ids in own)
        sums = {"loss": 0.0, "divergence": 0.0, "cross_entropy": 0.0}
        for ids in own:
            with torch.no_grad():
                q = (teacher(input_ids=ids).logits[0, :-1] / TEMPERATURE).softmax(dim=1)
            z = student(input_ids=ids).logits[0, :-1]
            p = (z / TEMPERATURE).softmax(dim=1)
            mixture = BETA * q + (1 - BETA) * p
            divergence = BETA * (q * (q / mixture).log()).sum() + (1 - BETA) * (p * (p / mixture).log()).sum()
            cross_entropy = torch.nn.functional.cross_entropy(z, ids[0, 1:], reduction="sum")
            loss = (1 - RATIO) * cross_entropy + RATIO * TEMPERATURE**2 * divergence
            (loss / count).backward()
            for name, value in (("loss", loss), ("divergence", divergence), ("cross_entropy", cross_entropy)):
                sums[name] += value.item() / count
        sums["grad_norm"] = torch.nn.utils.clip_grad_norm_(student.parameters(), 0.5).item()
        optimizer.step()
        optimizer.zero_grad()
        found.append(sums)
    return found


def runs(folder: Path, names: list[str]) -> dict[str, Any]:
    """The records of a run by each of the names: a strategy, with or without more."""
    from toolkit import Recipe, finetune
    from toolkit.errors import BadInputError, StoppedError

    ranks = int(os.environ["WORLD_SIZE"])
    found: dict[str, Any] = {}

    def values(name: str, **training: Any) -> dict[str, Any]:
        strategy, _, more = name.partition(" ")
        made = recipe_values(
            folder / "student", folder / "rows.jsonl", folder / f"{name}-{ranks}", folder / f"c-{ranks}"
        )
        made["data"] |= {"max_length": 64, "packing": more == "packed"}
        made["objective"] = {"kind": "distillation", "teacher": str(folder / "teacher"), "divergence": "jsd"}
        made["objective"] |= {"beta": BETA, "temperature": TEMPERATURE, "kd_ratio": RATIO}
        made["optimizer"] = {"learning_rate": 3e-3, "weight_decay": 0.0}
        made["schedule"] = {"kind": "constant"}
        made["sharding"] = {"strategy": strategy}
        made["export"] = {"enabled": more == "packed"}
        size = {"micro_batch_size": 4 // ranks, "gradient_accumulation_steps": 2}
        made["training"] |= {"max_steps": STEPS, "seed": 2, **size, **training}
        if more == "offload":
            made["sharding"]["offload"] = "optimizer"
        if more == "checkpoints":
            made["sharding"]["activation_checkpointing"] = 1
        if more == "lora":
            made["adapter"] = {"kind": "lora", "r": 4}
        if more == "packed":
            made["data"]["validation"] = str(folder / "rows.jsonl")
        if more == "bf16":
            made["training"]["mixed_precision"] = "bf16"
        return made

    for name in names:
        meet()
        for axis in ("REPLICATE", "SHARD"):
            os.environ.pop(f"PARALLELISM_CONFIG_DP_{axis}_SIZE", None)
            if name == "hybrid":
                os.environ[f"PARALLELISM_CONFIG_DP_{axis}_SIZE"] = "2"
        if not name.endswith("resumed"):
            found[name] = finetune(Recipe.from_mapping(values(name))).metrics
            continue
        stopped = values(name, max_steps=2)
        stopped["checkpoint"] = {"every_steps": 2}
        finetune(Recipe.from_mapping(stopped))
        meet()
        whole = values(name, output_dir=str(folder / f"{name}-again-{ranks}"))
        whole["checkpoint"] = {"resume": str(folder / f"{name}-{ranks}")}
        found[name] = finetune(Recipe.from_mapping(whole)).metrics
        meet()
        # At the same place, so that the recipe is the same: the fingerprint alone tells.
        if os.environ["RANK"] == "0":
            os.rename(folder / "teacher", folder / "aside")
            os.rename(folder / "another", folder / "teacher")
        meet()
        other = values(name, output_dir=str(folder / f"{name}-other-{ranks}"))
        other["checkpoint"] = whole["checkpoint"]
        try:
            finetune(Recipe.from_mapping(other))
        except (BadInputError, StoppedError) as error:
            found["refused"] = str(error)
        meet()
        if os.environ["RANK"] == "0":
            os.rename(folder / "teacher", folder / "another")
            os.rename(folder / "aside", folder / "teacher")
        meet()
    return found


def steps_of(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if record["split"] == "train"]


GROUPS = [
    (1, ["zero3"]),
    (2, ["zero3", "zero3 resumed"]),
    pytest.param(2, ["zero2", "ddp", "zero3 offload"], marks=pytest.mark.grid),
    pytest.param(2, ["zero3 lora", "zero3 packed", "zero3 bf16", "ddp bf16"], marks=pytest.mark.grid),
    pytest.param(4, ["hybrid", "zero1", "zero3 checkpoints"], marks=pytest.mark.grid),
]


@pytest.mark.parametrize(("ranks", "names"), GROUPS)
def test_the_runs_are_the_plain_loop(ranks: int, names: list[str], folder: Path) -> None:
    found = run_on_ranks(runs, ranks, folder, names)[0]
    expected = plain(folder)
    assert expected[0]["divergence"] > 0.1, "there is something to learn from the teacher"
    for name in names:
        if name.partition(" ")[2] in ("", "offload", "checkpoints", "resumed"):
            for record, step in zip(steps_of(found[name]), expected, strict=True):
                assert {key: record[key] for key in step} == pytest.approx(step, rel=1e-5), (name, record["step"])
    if "zero3 resumed" in names:
        assert "objective.teacher" in found["refused"]
        assert figures(found["zero3 resumed"]) == figures(found["zero3"]), "to the last bit"
    if "zero3 packed" in names:
        _check_more(folder, found, expected)


def figures(records: list[dict[str, Any]]) -> list[list[float]]:
    return [
        [record[key] for key in ("loss", "divergence", "cross_entropy", "grad_norm")] for record in steps_of(records)
    ]


def _check_more(folder: Path, found: dict[str, Any], expected: list[dict[str, float]]) -> None:
    for name in ("zero3 bf16", "ddp bf16"):
        assert steps_of(found[name])[0]["loss"] == pytest.approx(expected[0]["loss"], rel=1e-2), name
    assert steps_of(found["zero3 lora"])[0]["loss"] == pytest.approx(expected[0]["loss"], rel=1e-5)
    before, after = (record for record in found["zero3 packed"] if record["split"] == "eval")
    assert after["divergence"] < before["divergence"]
    export = folder / "zero3 packed-2/export"
    exported, student = (AutoModelForCausalLM.from_pretrained(place) for place in (export, folder / "student"))
    assert [n for n, _ in exported.named_parameters()] == [n for n, _ in student.named_parameters()], (
        "the student alone"
    )
    card = (export / "README.md").read_text()
    assert "teacher, LlamaForCausalLM" in card
    assert str(folder) not in card
