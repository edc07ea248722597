"""QLoRA: the run is that of peft on bitsandbytes' own layers, whatever the ranks and the strategy."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.cases import cases
from support.four_bits import matrix_of, read_by_hand
from support.peft_by_hand import ROWS_PER_STEP, SEED, TEXTS, peft_loop
from support.ranks import run_on_ranks
from support.runs import finetuned, losses_of, outcome
from support.texts import write_rows
from support.tiny import recipe_values, save_llama, unfinish
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

STEPS = 10
NF4 = {"r": 4, "quantize": "nf4"}
TABLES = cases(__file__)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = TABLES["CASES"]
"""Name -> (the recipe's adapter, peft's own arguments)."""

RUNS: dict[int, list[tuple[str, str, int, dict[str, Any]]]] = TABLES["RUNS"]
"""Ranks -> (case, strategy, accumulation, sharding)."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qlora")
    save_llama(folder / "model", TEXTS, tied=False)
    write_rows(folder / "rows.jsonl", ({"text": text} for text in TEXTS))
    return folder


def quantised_by_hand(folder: Path, case: str) -> nn.Module:
    """The base as transformers and bitsandbytes make it."""
    if case != "int8":
        how = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=case == "double",
            bnb_4bit_compute_dtype=torch.float32,
        )
        read_by_hand()
        return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, quantization_config=how)
    from bitsandbytes.functional import int8_vectorwise_dequant, int8_vectorwise_quant

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    for path, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and path != "lm_head":
            packed, scales, _ = int8_vectorwise_quant(layer.weight.detach().half())
            layer.weight.data = int8_vectorwise_dequant(packed, scales)
    return model


def plain_loop(folder: Path, case: str) -> dict[str, Any]:
    # A large eps: AdamW divides by a gradient's own size, and where that is next to nothing rounding decides.
    settings = {"r": 4, "lora_alpha": 8, **CASES[case][1]}
    return peft_loop(quantised_by_hand(folder, case), folder / "model", settings, STEPS, eps=1e-3)


def recipe(folder: Path, name: str, adapter: dict[str, Any], **training: Any) -> dict[str, Any]:
    values = recipe_values(folder / "model", folder / "rows.jsonl", folder / name, folder / "cache")
    values["data"] |= {"max_length": 64, "packing": False}
    values["adapter"] = {"kind": "lora", **adapter}
    values["optimizer"] = {"learning_rate": 2e-2, "weight_decay": 0.1, "eps": 1e-3}
    values["schedule"] = {"kind": "constant"}
    values["training"] |= {"max_steps": STEPS, "seed": SEED, **training}
    return values


def run_name(case: str, strategy: str, accumulation: int, ranks: int) -> str:
    return f"{case}-{strategy}-{accumulation}-{ranks}"


def runs(folder: Path, ranks: int) -> dict[str, Any]:
    found = {}
    for case, strategy, accumulation, sharding in RUNS[ranks]:
        os.environ["PARALLELISM_CONFIG_DP_SHARD_SIZE"] = "2" if strategy == "hybrid" else "1"
        name = run_name(case, strategy, accumulation, ranks)
        groups = ranks // sharding.get("sequence", 1)
        size = {"micro_batch_size": ROWS_PER_STEP // (groups * accumulation)}
        values = recipe(folder, name, CASES[case][0], **size, gradient_accumulation_steps=accumulation)
        values["sharding"] = {"strategy": strategy, **sharding}
        values["export"] = {"verify": ranks == 1}
        result = finetuned(values)
        found[name] = (losses_of(result.metrics), result.logits_difference)
    return found


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, dict[str, Any]]:
    return {case: plain_loop(folder, case) for case in CASES}


@pytest.mark.grid
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_run_is_that_of_peft_on_bitsandbytes(ranks: int, folder: Path, plain: dict[str, dict[str, Any]]) -> None:
    found = run_on_ranks(runs, ranks, folder, ranks)[0]
    for case, strategy, accumulation, _ in RUNS[ranks]:
        name = run_name(case, strategy, accumulation, ranks)
        losses, difference = found[name]
        assert difference is None or difference < 1e-6
        assert losses == pytest.approx(plain[case]["losses"], rel=1e-6), name
        assert losses[-1] < losses[0]
        saved = load_file(folder / name / "export/adapter_model.safetensors")
        assert saved.keys() == plain[case]["adapter"].keys(), name
        for key, tensor in plain[case]["adapter"].items():
            assert float((saved[key] - tensor).abs().max()) < 1e-5, (name, key)


