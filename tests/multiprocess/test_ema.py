"""Averaged weights, and rows that are kept (`kept.file`): a run's are those of a plain loop, under every strategy, and
exact over a resume."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from support.plain_loop import in_turn, plain_loop
from support.ranks import run_on_ranks
from support.runs import finetuned, losses_of
from support.texts import make_texts, write_rows
from support.tiny import recipe_values, save_llama, unfinish
from transformers import AutoModelForCausalLM, AutoTokenizer

STEPS, ROWS_PER_STEP, DECAY = 6, 4, 0.7
CASES: dict[int, list[str]] = {
    1: ["ddp", "zero3+offload"],
    2: ["ddp", "zero1", "zero2", "zero3", "zero3+offload", "lora", "tensor", "tensor+offload", "sequence"],
    4: ["hybrid", "tensor"],
}
"""By the number of ranks. `tensor`, `sequence`: zero3 in groups of two ranks, which have the same rows, or share them.
Five rows are kept: in the last round a rank has none."""


CUT_OFF = ("zero3+offload", "lora", "tensor")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ema")
    texts = make_texts(40)
    save_llama(folder / "model", texts, tied=True)
    write_rows(folder / "texts.jsonl", ({"text": text} for text in texts))
    write_rows(folder / "kept.jsonl", ({"text": text[: 20 + 8 * i]} for i, text in enumerate(make_texts(5, seed=1))))
    return folder


def values(folder: Path, name: str, case: str, **training: Any) -> dict[str, Any]:
    ranks = int(os.environ["WORLD_SIZE"])
    strategy, _, offload = case.partition("+")
    groups = ranks // 2 if strategy in ("tensor", "sequence") else ranks
    size = {"max_steps": STEPS, "micro_batch_size": max(1, 2 // groups), "ema": DECAY}
    size |= {"gradient_accumulation_steps": 1 if groups == 4 else 2, "eval_every_steps": 3, **training}
    made = recipe_values(folder / "model", folder / "texts.jsonl", folder / name, folder / "cache", **size)
    made["data"] |= {"packing": False, "max_length": 64, "validation": str(folder / "texts.jsonl")}
    made["data"] |= {"max_validation_samples": 6, "long_rows": "truncate"}
    made["optimizer"] = {"learning_rate": 1e-2, "weight_decay": 0.0, "eps": 1e-4}
    made |= {"schedule": {"kind": "constant"}, "checkpoint": {"every_steps": 3}}
    made["sharding"] = {"strategy": "zero3" if case == "lora" else strategy}
    if strategy in ("tensor", "sequence"):
        made["sharding"] = {"strategy": "zero3", strategy: 2}
    made["kept"] = {"file": None if strategy == "tensor" else str(folder / "kept.jsonl")}
    if offload:
        made["sharding"]["offload"] = "optimizer"
    if case == "lora":
        made |= {"adapter": {"kind": "lora", "r": 2}, "export": {"merge": True}}
        made["data"] |= {"packing": True, "long_rows": "split"}
    return made


def runs(folder: Path) -> dict[str, Any]:
    ranks, found = int(os.environ["WORLD_SIZE"]), {}
    if ranks == 4:
        os.environ["PARALLELISM_CONFIG_DP_SHARD_SIZE"] = "2"
    for case in CASES[ranks]:
        found[case] = finetuned(values(folder, f"{case}-{ranks}", case)).metrics
        if case in CUT_OFF and ranks == 2:
            finetuned(values(folder, f"{case}-cut", case, max_steps=3))
            unfinish(folder / f"{case}-cut")
            found[f"{case} cut"] = finetuned(values(folder, f"{case}-cut", case)).metrics
    return found


def mean_loss(model: Any, tokenizer: Any, texts: list[str]) -> torch.Tensor:
    losses, targets = [], 0
    for text in texts:
        ids = torch.tensor([tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]])[:, :64]
        losses.append(F.cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="sum"))
        targets += ids.shape[1] - 1
    return sum(losses) / targets


@torch.no_grad()
def kept_figures(folder: Path, model: Any) -> tuple[float, float]:
    """The mean loss of the kept rows, and the divergence from the start over its 128 likeliest tokens and the rest."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    start = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    texts = [json.loads(line)["text"] for line in (folder / "kept.jsonl").read_text().splitlines()]
    found = []
    for text in texts:
        ids = torch.tensor([tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]])
        p, q = (F.softmax(each(input_ids=ids).logits[0, :-1].double(), dim=-1) for each in (start, model))
        by_rank = [each.gather(1, p.sort(descending=True).indices) for each in (p, q)]
        p, q = (torch.cat([each[:, :128], each[:, 128:].sum(1, True)], 1) for each in by_rank)
        found += (p * (p / q).log()).sum(1).tolist()
    return float(mean_loss(model, tokenizer, texts)), sum(found) / len(found)


