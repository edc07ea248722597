"""Whole experts on ranks of their own: a step is that of a plain loop, and a run goes on with any spread."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import peft
import pytest
import torch
from safetensors.torch import load_file
from support.moe import MODELS, mixture, plain_step, two_experts_alone
from support.moe_steps import compare_step, sharded_step, windows_of
from support.ranks import meet, run_on_ranks
from support.tiny import recipe_values, save_llama
from support.traffic import Traffic
from torch import nn
from transformers import AutoTokenizer

from toolkit import Recipe, finetune
from toolkit.model.adapters.adapters import add_adapter
from toolkit.planning.time.traffic import traffic
from toolkit.planning.workload.unit_shapes import unit_shapes
from toolkit.recipe.schema import AdapterSection
from toolkit.sharding import plan_units
from toolkit.sharding.parallel import expert_parallel
from toolkit.sharding.plan.strategy import STRATEGIES, MeshShape
from toolkit.training.trainer import Trainer

COEF, Z = 0.3, 0.05
Spread = tuple[str, str, int, bool, int, str]
"""Model, strategy, micro-batches a step, whether blocks are checkpointed, ranks of a group, how they accumulate."""

TURN, BLOCK = "by_micro_batch", "by_block"
SMALL: list[Spread] = [
    ("qwen3_moe", "zero3", 3, True, 2, TURN),
    ("deepseek_v3", "zero2", 1, False, 2, TURN),
    ("olmoe", "zero3", 3, True, 2, BLOCK),
]
REPLICAS: list[Spread] = [
    ("mixtral", "hybrid", 3, False, 2, TURN),
    ("qwen3_moe", "hybrid", 3, True, 2, BLOCK),
]
"""Two of them; in the first each expert is on one rank of a replica of two."""
ROUNDED: list[Spread] = [("qwen3_moe", "zero3", 3, True, 2, TURN), ("mixtral", "zero2", 3, True, 2, BLOCK)]
"""In bf16."""
CHUNKED: Spread = ("qwen3_moe", "zero3", 1, True, 2, TURN)
"""The MLP of its first block, and all norms, run for a few tokens at a time."""
IDLE: Spread = ("gpt_oss", "zero3", 1, True, 2, TURN)
"""Its second rank's experts are chosen for no token."""

Adapted = tuple[Spread, bool, dict[str, int]]
"""With whether the experts have adapters, too, or attention alone, and fields of the configuration."""

ADAPTED: list[Adapted] = [
    (("mixtral", "zero3", 1, True, 2, TURN), False, {}),
    (("qwen3_moe", "zero3", 3, True, 2, BLOCK), True, {}),
    (("gpt_oss", "zero2", 1, False, 2, TURN), True, {"num_local_experts": 2}),  # one for each rank
]
ON_FOUR: list[Adapted] = [
    (("gpt_oss", "zero3", 1, True, 4, TURN), True, {}),
    (("qwen3_moe", "hybrid", 3, True, 2, TURN), True, {}),
]


def step_of(spread: Spread, **more: Any) -> Any:
    *case, size, accumulate = spread
    meet()
    return sharded_step((*case, accumulate), COEF, Z, None, size, **more)


def first_block_dense(_: Any) -> Any:
    return mixture("qwen3_moe", mlp_only_layers=[0])


def small_steps() -> tuple[list[Any], dict[str, int]]:
    """The steps, and the bytes that this rank hands to the first one's collectives."""
    tokens, exchange = [], expert_parallel.all_to_all

    def counted(rows: torch.Tensor, *args: Any) -> torch.Tensor:
        tokens.append(rows.nbytes)
        return exchange(rows, *args)

    with Traffic() as found, patch.object(expert_parallel, "all_to_all", counted):
        first = step_of(SMALL[0])
    steps = [first, *map(step_of, SMALL[1:]), step_of(IDLE, change=two_experts_alone)]
    steps.append(step_of(CHUNKED, change=first_block_dense, chunk_tokens=5))
    return steps, {**found.bytes, "tokens": sum(tokens)}