def other_runs(folder: Path) -> dict[str, Any]:
    """On two ranks: a model saved in nf4, a merge, a run that was cut off, and one whose base has changed since."""
    found: dict[str, Any] = {}
    size = {"micro_batch_size": 6, "max_steps": 4}
    double = NF4 | {"double_quantization": True}

    def run(name: str, adapter: dict[str, Any], base: str = "model", **sections: Any) -> None:
        values = recipe(folder, name, adapter, **size | sections.pop("training", {}))
        values["model"]["name_or_path"] = str(folder / base)
        values["sharding"] = {"strategy": "zero3"}
        result = outcome(values | sections)
        found[name] = result if type(result) is tuple else (losses_of(result.metrics), result.logits_difference)

    saving = {"every_steps": 2, "asynchronous": False}
    run("whole", double)
    run("stored", {"r": 4}, base="nf4")
    run("merged", double, export={"merge": True, "dtype": "bfloat16"})
    run("cut", double, base="moving", training={"max_steps": 2}, checkpoint=saving)
    if int(os.environ["RANK"]) == 0:
        unfinish(folder / "cut")
        shutil.copytree(folder / "cut", folder / "again")
    run("cut", double, base="moving", checkpoint=saving)
    if int(os.environ["RANK"]) == 0:
        save_llama(folder / "moving", TEXTS, tied=False, seed=1)
    run("again", double, base="moving", checkpoint=saving)
    return found


@pytest.fixture(scope="module")
def others(folder: Path) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_quant_storage=torch.bfloat16,
    )
    AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float32, quantization_config=how
    ).save_pretrained(folder / "nf4")
    tokenizer.save_pretrained(folder / "nf4")
    shutil.copytree(folder / "model", folder / "moving")
    return run_on_ranks(other_runs, 2, folder)[0]


def test_a_model_saved_in_nf4_loads_as_it_is(others: dict[str, Any]) -> None:
    assert others["stored"][0] == others["whole"][0]
    assert others["stored"][1] < 1e-6


def test_a_run_that_was_cut_off_goes_on_exactly(others: dict[str, Any], folder: Path) -> None:
    assert others["cut"][0] == others["whole"][0]
    manifest = json.loads((folder / "cut/checkpoints/step_00000004/manifest.json").read_text())
    assert all("lora_" in name for name in manifest["tensors"]), "the base is where it was"


def test_another_base_is_refused(others: dict[str, Any], folder: Path) -> None:
    text, exit_code = others["again"]
    assert exit_code == 2
    assert "the adapters were trained on other weights" in text
    from toolkit.errors import BadInputError
    from toolkit.generation.text.load import load_model

    with pytest.raises(BadInputError, match="its weights differ"):
        load_model(str(folder / "cut"))


def test_the_adapter_and_the_merged_model_are_what_was_trained(others: dict[str, Any], folder: Path) -> None:
    assert others["whole"][1] < 1e-6
    assert 1e-6 < others["merged"][1] < 0.05, "by how much 16 bits differ from the quantised model is told"
    told = json.loads((folder / "whole/export/base.json").read_text())
    assert told["quantization"]["llm_int8_skip_modules"] == ["lm_head"]
    base = quantised_by_hand(folder, "double")
    adapter = load_file(folder / "whole/export/adapter_model.safetensors")
    merged = load_file(folder / "merged/export/model.safetensors")
    for path, layer in base.named_modules():
        if type(layer).__name__ == "Linear4bit":
            a, b = (adapter[f"base_model.model.{path}.lora_{half}.weight"] for half in "AB")
            by_hand = matrix_of(layer.weight.data, layer.weight.quant_state).float() + 2 * b @ a
            assert torch.equal(merged[f"{path}.weight"], by_hand.to(torch.bfloat16)), path
