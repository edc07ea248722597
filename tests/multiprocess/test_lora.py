"""LoRA: the run is peft's plain loop, whatever the ranks and the strategy; saved as peft saves it, or merged."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from support.cases import cases
from support.peft_by_hand import ROWS_PER_STEP, SEED, TEXTS, peft_loop
from support.ranks import run_on_ranks
from support.runs import finetuned, losses_of, outcome
from support.texts import write_rows
from support.tiny import recipe_values, save_llama, unfinish
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2MoeConfig, Qwen2MoeForCausalLM

STEPS = 8
TABLES = cases(__file__)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = TABLES["CASES"]
"""Name -> (the recipe's adapter, peft's own arguments)."""

MODELS = {"experts": "experts-model", "spread": "experts-model"}
"""Case -> folder of its model; of the others it is `model`."""

RUNS: dict[int, list[tuple[str, str, int]]] = TABLES["RUNS"]
"""Ranks -> (case, strategy, accumulation). With r = 2 on 4 ranks some shards are empty."""

SHARED = {2: ("linear", "zero2"), 4: ("plain", "hybrid")}
"""Ranks -> the case and the strategy whose rows 2 ranks share."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    save_llama(folder / "model", TEXTS, tied=False)
    save_experts(folder / "experts-model", folder / "model")
    write_rows(folder / "rows.jsonl", ({"text": text} for text in TEXTS))
    return folder