def first_value(name: str, shape: torch.Size) -> torch.Tensor:
    """Of a parameter of an adapter, in peft's layout; no half is zero."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(name))) * 0.3


def adapted(model: Any, whole: bool) -> Any:
    """With the toolkit's adapters."""
    section = AdapterSection(kind="lora", r=2, target_modules="all-linear" if whole else ["q_proj", "v_proj"])
    base = add_adapter(model, section, None).get_base_model()
    for name, parameter in list(base.named_parameters()):
        if "lora_" in name:
            owner, _, leaf = name.rpartition(".")
            values = by_expert(name, parameter.shape, num_experts(base))
            setattr(base.get_submodule(owner), leaf, nn.Parameter(values))
    return base


def num_experts(model: Any) -> int:
    return model.model.layers[0].mlp.experts.num_experts


def by_expert(name: str, shape: torch.Size, number: int) -> torch.Tensor:
    """The first value of what the toolkit may hold by expert, (experts x outputs, rank), cut out of peft's."""
    if not name.endswith(".stacked"):
        return first_value(name, shape)
    rows, rank = shape
    of_peft = first_value(name.replace(".stacked", ".weight"), torch.Size([rows // number, rank * number]))
    return torch.cat([of_peft[:, expert::number] for expert in range(number)])


def adapted_by_hand(model: Any, whole: bool) -> Any:
    """With peft's own."""
    experts = ["experts.gate_up_proj", "experts.down_proj"] if whole else None
    layers = ["q_proj", "v_proj", *(["k_proj", "o_proj"] if whole else [])]
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=layers, target_parameters=experts)
    base = peft.get_peft_model(model, config).get_base_model()
    for name, parameter in base.named_parameters():
        if "lora_" in name:
            parameter.data = first_value(name, parameter.shape)
    return base


def adapted_steps(cases: list[Adapted]) -> list[Any]:
    def change(_: Any, kind: str, whole: bool, fields: dict[str, int]) -> Any:
        return adapted(mixture(kind, **fields), whole)

    return [
        step_of(spread, change=functools.partial(change, kind=spread[0], whole=whole, fields=fields))
        for spread, whole, fields in cases
    ]


@pytest.mark.parametrize(("num_ranks", "cases"), [(2, ADAPTED), pytest.param(4, ON_FOUR, marks=pytest.mark.grid)])
def test_a_step_of_adapters_is_that_of_pefts_own_in_a_plain_loop(num_ranks: int, cases: list[Adapted]) -> None:
    for (spread, whole, fields), found in zip(cases, run_on_ranks(adapted_steps, num_ranks, cases)[0], strict=True):
        model = adapted_by_hand(mixture(spread[0], **fields), whole)
        assert any(name.endswith(".stacked") for name in found["gradients"]) is whole
        for name in [name for name in found["gradients"] if name.endswith(".stacked")]:
            gradient = found["gradients"].pop(name)
            experts = torch.stack(gradient.chunk(num_experts(model)))
            found["gradients"][name.replace(".stacked", ".weight")] = experts.permute(1, 2, 0).flatten(1)
        compare(spread, num_ranks, found, model)


def all_steps(spreads: list[Spread]) -> list[Any]:
    return [step_of(spread) for spread in spreads]


def compare(spread: Spread, num_ranks: int, found: dict[str, Any], model: Any = None) -> None:
    kind, _, accumulation, _, _, accumulate = spread
    plain = plain_step(model or mixture(kind), windows_of(num_ranks, accumulation), COEF, Z, accumulate == BLOCK)
    compare_step(found, plain)


def test_a_step_is_that_of_a_plain_loop_also_where_a_rank_gets_no_tokens() -> None:
    ((*found, idle, chunked), sent), (_, other) = run_on_ranks(small_steps, 2)
    for spread, step in zip(SMALL, found, strict=True):
        compare(spread, 2, step)
    model = two_experts_alone(mixture(IDLE[0]))
    assert idle["experts"]["dead_experts"] == 4  # of two layers
    compare(IDLE, 2, idle, model)
    compare(CHUNKED, 2, chunked, first_block_dense(None))
    compare_bytes(SMALL[0], sent, sent["tokens"] + other["tokens"])


def compare_bytes(spread: Spread, found: dict[str, int], tokens: int) -> None:
    """Holds those of a checkpointed step on two ranks against the plan and a formula."""
    kind, strategy, accumulation, _, size, _ = spread
    model = mixture(kind)
    units = unit_shapes(model, plan_units(model, experts=True), "no", experts=size)
    planned = traffic(units, STRATEGIES[strategy], MeshShape(1, 2), accumulation=accumulation, compute_bytes=None)
    assert found["reduce_scatter"] == planned.whole["reduce_scatter"]
    assert found["send"] == planned.all_gather + planned.reduce_scatter
    # Each rank has two rows of 12 tokens, each for two experts of a layer: there and back in both forwards, and once
    # the gradients. What one rank sends depends on their choices, what both send does not.
    assert tokens == 2 * accumulation * 2 * 6 * (2 * 12 * 2) * model.config.hidden_size * 4


def rounded(_: Any, kind: str) -> Any:
    """With rows of 16 bytes in bf16, for which its kernel asks."""
    return mixture(kind, **{"intermediate_size": 16} if kind == "mixtral" else {"moe_intermediate_size": 16})


def rounded_steps() -> list[Any]:
    return [
        step_of(spread, change=functools.partial(rounded, kind=spread[0]), mixed_precision="bf16") for spread in ROUNDED
    ]


def test_a_step_in_bf16_is_that_of_a_plain_loop_to_rounding() -> None:
    for spread, found in zip(ROUNDED, run_on_ranks(rounded_steps, 2)[0], strict=True):
        model = rounded(None, spread[0])
        plain = plain_step(model, windows_of(2, spread[2]), COEF, Z, spread[5] == BLOCK)
        torch.testing.assert_close(torch.tensor(found["experts"]["expert_load"]), plain.shares, rtol=0, atol=6e-5)
        assert found["loss"] == pytest.approx(plain.loss, rel=1e-3)
        assert found["experts"]["balance_loss"] == pytest.approx(plain.balance, rel=1e-3)
        assert found["gradients"].keys() == plain.gradients.keys()
        for name, gradient in plain.gradients.items():
            # A plain loop in bf16, which also sums micro-batches in it, is up to 0.019 away.
            assert float((found["gradients"][name] - gradient).norm()) < 0.03 * float(gradient.norm()), name


@pytest.mark.parametrize("num_ranks", [4, pytest.param(8, marks=pytest.mark.grid)])
def test_experts_are_spread_inside_each_replica(num_ranks: int) -> None:
    for spread, found in zip(REPLICAS, run_on_ranks(all_steps, num_ranks, REPLICAS)[0], strict=True):
        compare(spread, num_ranks, found)


def steps_on_shared_rows(spreads: list[Spread]) -> list[Any]:
    return [step_of(spread, sequence=2) for spread in spreads]


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.grid)])
def test_tokens_of_shared_rows_are_sent_as_any_others(num_ranks: int) -> None:
    sizes = [size for size in (2, 4) if num_ranks % size == 0]
    spreads = [("qwen3_moe", "zero3", 3, True, size, way) for size in sizes for way in (TURN, BLOCK)]
    for spread, found in zip(spreads, run_on_ranks(steps_on_shared_rows, num_ranks, spreads)[0], strict=True):
        compare(spread, num_ranks // 2, found)


class CutError(Exception):
    """Power is gone."""


def run(
    folder: Path,
    data: Path,
    accumulate: str,
    name: str,
    size: int,
    cut: bool = False,
    offload: bool = False,
    adapted: bool = False,
) -> list[float]:
    """Losses of five steps; cut, it dies in the fourth, two steps behind its checkpoint."""
    train_step = Trainer.train_step

    def dies(trainer: Any, window: Any) -> Any:
        if trainer.global_step == 3:
            raise CutError
        return train_step(trainer, window)

    values = recipe_values(folder / "model", data, folder / name, folder / "cache", max_steps=5)
    values["sharding"] = {"strategy": "zero3", "experts": size}
    if accumulate == BLOCK:
        values["sharding"] |= {"accumulate": BLOCK, "activation_checkpointing": 1}
        values["training"]["gradient_accumulation_steps"] = 2
    if offload:
        values["sharding"] |= {"offload": "optimizer", "offload_executor": "cpu_torch"}
    values["checkpoint"] = {"every_steps": 2}
    if adapted:
        values |= {"adapter": {"kind": "lora", "r": 2}, "export": {"merge": True}}
    meet()
    if not cut:
        return [record["loss"] for record in finetune(Recipe.from_mapping(values)).metrics]
    Trainer.train_step = dies  # type: ignore[method-assign]
    try:
        with pytest.raises(CutError):
            finetune(Recipe.from_mapping(values))
    finally:
        Trainer.train_step = train_step  # type: ignore[method-assign]
    return []


def runs(*where: Any) -> dict[str, list[float]]:
    """Whole runs without and with spread experts, and two that are cut with them and go on with and without.

    The second of them has its optimizer state offloaded where it is cut.
    """
    folder = where[0]
    found = {"gathered": run(*where, "gathered", 1), "spread": run(*where, "spread", 2)}
    found["offloaded"] = run(*where, "offloaded", 2, offload=True)
    run(*where, "same", 2, cut=True)
    run(*where, "back", 2, cut=True, offload=True)
    meet()
    if torch.distributed.get_rank() == 0:
        shutil.copytree(folder / "same", folder / "other")
        shutil.copytree(folder / "same", folder / "away")
    torch.distributed.barrier()
    found |= {"same": run(*where, "same", 2), "other": run(*where, "other", 1)}
    found["away"] = run(*where, "away", 2, offload=True)
    found["back"] = run(*where, "back", 1, offload=True)
    run(*where, "adapted-cut", 2, cut=True, adapted=True)
    return found | {
        "adapted": run(*where, "adapted", 2, adapted=True),
        "adapted-cut": run(*where, "adapted-cut", 1, adapted=True),
        "adapted-offloaded": run(*where, "adapted-offloaded", 2, offload=True, adapted=True),
    }


@pytest.mark.parametrize("accumulate", [TURN, pytest.param(BLOCK, marks=pytest.mark.grid)])
def test_a_run_goes_on_with_the_same_spread_bit_for_bit_and_without_one(
    tmp_path: Path, text_file: Path, accumulate: str
) -> None:
    texts = [json.loads(line)["text"] for line in text_file.read_text().splitlines()]
    folder = save_llama(tmp_path / "model", texts, tied=True)  # for its tokenizer
    mixture("mixtral", vocab_size=len(AutoTokenizer.from_pretrained(folder))).save_pretrained(folder)
    losses = run_on_ranks(runs, 2, tmp_path, text_file, accumulate)[0]
    assert losses["same"] == losses["spread"] == losses["offloaded"] == losses["away"]
    assert losses["spread"] == pytest.approx(losses["gathered"], rel=1e-6)
    assert losses["other"] == pytest.approx(losses["gathered"], rel=1e-6)
    assert losses["back"] == pytest.approx(losses["gathered"], rel=1e-6)
    assert losses["adapted-cut"] == pytest.approx(losses["adapted"], rel=1e-6)
    assert losses["adapted-offloaded"] == losses["adapted"]
    exported = {name: load_file(tmp_path / name / "export" / "model.safetensors") for name in losses}
    for name, weight in exported["gathered"].items():
        for same in ("same", "offloaded", "away"):
            assert torch.equal(exported[same][name], exported["spread"][name])
        for other in ("spread", "other", "back"):
            torch.testing.assert_close(exported[other][name], weight, rtol=0, atol=1e-5, msg=name)
        torch.testing.assert_close(exported["adapted-cut"][name], exported["adapted"][name], rtol=0, atol=1e-5)
        assert torch.equal(exported["adapted-offloaded"][name], exported["adapted"][name])


@pytest.mark.grid
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_model_with_any_spread(num_ranks: int) -> None:
    sizes = [size for size in (2, 4) if num_ranks % size == 0]
    grid = itertools.product(MODELS, ("zero3", "zero1"), (1, 3), (False, True), sizes)
    spreads: list[Spread] = [(*case, TURN) for case in grid if case[1] == "zero3" or case[2] == 3]
    spreads += [(kind, "zero3", 3, True, size, BLOCK) for kind in MODELS for size in sizes]
    for spread, found in zip(spreads, run_on_ranks(all_steps, num_ranks, spreads)[0], strict=True):
        compare(spread, num_ranks, found)