def plain(folder: Path) -> dict[str, Any]:
    """AdamW and the average of its weights, written out; the held-out losses are those of the averages."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model, averages = (AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32) for _ in range(2))
    texts = [json.loads(line)["text"] for line in (folder / "texts.jsonl").read_text().splitlines()]
    held_out, kept = list[float](), list[tuple[float, float]]()

    @torch.no_grad()
    def average_and_evaluate(step: int) -> None:
        for average, weight in zip(averages.parameters(), model.parameters() if step else (), strict=step > 0):
            average.copy_(DECAY * average + (1 - DECAY) * weight)
        if step % 3 == 0:
            held_out.append(mean_loss(averages, tokenizer, texts[:6]).item())
            kept.append(kept_figures(folder, averages))

    average_and_evaluate(0)
    steps = in_turn(texts, ROWS_PER_STEP, STEPS)
    trained = plain_loop(
        model,
        steps,
        lambda batch: mean_loss(model, tokenizer, batch),
        rates=1e-2,
        eps=1e-4,
        after_step=average_and_evaluate,
    )
    state = {name: weight.detach() for name, weight in averages.named_parameters()}
    return {"losses": trained.losses, "held_out": held_out, "kept": kept, "averages": state, "last": trained.weights}


def kept_of(records: list[dict[str, Any]]) -> list[Any]:
    """Loss and divergence of the kept rows at each evaluation; exactly 0 before the first step."""
    found = [(one["kept_loss"], one["kept_kl"]) for one in records if "kept_kl" in one]
    assert found[0][1] == 0.0
    return [(pytest.approx(loss, rel=1e-5), pytest.approx(kl, rel=1e-3)) for loss, kl in found]


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.grid) for n in (1, 4))])
def test_averages_are_those_of_a_plain_loop(ranks: int, folder: Path, tmp_path: Path) -> None:
    found, expected = run_on_ranks(runs, ranks, folder)[0], plain(folder)
    assert any((expected["last"][name] - tensor).abs().max() > 1e-3 for name, tensor in expected["averages"].items())
    for case in CASES[ranks]:
        if case == "lora":
            merged = AutoModelForCausalLM.from_pretrained(folder / f"lora-{ranks}/export")
            assert kept_of(found[case])[-1] == kept_figures(folder, merged)
            continue
        assert "tensor" in case or kept_of(found[case]) == expected["kept"], case
        assert losses_of(found[case]) == pytest.approx(expected["losses"], rel=1e-5), case
        assert losses_of(found[case], "eval") == pytest.approx(expected["held_out"], rel=1e-5), case
        export = load_file(folder / f"{case}-{ranks}/export/model.safetensors")
        for name, tensor in expected["averages"].items():
            torch.testing.assert_close(export[name], tensor, rtol=1e-4, atol=1e-5, msg=f"{case} {name}")
    if ranks == 2:
        check_resumed(folder, found)
        check_exports(folder, expected, tmp_path)


def check_resumed(folder: Path, found: dict[str, Any]) -> None:
    for case in CUT_OFF:
        cut, whole = ([each for each in found[name] if each["split"] == "eval"] for name in (f"{case} cut", case))
        assert cut == whole, case
        whole, cut = (load_file(folder / f"{case}-{name}/export/model.safetensors") for name in ("2", "cut"))
        assert all(torch.equal(tensor, cut[name]) for name, tensor in whole.items()), case


def check_exports(folder: Path, expected: dict[str, Any], tmp_path: Path) -> None:
    """`toolkit export` gives the averages of a checkpoint, or its last weights."""
    from toolkit import export

    export(folder / "zero3-2", tmp_path / "average")
    again, run = (load_file(path / "model.safetensors") for path in (tmp_path / "average", folder / "zero3-2/export"))
    assert all(torch.equal(tensor, run[name]) for name, tensor in again.items()), "as the run's own export"
    export(folder / "zero3-2", tmp_path / "last", average=False)
    last = load_file(tmp_path / "last/model.safetensors")
    for name, tensor in expected["last"].items():
        torch.testing.assert_close(last[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
