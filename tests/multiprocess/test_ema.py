"""Averaged weights: a run's are those of a plain loop, under every strategy, and exact over a resume."""

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
from support.ranks import meet, run_on_ranks
from support.runs import finetuned
from support.texts import make_texts, write_rows
from support.tiny import recipe_values, save_llama, unfinish
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

STEPS, ROWS_PER_STEP, DECAY = 6, 4, 0.7
CASES: dict[int, list[str]] = {
    1: ["ddp", "zero3+offload"],
    2: ["ddp", "zero1", "zero2", "zero3", "zero3+offload", "lora", "tensor", "tensor+offload"],
    4: ["hybrid", "tensor"],
}
"""By the number of ranks. `tensor`: zero3 in groups of two ranks, which have the same rows."""


CUT_OFF = ("zero3+offload", "lora", "tensor")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ema")
    texts = make_texts(40)
    save_llama(folder / "model", texts, tied=True)
    write_rows(folder / "texts.jsonl", ({"text": text} for text in texts))
    return folder


def values(folder: Path, name: str, case: str, **training: Any) -> dict[str, Any]:
    ranks = int(os.environ["WORLD_SIZE"])
    strategy, _, offload = case.partition("+")
    groups = ranks // 2 if strategy == "tensor" else ranks
    size = {"max_steps": STEPS, "micro_batch_size": max(1, 2 // groups), "ema": DECAY}
    size |= {"gradient_accumulation_steps": 1 if groups == 4 else 2, "eval_every_steps": 3, **training}
    made = recipe_values(folder / "model", folder / "texts.jsonl", folder / name, folder / "cache", **size)
    made["data"] |= {"packing": False, "max_length": 64, "validation": str(folder / "texts.jsonl")}
    made["data"] |= {"max_validation_samples": 6, "long_rows": "truncate"}
    made["optimizer"] = {"learning_rate": 1e-2, "weight_decay": 0.0, "eps": 1e-4}
    made["schedule"] = {"kind": "constant"}
    made["checkpoint"] = {"every_steps": 3}
    made["sharding"] = {"strategy": "zero3" if case == "lora" else strategy}
    if strategy == "tensor":
        made["sharding"] = {"strategy": "zero3", "tensor": 2}
    if offload:
        made["sharding"]["offload"] = "optimizer"
    if case == "lora":
        made |= {"adapter": {"kind": "lora", "r": 2}, "export": {"merge": True}}
    return made


def runs(folder: Path) -> dict[str, Any]:
    from toolkit.run import fit as fit_module
    from toolkit.run.parts.averages import WeightAverages

    ranks, found = int(os.environ["WORLD_SIZE"]), {}
    sizes: list[int] = []
    build = fit_module.trainer_of

    def measured(*args: Any) -> Any:
        trainer = build(*args)
        [averages] = [each for each in trainer.extensions if isinstance(each, WeightAverages)]
        sizes.append(sum(tensor.to_local().nbytes for tensor in averages.ema.tensors.values()))
        return trainer

    def run(name: str, case: str, **training: Any) -> list[dict[str, Any]]:
        return finetuned(values(folder, name, case, **training)).metrics

    if ranks == 4:
        os.environ["PARALLELISM_CONFIG_DP_SHARD_SIZE"] = "2"
    for case in CASES[ranks]:
        found[case] = run(f"{case}-{ranks}", case)
        if case in CUT_OFF and ranks == 2:
            run(f"{case}-cut", case, max_steps=3)
            unfinish(folder / f"{case}-cut")
            meet()
            found[f"{case} cut"] = run(f"{case}-cut", case)
    if ranks == 2:
        fit_module.trainer_of = measured
        run("measured", "zero3", max_steps=1)
        fit_module.trainer_of = build
        found["bytes"] = sizes
    return found


def mean_loss(model: Any, tokenizer: Any, texts: list[str]) -> torch.Tensor:
    losses, targets = [], 0
    for text in texts:
        ids = torch.tensor([tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]])[:, :64]
        losses.append(F.cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="sum"))
        targets += ids.shape[1] - 1
    return sum(losses) / targets


def plain(folder: Path) -> dict[str, Any]:
    """AdamW and the average of its weights, written out; the held-out losses are those of the averages."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model, averages = (AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32) for _ in range(2))
    texts = [json.loads(line)["text"] for line in (folder / "texts.jsonl").read_text().splitlines()]
    held_out: list[float] = []

    @torch.no_grad()
    def average_and_evaluate(step: int) -> None:
        for average, weight in zip(averages.parameters(), model.parameters() if step else (), strict=step > 0):
            average.copy_(DECAY * average + (1 - DECAY) * weight)
        if step % 3 == 0:
            held_out.append(mean_loss(averages, tokenizer, texts[:6]).item())

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
    return {"losses": trained.losses, "held_out": held_out, "averages": state, "last": trained.weights}


def of(records: list[dict[str, Any]], split: str) -> list[float]:
    return [record["loss"] for record in records if record["split"] == split]


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.grid) for n in (1, 4))])
def test_averages_are_those_of_a_plain_loop(ranks: int, folder: Path, tmp_path: Path) -> None:
    found, expected = run_on_ranks(runs, ranks, folder)[0], plain(folder)
    assert any((expected["last"][name] - tensor).abs().max() > 1e-3 for name, tensor in expected["averages"].items())
    for case in CASES[ranks]:
        if case == "lora":
            continue
        assert of(found[case], "train") == pytest.approx(expected["losses"], rel=1e-5), case
        assert of(found[case], "eval") == pytest.approx(expected["held_out"], rel=1e-5), case
        export = load_file(folder / f"{case}-{ranks}/export/model.safetensors")
        for name, tensor in expected["averages"].items():
            torch.testing.assert_close(export[name], tensor, rtol=1e-4, atol=1e-5, msg=f"{case} {name}")
    if ranks == 2:
        check_resumed(folder, found)
        check_exports(folder, expected, tmp_path)
        check_plan(folder, found["bytes"])


def check_resumed(folder: Path, found: dict[str, Any]) -> None:
    for case in CUT_OFF:
        assert of(found[f"{case} cut"], "eval") == of(found[case], "eval"), case
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


def check_plan(folder: Path, measured: list[int]) -> None:
    """The plan counts what the averages take, to the byte."""
    from toolkit import Recipe
    from toolkit.planning.hardware import presets
    from toolkit.planning.planner import Planner
    from toolkit.planning.setup import Setup
    from toolkit.planning.workload.workload import workload_of_model
    from toolkit.sharding.plan.strategy import STRATEGIES, MeshShape

    os.environ["WORLD_SIZE"] = "2"
    recipe = Recipe.from_mapping(values(folder, "plan", "zero3"))
    without = recipe.model_copy(update={"training": recipe.training.model_copy(update={"ema": None})})
    config = AutoConfig.from_pretrained(folder / "model")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    peaks = [
        Planner(one, workload_of_model(one, model, "no", None), presets()["h100_sxm"])
        .peak(Setup(STRATEGIES["zero3"], MeshShape(1, 2), False, None, 1, 1))
        .optimizer
        for one in (recipe, without)
    ]
    assert peaks[0] - peaks[1] == measured[0]