def save_experts(folder: Path, tokenizer_folder: Path) -> None:
    """A Qwen 2 MoE: four experts of which a token meets two, and one that all share."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    sizes |= {"shared_expert_intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"num_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def plain_loop(folder: Path, case: str) -> dict[str, Any]:
    base = AutoModelForCausalLM.from_pretrained(folder / MODELS.get(case, "model"), dtype=torch.float32)
    settings = {"lora_alpha": 2 * CASES[case][1]["r"], **CASES[case][1]}
    return peft_loop(base, folder / "model", settings, STEPS)


def recipe(folder: Path, name: str, adapter: dict[str, Any], **training: Any) -> dict[str, Any]:
    values = recipe_values(folder / "model", folder / "rows.jsonl", folder / name, folder / "cache")
    values["data"] |= {"max_length": 64, "packing": False}
    values["adapter"] = {"kind": "lora", **adapter}
    values["optimizer"] = {"learning_rate": 2e-2, "weight_decay": 0.1}
    values["schedule"] = {"kind": "constant"}
    values["training"] |= {"max_steps": STEPS, "seed": SEED, **training}
    return values


def runs(folder: Path, ranks: int) -> dict[str, Any]:
    found = {}
    for case, strategy, accumulation in RUNS[ranks]:
        os.environ["PARALLELISM_CONFIG_DP_SHARD_SIZE"] = "2" if strategy == "hybrid" else "1"
        name = f"{case}-{strategy}-{ranks}"
        sequence = 2 if SHARED.get(ranks) == (case, strategy) else 1
        values = recipe(
            folder,
            name,
            CASES[case][0],
            micro_batch_size=ROWS_PER_STEP * sequence // (ranks * accumulation),
            gradient_accumulation_steps=accumulation,
        )
        values["model"]["name_or_path"] = str(folder / MODELS.get(case, "model"))
        if case in MODELS:
            values["objective"] = {"router_aux_coef": 0.0}  # the plain loop has no balance loss
        checkpointing = 1 if case == "plain" else None
        values["sharding"] = {"strategy": strategy, "activation_checkpointing": checkpointing, "sequence": sequence}
        values["sharding"]["experts"] = 2 if case == "spread" else 1
        result = finetuned(values)
        found[name] = (losses_of(result.metrics), result.logits_difference)
    return found


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, dict[str, Any]]:
    return {case: plain_loop(folder, case) for case in CASES}


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.grid) for n in (1, 4))])
def test_the_run_is_that_of_peft_alone(ranks: int, folder: Path, plain: dict[str, dict[str, Any]]) -> None:
    found = run_on_ranks(runs, ranks, folder, ranks)[0]
    for case, strategy, _ in RUNS[ranks]:
        name = f"{case}-{strategy}-{ranks}"
        losses, difference = found[name]
        assert losses == pytest.approx(plain[case]["losses"], rel=1e-6), name
        assert plain[case]["losses"][-1] < plain[case]["losses"][0]
        assert difference < 1e-6
        saved = load_file(folder / name / "export/adapter_model.safetensors")
        assert saved.keys() == plain[case]["adapter"].keys(), name
        for key, tensor in plain[case]["adapter"].items():
            # AdamW divides by a gradient's own size: where that is next to nothing, rounding moves the weight.
            close = (saved[key] - tensor).abs() < 2e-4
            assert float(close.float().mean()) > 0.99, (name, key)
        assert not (folder / name / "export/model.safetensors").exists()


def other_runs(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def run(name: str, values: dict[str, Any], **sections: Any) -> None:
        result = outcome(values, sections)
        found[name] = result if type(result) is tuple else (losses_of(result.metrics), result.logits_difference)

    adapter = {"r": 2, "use_dora": True, "modules_to_save": ["norm"], "dropout": 0.1}
    size = {"micro_batch_size": 2, "gradient_accumulation_steps": 3}
    saving = {"every_steps": 4, "asynchronous": False}
    run("whole", recipe(folder, "whole", adapter, **size), checkpoint=saving)
    run("cut", recipe(folder, "cut", adapter, **size | {"max_steps": 4}), checkpoint=saving)
    if int(os.environ["RANK"]) == 0:
        unfinish(folder / "cut")
    run("rest", recipe(folder, "cut", adapter, **size), checkpoint=saving)
    merged = {"merge": True, "max_shard_gib": 0.0001}
    for case in ("linear", "dora"):
        run(f"merged-{case}", recipe(folder, f"merged-{case}", CASES[case][0], **size), export=merged)
    run("nothing", recipe(folder, "nothing", {"target_modules": ["query"]}, **size))
    run("pattern", recipe(folder, "pattern", {"target_modules": ".*query"}, **size))
    run("saved", recipe(folder, "saved", {"modules_to_save": ["score"]}, **size))
    return found


@pytest.fixture(scope="module")
def others(folder: Path) -> dict[str, Any]:
    return run_on_ranks(other_runs, 2, folder)[0]


def test_a_run_that_was_cut_off_goes_on_exactly(others: dict[str, Any], folder: Path) -> None:
    assert others["rest"][0] == others["whole"][0]
    assert others["cut"][0] == others["whole"][0][:4]
    whole, rest = (load_file(folder / name / "export/adapter_model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(tensor, rest[key]) for key, tensor in whole.items())
    manifest = json.loads((folder / "whole/checkpoints/step_00000004/manifest.json").read_text())
    model = [name for name in manifest["tensors"] if name.startswith("model.")]
    assert model
    assert all("lora_" in name or "modules_to_save" in name for name in model), "the base is where it was"


def test_the_checkpoint_holds_what_was_saved(others: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    from toolkit.checkpoint.consolidate import export_checkpoint
    from toolkit.checkpoint.export import ExportSettings
    from toolkit.checkpoint.manifest import read_checkpoint

    step = folder / "whole/checkpoints/step_00000008"
    settings = ExportSettings(torch.float32, 2**30)
    export_checkpoint(folder / "whole", step, read_checkpoint(step), tmp_path / "adapter", settings, verify=True)
    again = load_file(tmp_path / "adapter/adapter_model.safetensors")
    saved = load_file(folder / "whole/export/adapter_model.safetensors")
    assert again.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[key]) for key, tensor in again.items()), "byte for byte"
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    assert model.peft_config["default"].use_dora
    for place in (tmp_path / "adapter", folder / "whole/export"):
        told = json.loads((place / "adapter_config.json").read_text())
        assert told["base_model_name_or_path"] == str(folder / "model"), "where the base's weights are"


@pytest.mark.parametrize("case", ["linear", "dora"])
def test_a_merged_export_gives_the_adapters_logits(
    case: str, others: dict[str, Any], folder: Path, plain: dict[str, Any]
) -> None:
    assert others[f"merged-{case}"][1] < 1e-5
    merged = AutoModelForCausalLM.from_pretrained(folder / f"merged-{case}/export", dtype=torch.float32)
    assert len(list((folder / f"merged-{case}/export").glob("*.safetensors"))) > 1
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    settings = {"lora_alpha": 2 * CASES[case][1]["r"], **CASES[case][1]}
    adapted = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    peft.set_peft_model_state_dict(adapted, plain[case]["adapter"])
    by_peft = adapted.merge_and_unload().state_dict()
    for name, tensor in merged.state_dict().items():
        assert float((tensor - by_peft[name]).abs().max()) < 2e-3, name
        assert float((tensor - by_peft[name]).abs().mean()) < 1e-5, name


def test_what_cannot_be_adapted_is_told(others: dict[str, Any]) -> None:
    names = "down_proj, embed_tokens, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"
    assert others["nothing"] == (
        f"adapter.target_modules: 'query' matches no module of LlamaForCausalLM; it has {names}",
        2,
    )
    text, exit_code = others["pattern"]
    assert exit_code == 2
    assert text.startswith("adapter.target_modules: '.*query' cannot be adapted")
    assert names in text
    text, exit_code = others["saved"]
    assert exit_code == 2
    assert "adapter.modules_to_save: 'score' matches no module" in text
