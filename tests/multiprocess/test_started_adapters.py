"""A run that goes on from an adapter is peft's own, loaded to be trained, in a plain loop; so is DPO against it."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from support.cases import cases
from support.four_bits import read_by_hand
from support.peft_by_hand import ROWS_PER_STEP, SEED, TEXTS, loop_of
from support.ranks import meet, run_on_ranks
from support.runs import losses_of, outcome
from support.texts import write_rows
from support.tiny import recipe_values, save_llama, unfinish
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

STEPS, BETA, PAIRS_PER_STEP = 3, 0.3, 4
SHORT = [" ".join(text.split()[:4]) for text in TEXTS]
PAIRS = [{"prompt": SHORT[i], "chosen": " " + SHORT[i + 13], "rejected": " " + SHORT[i + 26][:15]} for i in range(12)]

TABLES = cases(__file__)
LORA: dict[str, dict[str, Any]] = TABLES["LORA"]
"""Adapters that peft saves: name -> arguments of its `LoraConfig`."""

RUNS: dict[int, list[tuple[str, str, str, dict[str, Any]]]] = TABLES["RUNS"]
"""Ranks -> (run, adapter, strategy, settings of sharding)."""


def base_of(folder: Path, adapter: str, in_4_bits: bool = False) -> Any:
    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        llm_int8_skip_modules=["lm_head"],
    )
    more: dict[str, Any] = {"quantization_config": how} if in_4_bits else {}
    read_by_hand()
    return AutoModelForCausalLM.from_pretrained(model_of(folder, adapter), dtype=torch.float32, **more)


def model_of(folder: Path, adapter: str) -> Path:
    return folder / ("experts-model" if adapter == "experts" else "model")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("started")
    tokens = AutoTokenizer.from_pretrained(save_llama(folder / "model", TEXTS, tied=False))
    sizes = {"vocab_size": len(tokens), "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    sizes |= {"num_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).save_pretrained(folder / "experts-model")
    tokens.save_pretrained(folder / "experts-model")
    write_rows(folder / "rows.jsonl", ({"text": text} for text in TEXTS))
    write_rows(folder / "pairs.jsonl", PAIRS)
    judged = [{"prompt": p["prompt"], "completion": p["chosen"], "label": i % 2 == 0} for i, p in enumerate(PAIRS)]
    write_rows(folder / "judged.jsonl", judged)
    for number, (name, settings) in enumerate(LORA.items()):
        torch.manual_seed(number)
        model = peft.get_peft_model(base_of(folder, name), peft.LoraConfig(task_type="CAUSAL_LM", **settings))
        for key, parameter in model.named_parameters():
            if parameter.requires_grad:  # B, too: an adapter that has been trained
                parameter.data += 0.05 * torch.randn(parameter.shape) * ("magnitude" not in key)
        model.save_pretrained(folder / name)
    return folder


def started(folder: Path, place: Path, adapter: str = "linear", in_4_bits: bool = False) -> Any:
    """As peft loads it to go on."""
    model = peft.PeftModel.from_pretrained(base_of(folder, adapter, in_4_bits), str(place), is_trainable=True)
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):  # a kernel that fails for other than 32 outputs
            layer.support_avx512bf16_for_cpu = False
    return model


def dpo_loop(folder: Path, place: Path) -> list[float]:
    """DPO pair by pair; the reference is another copy of the adapter, which is never trained."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model, reference = started(folder, place), started(folder, place)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3, weight_decay=0.0, foreach=False)

    def log_probability(of: Any, pair: dict[str, str], side: str) -> torch.Tensor:
        asked = len(tokenizer(pair["prompt"])["input_ids"])
        ids = torch.tensor([tokenizer(pair["prompt"] + pair[side])["input_ids"] + [tokenizer.eos_token_id]])
        each = -F.cross_entropy(of(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="none")
        return each[asked - 1 :].sum()

    losses = []
    for step in range(STEPS):
        total = 0.0
        for pair in [PAIRS[(step * PAIRS_PER_STEP + i) % len(PAIRS)] for i in range(PAIRS_PER_STEP)]:
            ratios = []
            for side in ("chosen", "rejected"):
                with torch.no_grad():
                    before = log_probability(reference, pair, side)
                ratios.append(log_probability(model, pair, side) - before)
            loss = -F.logsigmoid(BETA * (ratios[0] - ratios[1])) / PAIRS_PER_STEP
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def recipe(folder: Path, name: str, rows: str, start: Path, **training: Any) -> dict[str, Any]:
    values = recipe_values(folder / "model", folder / rows, folder / name, folder / "cache")
    values["data"] |= {"max_length": 64, "packing": False}
    values["adapter"] = {"kind": "lora", "start_from": str(start)}
    values["schedule"] = {"kind": "constant"}
    values["training"] |= {"max_steps": STEPS, "seed": SEED, **training}
    return values


def dpo(folder: Path, name: str, start: Path, ranks: int, **training: Any) -> dict[str, Any]:
    size = {"micro_batch_size": PAIRS_PER_STEP // 2 // ranks, "gradient_accumulation_steps": 2}
    values = recipe(folder, name, "pairs.jsonl", start, **size, **training)
    values["objective"] = {"kind": "preference", "beta": BETA}
    values["optimizer"] = {"learning_rate": 3e-3, "weight_decay": 0.0}
    values["checkpoint"] = {"every_steps": 2, "asynchronous": False}
    return values


def runs(folder: Path) -> dict[str, Any]:
    """Losses of each run, or its error."""
    ranks, found = int(os.environ["WORLD_SIZE"]), {}

    def run(name: str, values: dict[str, Any]) -> None:
        result = outcome(values)
        found[name] = result[0] if isinstance(result, tuple) else losses_of(result.metrics)

    def on_first_rank(act: Any) -> None:
        meet()
        if int(os.environ["RANK"]) == 0:
            act()
        torch.distributed.barrier()

    accumulation = 3 if ranks == 4 else 2
    for name, adapter, strategy, sharding in RUNS[min(ranks, 2)]:
        size = {"gradient_accumulation_steps": accumulation, "micro_batch_size": ROWS_PER_STEP // ranks // accumulation}
        values = recipe(folder, f"{name}-{ranks}", "rows.jsonl", folder / adapter, **size)
        values["model"]["name_or_path"] = str(model_of(folder, adapter))
        values["optimizer"] = {"learning_rate": 2e-2, "weight_decay": 0.1}
        values["sharding"] = {"strategy": strategy, **sharding}
        if adapter == "experts":
            values["objective"] = {"router_aux_coef": 0.0}
        if name.startswith("nf4"):
            values["adapter"]["quantize"] = "nf4"
        run(name, values)
    if ranks == 4:
        return found
    own = folder / f"linear-zero3-{ranks}" / "export"
    run("dpo", dpo(folder, f"dpo-{ranks}", own, ranks))
    if ranks == 1:
        return found
    run("dpo-cut", dpo(folder, "dpo-cut", own, ranks, max_steps=2))
    on_first_rank(lambda: unfinish(folder / "dpo-cut"))
    on_first_rank(lambda: shutil.copytree(own, folder / "kept"))
    on_first_rank(lambda: changed(own))
    run("dpo-changed", dpo(folder, "dpo-cut", own, ranks))
    on_first_rank(lambda: shutil.copytree(folder / "kept", own, dirs_exist_ok=True))
    run("dpo-rest", dpo(folder, "dpo-cut", own, ranks))
    kto = recipe(folder, "kto", "judged.jsonl", own, micro_batch_size=3)
    run("kto", kto | {"objective": {"kind": "kto", "beta": BETA}, "optimizer": {"learning_rate": 3e-3}})
    return found


def changed(place: Path) -> None:
    tensors = load_file(place / "adapter_model.safetensors")
    save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, place / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[int, dict[str, Any]]:
    return {ranks: run_on_ranks(runs, ranks, folder)[0] for ranks in RUNS}


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, dict[str, Any]]:
    names = {name: (adapter, name.startswith("nf4")) for name, adapter, _, _ in RUNS[2]}
    return {
        name: loop_of(started(folder, folder / adapter, adapter, in_4_bits), folder / "model", STEPS)
        for name, (adapter, in_4_bits) in names.items()
    }


@pytest.mark.parametrize(("ranks", "name"), [(ranks, run[0]) for ranks in RUNS for run in RUNS[ranks]])
def test_a_run_goes_on_as_peft_does(
    ranks: int, name: str, found: dict[int, dict[str, Any]], plain: dict[str, dict[str, Any]], folder: Path
) -> None:
    require_as_peft_does(ranks, name, found[ranks], plain, folder)


@pytest.mark.grid
def test_four_ranks_go_on_as_peft_does(folder: Path, plain: dict[str, dict[str, Any]]) -> None:
    found = run_on_ranks(runs, 4, folder)[0]
    for name, *_ in RUNS[2]:
        require_as_peft_does(4, name, found, plain, folder)


def require_as_peft_does(
    ranks: int, name: str, found: dict[str, Any], plain: dict[str, dict[str, Any]], folder: Path
) -> None:
    assert found[name] == pytest.approx(plain[name]["losses"], rel=1e-6), name
    export = folder / f"{name}-{ranks}" / "export"
    saved = load_file(export / "adapter_model.safetensors")
    assert saved.keys() == plain[name]["adapter"].keys()
    for key, tensor in plain[name]["adapter"].items():
        assert float(((saved[key] - tensor).abs() < 2e-4).float().mean()) > 0.99, key
    told = json.loads((export / "adapter_config.json").read_text())
    adapter = next(run[1] for run in RUNS[min(ranks, 2)] if run[0] == name)
    for key in ("r", "lora_alpha"):
        assert told[key] == LORA[adapter][key], "the file decides"


@pytest.mark.parametrize("ranks", list(RUNS))
def test_the_reference_of_dpo_is_the_adapter_that_it_goes_on_from(
    ranks: int, found: dict[int, dict[str, Any]], folder: Path
) -> None:
    expected = dpo_loop(folder, folder / f"linear-zero3-{ranks}" / "export")
    assert found[ranks]["dpo"][0] == pytest.approx(math.log(2), rel=1e-6)
    assert found[ranks]["dpo"] == pytest.approx(expected, rel=1e-6)
    assert expected[-1] != pytest.approx(math.log(2), rel=1e-3), "it has learned"


def test_the_reference_of_kto_is_that_adapter_too(found: dict[int, dict[str, Any]]) -> None:
    assert found[2]["kto"][0] == pytest.approx(0.5, rel=1e-6), "1 - sigma(0) for each row"


def test_a_run_that_was_cut_off_goes_on_exactly(found: dict[int, dict[str, Any]], folder: Path) -> None:
    assert found[2]["dpo-rest"] == found[2]["dpo"]
    whole, rest = (load_file(folder / name / "export/adapter_model.safetensors") for name in ("dpo-2", "dpo-cut"))
    assert all(torch.equal(tensor, rest[key]) for key, tensor in whole.items())


def test_an_adapter_that_has_changed_since_is_refused(found: dict[int, dict[str, Any]], folder: Path) -> None:
    own = str(folder / "linear-zero3-2" / "export")
    assert found[2]["dpo-changed"] == (
        "checkpoint.resume: the run up to step 2 went on from another adapter than adapter.start_from "
        f"({own!r}) is now; bring that back, or start anew with another training.output_dir"
    )


@pytest.mark.grid
def test_verify_reads_the_adapter_by_peft(folder: Path) -> None:
    from toolkit import Recipe
    from toolkit.verify import verify

    values = recipe(folder, "verified", "rows.jsonl", folder / "dora", micro_batch_size=2)
    report = verify(Recipe.from_mapping(values), steps=2)
    assert {row.verdict for row in report.rows} <= {"ok", "not used"}, report.rows


def test_recipe_and_card_tell_what_the_run_went_on_from(found: dict[int, dict[str, Any]], folder: Path) -> None:
    from toolkit import Recipe

    again = Recipe.load(folder / "dora-ddp-2" / "recipe.yaml")
    assert (again.adapter.r, again.adapter.alpha, again.adapter.use_rslora) == (2, 3.0, True)
    assert again.adapter.target_modules == ["k_proj", "o_proj"]
    assert again.adapter.modules_to_save == ["norm"]
    card = (folder / "dora-ddp-2" / "export" / "README.md").read_text()
    assert "goes on from the adapter dora (r 2, alpha 3)" in card
    assert str(folder) not in card
    assert json.loads((folder / "dora-ddp-2" / "export" / "training.json").read_text())["adapter"] is not None
