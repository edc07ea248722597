"""Whole recipes on ranks with a pretended device each: losses and norms of the same ranks on the CPU."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import ranks
from support.pretended_steps import NCCL, WITHOUT_DEVICES, started_anew, watched
from support.texts import make_texts, write_rows
from support.tiny import recipe_values, save_llama, unfinish
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

pytestmark = [
    pytest.mark.grid,
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
        weights: how far the exported ones may be off, in all, if not half of that.
        resumed: the run is cut off at its middle and started again.
        on_cpu: what differs on CPU ranks, which do not have fp16.
    """

    sharding: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    close: float = 1e-5
    weights: float | None = None
    resumed: bool = False
    on_cpu: dict[str, Any] = field(default_factory=dict)


IN_BF16 = 2e-3
FP16: dict[str, Any] = {
    "training": {"mixed_precision": "fp16"},
    "on_cpu": {"mixed_precision": "no"},
    "close": 5e-3,
    "weights": 1e-2,
}
EXPERTS = {"model": {"name_or_path": "experts"}}
HYBRID = {"strategy": "hybrid"}
"""Two replicas, of half of the ranks each, on two hosts."""
NODES = {"reshard_after_forward": 2}
"""Backward gathers among two ranks."""
AVERAGES = {"ema": 0.7, "eval_every_steps": 2}
CASES: dict[int, dict[str, Case]] = {
    2: {
        "ddp": Case({"strategy": "ddp"}),
        "ddp, bf16": Case({"strategy": "ddp"}, BF16, close=IN_BF16),
        "ddp, fp16": Case({"strategy": "ddp"}, **FP16),
        "ddp, averages": Case({"strategy": "ddp"}, AVERAGES),
        "zero3, fp16": Case(**FP16),
        "zero3, averages": Case(training=AVERAGES),
        "averages, offload": Case(OFFLOAD, AVERAGES | BF16, close=IN_BF16),
        "by block": Case(BY_BLOCK),
        "by block, offload": Case(BY_BLOCK | OFFLOAD, BF16, close=IN_BF16),
        "by block, LoRA": Case(BY_BLOCK, BF16, {"adapter": LORA}, close=IN_BF16),
        "experts by block, bf16": Case(
            {"experts": 2, **BY_BLOCK}, BF16, EXPERTS | {"objective": {"router_aux_coef": 0.0}}, close=IN_BF16
        ),
        "experts": Case({"experts": 2}, sections=EXPERTS),
        "experts, bf16, offload": Case({"experts": 2, **OFFLOAD}, BF16, EXPERTS, close=IN_BF16),
        "sequence": Case({"sequence": 2}),
        "sequence, checkpointing, offload": Case(
            {"sequence": 2, "activation_checkpointing": 1, **OFFLOAD}, BF16, close=IN_BF16
        ),
        "inputs offloaded": Case({"activation_checkpointing": 1, "offload_checkpoints": True}),
        "packed": Case(sections={"data": {"packing": True, "max_length": 64}}),
        "LoRA, merged": Case(sections={"adapter": LORA, "export": {"merge": True}}),
        "int8": Case(sections={"adapter": LORA | {"quantize": "int8"}}, close=IN_BF16),
        "nf4": Case(sections={"adapter": LORA | {"quantize": "nf4"}}),
        "muon": Case(sections={"optimizer": {"kind": "muon", "learning_rate": 2e-3}}, close=1e-4),
        "resumed": Case(resumed=True),
        "resumed, offload": Case(OFFLOAD, BF16, close=IN_BF16, resumed=True),
        "resumed, ddp, averages": Case({"strategy": "ddp"}, {"ema": 0.7}, resumed=True),
    },
    4: {
        "plain": Case(),
        "hybrid": Case(HYBRID),
        "hybrid, bf16": Case(HYBRID, BF16, close=IN_BF16),
        "hybrid, fp16": Case(HYBRID, **FP16),
        "hybrid, averages": Case(HYBRID, AVERAGES),
        "hybrid, offload": Case(HYBRID | OFFLOAD, BF16, close=IN_BF16),
        "hybrid, by block": Case(HYBRID | BY_BLOCK, BF16, close=IN_BF16),
        "hybrid, LoRA": Case(HYBRID, sections={"adapter": LORA}),
        "hybrid, experts": Case(HYBRID | {"experts": 2}, sections=EXPERTS),
        "hybrid, sequence": Case(HYBRID | {"sequence": 2}),
        "hybrid, resumed": Case(HYBRID, resumed=True),
        "groups": Case(NODES),
        "groups, bf16, checkpointing": Case(NODES | {"activation_checkpointing": 1}, BF16, close=IN_BF16),
        "groups, offload": Case(NODES | OFFLOAD, BF16, close=IN_BF16),
        "groups, LoRA": Case(NODES, BF16, {"adapter": LORA}, close=IN_BF16),
        "groups, averages": Case(NODES, AVERAGES),
    },
    8: {
        "plain": Case(),
        "hybrid, bf16": Case(HYBRID, BF16, close=IN_BF16),
        "groups": Case(NODES),
        "by block, offload": Case(BY_BLOCK | OFFLOAD, BF16, close=IN_BF16),
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes")
    save_models(folder)
    return folder


def save_models(folder: Path) -> None:
    """A Llama and a mixture of experts with its tokenizer, and rows."""
    save_llama(folder / "model", TEXTS, tied=True)
    save_llama(folder / "experts", TEXTS, tied=False)
    settings = json.loads((folder / "experts" / "config.json").read_text())
    sizes = {key: settings[key] for key in ("vocab_size", "eos_token_id", "pad_token_id", "bos_token_id")}
    sizes |= {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    experts = Qwen3MoeConfig(**sizes, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    Qwen3MoeForCausalLM(experts).save_pretrained(folder / "experts")
    write_rows(folder / "rows.jsonl", [{"text": text} for text in TEXTS])


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


def all_runs(folder: Path, num_ranks: int, on_cpu: bool, names: list[str]) -> dict[str, Any]:
    """What each recipe finds on this rank, and what its device has seen of it. Four ranks and more are two hosts'."""
    on_host = num_ranks if num_ranks == 2 else num_ranks // 2
    os.environ.update(LOCAL_WORLD_SIZE=str(on_host), MASTER_ADDR="localhost", MASTER_PORT="0")
    if not on_cpu:
        os.environ["ACCELERATE_USE_CPU"] = "false"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    found: dict[str, Any] = {}
    for name in names:
        case = CASES[num_ranks][name]
        hybrid = case.sharding.get("strategy") == "hybrid"
        os.environ["PARALLELISM_CONFIG_DP_SHARD_SIZE"] = str(num_ranks // 2) if hybrid else "1"
        if on_cpu:
            found[name] = one_run(folder, output_of(num_ranks, name, on_cpu), case, on_cpu)
            continue
        before = seen()
        with watched() as steps:
            found[name] = one_run(folder, output_of(num_ranks, name, on_cpu), case, on_cpu)
        found[name] |= {"seen": {key: value - before[key] for key, value in seen().items()}, "steps": steps}
    return found


def seen() -> dict[str, int]:
    import pretended_device

    return pretended_device.counters() | {"failed": len(pretended_device.failed)}


@pytest.fixture(scope="module")
def found(folder: Path, request: pytest.FixtureRequest) -> Callable[[int], tuple[list[Any], list[Any]]]:
    """On devices and on the CPU, by the number of ranks; only recipes of tests that were chosen run."""
    chosen = [item.callspec.params for item in request.session.items if getattr(item, "module", None) is request.module]

    def both(num_ranks: int) -> tuple[list[Any], list[Any]]:
        names = [name for name in CASES[num_ranks] if {"num_ranks": num_ranks, "name": name} in chosen]
        args = (num_ranks, folder, num_ranks)
        return (
            started_anew(all_runs, *args, False, names, **NCCL),
            started_anew(all_runs, *args, True, names, **WITHOUT_DEVICES),
        )

    return functools.cache(both)


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


def exported(folder: Path, *which: Any) -> dict[str, torch.Tensor]:
    files = sorted((folder / output_of(*which) / "export").glob("*.safetensors"))
    return {name: tensor.float() for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(("num_ranks", "name"), [(ranks, name) for ranks, cases in CASES.items() for name in cases])
def test_a_recipe_exports_what_cpu_ranks_export(
    found: Callable[[int], tuple[list[Any], list[Any]]], folder: Path, num_ranks: int, name: str
) -> None:
    found(num_ranks)
    case = CASES[num_ranks][name]
    own, exact = (exported(folder, num_ranks, name, on_cpu) for on_cpu in (False, True))
    assert own.keys() == exact.keys()
    assert exact
    for weight, tensor in exact.items():
        far = case.weights or case.close / 2  # four steps move norms by 5e-3 and matrices by more
        assert (own[weight] - tensor).norm() <= far * tensor.norm(), weight


ONCE = "trainer._exchange_figures"
OF_DDP = {"distributed._pre_forward", "distributed.forward"}
"""In its first ten steps DDP asks how long the step before has taken: that one's events are over. It sorts its buckets
anew in the second."""

OF_OFFLOAD = {"capture.wait_for_landing"}
"""A gradient's copy to the host waits until the buffer is free into which it goes."""

OF_AVERAGES = {"engine.flush"}
"""With offload they wait for the update of the weights that they are of."""

OF_EXPERTS = {"expert_parallel._forward_with_exchange", "balance.loads"}
"""How many tokens an expert gets is known to the device alone, and so is what is told of it."""

IN_FLOAT32 = {"functional.grouped_mm"}
"""torch multiplies groups one by one there, whose sizes it reads."""


def may_wait(case: Case) -> set[str]:
    """Where the host may wait beside `ONCE`."""
    bf16 = case.training.get("mixed_precision") == "bf16"
    return {
        *(OF_DDP if case.sharding.get("strategy") == "ddp" else ()),
        *(OF_OFFLOAD if "offload" in case.sharding else ()),
        *(OF_AVERAGES if "offload" in case.sharding and "ema" in case.training else ()),
        *(OF_EXPERTS if "experts" in case.sharding else ()),
        *(IN_FLOAT32 if "experts" in case.sharding and not bf16 else ()),
    }


@pytest.mark.parametrize(("num_ranks", "name"), [(ranks, name) for ranks, cases in CASES.items() for name in cases])
def test_the_host_waits_once_a_step(
    found: Callable[[int], tuple[list[Any], list[Any]]], num_ranks: int, name: str
) -> None:
    for rank in found(num_ranks)[0]:
        steps = rank[name]["steps"]
        assert len(steps) == STEPS
        # A run's first step asks for its own counts, besides; some runs begin anew at the third.
        for step in steps[1::2]:
            assert step.waits.count(ONCE) == 1
            assert {*step.waits} - {ONCE} <= may_wait(CASES[num_ranks][name])
