"""Whole recipes on ranks with a pretended device each: losses and norms of the same ranks on the CPU."""

from __future__ import annotations

import functools
import importlib.util
import json
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ranks
from support.texts import make_texts
from support.tiny import recipe_values, save_llama, unfinish
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("pretended_device") is None, reason="runs inside of tests/cuda/run.py"),
]

STEPS = 4
TEXTS = [" ".join(text.split()[:16]) for text in make_texts(40, seed=2)]
BF16 = {"mixed_precision": "bf16"}
BY_BLOCK = {"accumulate": "by_block"}
OFFLOAD = {"offload": "optimizer", "offload_executor": "cpu_torch"}
LORA = {"kind": "lora", "r": 2}


@dataclass(frozen=True)
class Case:
    """A recipe's sections as they differ from a plain run's.

    Attributes:
        close: how far losses may be off, of themselves; norms ten times as far.
        resumed: the run is cut off at its middle and started again.
        on_cpu: what differs on CPU ranks, which do not have fp16.
    """

    sharding: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    close: float = 1e-5
    resumed: bool = False
    on_cpu: dict[str, Any] = field(default_factory=dict)


IN_BF16 = 2e-3
FP16: dict[str, Any] = {"training": {"mixed_precision": "fp16"}, "on_cpu": {"mixed_precision": "no"}, "close": 5e-3}
EXPERTS = {"model": {"name_or_path": "experts"}}
CASES: dict[int, dict[str, Case]] = {
    2: {
        "ddp": Case({"strategy": "ddp"}),
        "ddp, bf16": Case({"strategy": "ddp"}, BF16, close=IN_BF16),
        "ddp, fp16": Case({"strategy": "ddp"}, **FP16),
        "ddp, averages": Case({"strategy": "ddp"}, {"ema": 0.7, "eval_every_steps": 2}),
        "zero3, fp16": Case(**FP16),
        "zero3, averages": Case(training={"ema": 0.7, "eval_every_steps": 2}),
        "averages, offload": Case(OFFLOAD, {"ema": 0.7, "eval_every_steps": 2, **BF16}, close=IN_BF16),
        "by block": Case(BY_BLOCK),
        "by block, offload": Case(BY_BLOCK | OFFLOAD, BF16, close=IN_BF16),
        "by block, LoRA": Case(BY_BLOCK, BF16, {"adapter": LORA}, close=IN_BF16),
        "experts by block, bf16": Case(
            {"experts": 2, **BY_BLOCK}, BF16, EXPERTS | {"objective": {"router_aux_coef": 0.0}}, close=IN_BF16
        ),
        "sequence": Case({"sequence": 2}),
        "sequence, checkpointing, offload": Case(
            {"sequence": 2, "activation_checkpointing": 1, **OFFLOAD}, BF16, close=IN_BF16
        ),
        "inputs offloaded": Case({"activation_checkpointing": 1, "offload_checkpoints": True}),
        "chunks": Case(
            {"activation_checkpointing": 1, "chunk_tokens": 16, "offload_checkpoints": True}, BF16, close=IN_BF16
        ),
        "packed": Case(sections={"data": {"packing": True, "max_length": 64}}),
        "LoRA, merged": Case(sections={"adapter": LORA, "export": {"merge": True}}),
        "int8": Case(sections={"adapter": LORA | {"quantize": "int8"}}, close=IN_BF16),
        "nf4": Case(sections={"adapter": LORA | {"quantize": "nf4"}}),
        "muon": Case(sections={"optimizer": {"kind": "muon", "learning_rate": 2e-3}}, close=1e-4),
        "resumed": Case(resumed=True),
        "resumed, offload": Case(OFFLOAD, BF16, close=IN_BF16, resumed=True),
        "resumed, ddp, averages": Case({"strategy": "ddp"}, {"ema": 0.7}, resumed=True),
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes")
    save_llama(folder / "model", TEXTS, tied=True)
    save_llama(folder / "experts", TEXTS, tied=False)
    settings = json.loads((folder / "experts" / "config.json").read_text())
    sizes = {key: settings[key] for key in ("vocab_size", "eos_token_id", "pad_token_id", "bos_token_id")}
    sizes |= {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    experts = Qwen3MoeConfig(**sizes, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    Qwen3MoeForCausalLM(experts).save_pretrained(folder / "experts")
    write(folder / "rows.jsonl", [{"text": text} for text in TEXTS])
    return folder


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def values_of(folder: Path, output: str, case: Case, training: dict[str, Any]) -> dict[str, Any]:
    values = recipe_values(folder / "model", folder / "rows.jsonl", folder / output, folder / "cache")
    values["data"] |= {"packing": False, "validation": str(folder / "rows.jsonl"), "max_validation_samples": 8}
    values["data"] |= {"long_rows": "truncate"}
    values["schedule"] = {"kind": "constant"}
    values["training"] |= {"max_steps": STEPS, "gradient_accumulation_steps": 2, **case.training, **training}
    values["sharding"] = {"strategy": "zero3", **case.sharding}
    values["checkpoint"] = {"every_steps": STEPS // 2}
    for section, fields in case.sections.items():
        values[section] = {**values.get(section, {}), **fields}
    for section, key in (("model", "name_or_path"), ("data", "train")):
        values[section][key] = str(folder / values[section][key])
    return values


def one_run(folder: Path, output: str, case: Case, on_cpu: bool) -> dict[str, Any]:
    from toolkit import Recipe, finetune

    training = dict(case.on_cpu) if on_cpu else {}
    if case.resumed:
        ranks.meet()
        finetune(Recipe.from_mapping(values_of(folder, output, case, training | {"max_steps": STEPS // 2})))
        if os.environ["RANK"] == "0":
            unfinish(folder / output)
    ranks.meet()
    metrics = finetune(Recipe.from_mapping(values_of(folder, output, case, training))).metrics
    return {
        name: [record[name] for record in metrics if record.get(name) is not None] for name in ("loss", "grad_norm")
    }


def output_of(num_ranks: int, name: str, on_cpu: bool) -> str:
    return f"{'cpu' if on_cpu else 'cuda'}-{num_ranks}-{name}".replace(" ", "_")


def all_runs(folder: Path, num_ranks: int, on_cpu: bool) -> dict[str, Any]:
    """What every recipe finds on this rank, and what its device has seen of it."""
    if not on_cpu:
        os.environ["ACCELERATE_USE_CPU"] = "false"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    found: dict[str, Any] = {}
    for name, case in CASES[num_ranks].items():
        hybrid = case.sharding.get("strategy") == "hybrid"
        os.environ["PARALLELISM_CONFIG_DP_SHARD_SIZE"] = str(num_ranks // 2) if hybrid else "1"
        before = {} if on_cpu else seen()
        found[name] = one_run(folder, output_of(num_ranks, name, on_cpu), case, on_cpu)
        if not on_cpu:
            found[name]["seen"] = {key: value - before[key] for key, value in seen().items()}
    return found


def seen() -> dict[str, int]:
    import pretended_device

    return pretended_device.counters() | {"failed": len(pretended_device.failed)}


def on_ranks(folder: Path, num_ranks: int, on_cpu: bool) -> list[Any]:
    """On ranks that are started anew: what is forked from a process that has looked for devices cannot use them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*(("PRETENDED_LIBRARIES", "") if on_cpu else ("TEST_BACKEND", "cpu:gloo,cuda:nccl")))
        patch.setattr(ranks, "_context", multiprocessing.get_context("spawn"))
        patch.setattr(multiprocessing.context.SpawnContext, "set_forkserver_preload", lambda *_: None)
        return ranks.run_on_ranks(all_runs, num_ranks, folder, num_ranks, on_cpu, seconds=1200)


@pytest.fixture(scope="module")
def found(folder: Path) -> Callable[[int], tuple[list[Any], list[Any]]]:
    """On devices and on the CPU, by the number of ranks."""
    return functools.cache(lambda num_ranks: (on_ranks(folder, num_ranks, False), on_ranks(folder, num_ranks, True)))


@pytest.mark.parametrize(("num_ranks", "name"), [(ranks, name) for ranks, cases in CASES.items() for name in cases])
def test_a_recipe_learns_on_devices_what_it_learns_on_cpu_ranks(
    found: Callable[[int], tuple[list[Any], list[Any]]], num_ranks: int, name: str
) -> None:
    case = CASES[num_ranks][name]
    for own, exact in zip(*found(num_ranks), strict=True):
        assert own[name]["loss"] == pytest.approx(exact[name]["loss"], rel=case.close)
        assert own[name]["grad_norm"] == pytest.approx(exact[name]["grad_norm"], rel=10 * case.close)
        assert len(own[name]["grad_norm"]) == STEPS
        assert own[name]["seen"]["misuses"] == own[name]["seen"]["failed"] == 0
        assert own[name]["seen"]["launches"] > 100
