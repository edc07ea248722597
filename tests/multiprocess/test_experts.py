"""Mixtures of experts on ranks: a step is that of a plain loop with the balance loss written out, spread or not.

And runs go on from their checkpoints, with any spread.
"""

from __future__ import annotations

import functools
import itertools
import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import peft
import pytest
import torch
from safetensors.torch import load_file
from support.cuts import cut_in_step
from support.moe import MODELS, by_batched_mm, mixture, two_experts_alone
from support.moe_steps import Case, require_plain, sharded_step, steps_of
from support.ranks import meet, run_on_ranks
from support.runs import finetuned
from support.tiny import recipe_values, save_llama
from support.traffic import Traffic
from torch import nn
from transformers import AutoTokenizer

from toolkit.model.adapters.adapters import add_adapter
from toolkit.planning.traffic import traffic
from toolkit.planning.workload.unit_shapes import unit_shapes
from toolkit.recipe.schema import AdapterSection
from toolkit.run.parts import experts as expert_loads
from toolkit.sharding import plan_units
from toolkit.sharding.parallel import expert_parallel
from toolkit.sharding.plan.strategy import STRATEGIES, MeshShape


def first_block_dense(_: Any) -> Any:
    return mixture("qwen3_moe", mlp_only_layers=[0])


FIRST = Case("qwen3_moe", accumulation=3, checkpointed=True, experts=2)
"""The step whose bytes are counted."""
IDLE = Case("gpt_oss", checkpointed=True, experts=2, change=two_experts_alone)
"""Its second rank's experts are chosen for no token."""

CASES = [
    Case("mixtral", accumulation=3, checkpointed=True, by_block=True),
    Case("qwen3_moe", "ddp", 3, checkpointed=True),
    Case("deepseek_v3", checkpointed=True),
    Case("gpt_oss", "zero2", 3, checkpointed=True),
    Case("olmoe"),
    Case("granitemoe", "zero1", 3),
    Case("mixtral", coef=0.0),
    # Bugs that other tools had, by number. Experts are averaged over the tokens of all ranks (DeepSpeed 8469) and not
    # doubled where two ranks hold them (PyTorch 160285); the balance loss reaches the router (Automodel 1408), with
    # checkpoints too (torchtitan 4772). One factor clips experts and the rest (Automodel 3816), what the optimizer sees
    # is clipped (TRL 5713), and the norm counts every expert once, spread or not (DeepSpeed 8475, Megatron 5916).
    Case("gpt_oss", max_norm=0.05),
    Case("mixtral", max_norm=0.05, experts=2),
    # Each score weights its own expert on every rank, and routers get the plain gradient: transformers 45473 and 48687.
    Case("olmoe", experts=2, change=by_batched_mm),
    Case("deepseek_v3", "zero2", experts=2),
    Case("olmoe", accumulation=3, checkpointed=True, by_block=True, experts=2),
    IDLE,
    Case("qwen3_moe", checkpointed=True, experts=2, change=first_block_dense),
    # Rows that both ranks share.
    *(Case("qwen3_moe", "zero3", 3, True, by_block, 2, sequence=2) for by_block in (False, True)),
    # In bf16, whose kernel of experts asks for rows of 16 bytes.
    Case("qwen3_moe", "zero3", 3, True, experts=2, precision="bf16", fields=(("moe_intermediate_size", 16),)),
    Case("mixtral", "zero2", 3, True, True, 2, precision="bf16", fields=(("intermediate_size", 16),)),
]
PLAIN = [Case("mixtral", accumulation=3), Case("olmoe", experts=2)]
"""Of the first tier."""

REPLICAS = [
    Case("mixtral", "hybrid", 3, experts=2),
    Case("qwen3_moe", "hybrid", 3, True, True, 2),
    Case("olmoe", "zero3", 3, experts=2),
]
"""Two of them; in the first each expert is on one rank of a replica of two. In the last its shards are on two ranks."""

Adapted = tuple[Case, bool]
"""With whether the experts have adapters, too, or attention alone."""

ADAPTED: list[Adapted] = [
    (Case("mixtral", checkpointed=True, experts=2), False),
    (Case("qwen3_moe", "zero3", 3, True, True, 2), True),
    (Case("gpt_oss", "zero2", experts=2, fields=(("num_local_experts", 2),)), True),  # one for each rank
]
ON_FOUR: list[Adapted] = [
    (Case("gpt_oss", checkpointed=True, experts=4), True),
    (Case("qwen3_moe", "hybrid", 3, True, experts=2), True),
]


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
    return [sharded_step(replace(case, change=functools.partial(adapted, whole=whole))) for case, whole in cases]


def require_pefts(cases: list[Adapted], found: list[Any], num_ranks: int) -> None:
    """Holds steps of adapters against those of peft's own in a plain loop."""
    for (case, whole), step in zip(cases, found, strict=True):
        model, gradients = adapted_by_hand(case.model(), whole), step["gradients"]
        stacked = [name for name in gradients if name.endswith(".stacked")]
        assert bool(stacked) is whole
        for name in stacked:
            experts = torch.stack(gradients.pop(name).chunk(num_experts(model)))
            gradients[name.replace(".stacked", ".weight")] = experts.permute(1, 2, 0).flatten(1)
        require_plain(case, step, num_ranks, model)


def steps_on_two_ranks() -> tuple[list[Any], list[Any], dict[str, int]]:
    """Steps in full and of adapters, and the bytes that this rank hands to the first one's collectives."""
    tokens, exchange = [], expert_parallel.all_to_all

    def counted(rows: torch.Tensor, *args: Any) -> torch.Tensor:
        tokens.append(rows.nbytes)
        return exchange(rows, *args)

    with Traffic() as found, patch.object(expert_parallel, "all_to_all", counted):
        first = sharded_step(FIRST)
    return [first, *steps_of(CASES)], adapted_steps(ADAPTED), {**found.bytes, "tokens": sum(tokens)}


def test_a_step_is_that_of_a_plain_loop_with_the_balance_loss_written_out() -> None:
    (steps, adapters, sent), (_, _, other) = run_on_ranks(steps_on_two_ranks, 2)
    for case, found in zip([FIRST, *CASES], steps, strict=True):
        require_plain(case, found, 2)
        if case is IDLE:
            assert found["experts"]["dead_experts"] == 4  # of two layers
    require_pefts(ADAPTED, adapters, 2)
    require_planned(FIRST, sent, sent["tokens"] + other["tokens"])


@pytest.mark.first
def test_a_step_is_the_plain_one_with_accumulation_and_with_spread_experts() -> None:
    for case, found in zip(PLAIN, run_on_ranks(steps_of, 2, PLAIN)[0], strict=True):
        require_plain(case, found, 2)


def require_planned(case: Case, found: dict[str, int], tokens: int) -> None:
    """Holds the bytes of a checkpointed step on two ranks against the plan and a formula."""
    model = case.model()
    units = unit_shapes(model, plan_units(model, experts=True), "no", experts=case.experts)
    planned = traffic(
        units, STRATEGIES[case.strategy], MeshShape(1, 2), accumulation=case.accumulation, compute_bytes=None
    )
    assert found["reduce_scatter"] == planned.whole["reduce_scatter"]
    assert found["send"] == planned.all_gather + planned.reduce_scatter
    # Each rank has two rows of 12 tokens, each for two experts of a layer: there and back in both forwards, and once
    # the gradients. What one rank sends depends on their choices, what both send does not.
    assert tokens == 2 * case.accumulation * 2 * 6 * (2 * 12 * 2) * model.config.hidden_size * 4


@pytest.mark.parametrize("num_ranks", [4, pytest.param(8, marks=pytest.mark.grid)])
def test_experts_are_spread_inside_each_replica(num_ranks: int) -> None:
    for case, found in zip(REPLICAS, run_on_ranks(steps_of, num_ranks, REPLICAS)[0], strict=True):
        require_plain(case, found, num_ranks)


@pytest.mark.grid
def test_adapters_of_spread_experts_on_four_ranks() -> None:
    require_pefts(ON_FOUR, run_on_ranks(adapted_steps, 4, ON_FOUR)[0], 4)


@pytest.mark.grid
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_model_on_any_ranks_with_any_accumulation_and_spread(num_ranks: int) -> None:
    grid = itertools.product(MODELS, ("zero3", "ddp"), (1, 3), (False, True))
    cases = [*itertools.starmap(Case, grid), *(Case(kind, "zero3", 3, True, True) for kind in MODELS)]
    for size in [size for size in (2, 4) if num_ranks % size == 0]:
        spread = itertools.product(MODELS, ("zero3", "zero1"), (1, 3), (False, True), (False,), (size,))
        cases += [
            case for case in itertools.starmap(Case, spread) if case.strategy == "zero3" or case.accumulation == 3
        ]
        cases += [Case(kind, "zero3", 3, True, True, size) for kind in MODELS]
        cases += [Case("qwen3_moe", "zero3", 3, True, by_block, size, sequence=2) for by_block in (False, True)]
    for case, found in zip(cases, run_on_ranks(steps_of, num_ranks, cases)[0], strict=True):
        require_plain(case, found, num_ranks)


def metrics_of(values: dict[str, Any], cut: bool = False) -> list[dict[str, Any]]:
    """Of a run, or of one that dies in its fourth step, two steps after its checkpoint."""
    with cut_in_step(4) if cut else nullcontext():
        return finetuned(values).metrics
    return []


def run(
    folder: Path,
    data: Path,
    by_block: bool,
    name: str,
    size: int,
    cut: bool = False,
    offload: bool = False,
    adapted: bool = False,
) -> list[float]:
    """Losses of five steps."""
    values = recipe_values(folder / "model", data, folder / name, folder / "cache", max_steps=5)
    values["sharding"] = {"strategy": "zero3", "experts": size}
    if by_block:
        values["sharding"] |= {"accumulate": "by_block", "activation_checkpointing": 1}
        values["training"]["gradient_accumulation_steps"] = 2
    if offload:
        values["sharding"] |= {"offload": "optimizer", "offload_executor": "cpu_torch"}
    values["checkpoint"] = {"every_steps": 2}
    if adapted:
        values |= {"adapter": {"kind": "lora", "r": 2}, "export": {"merge": True}}
    return [record["loss"] for record in metrics_of(values, cut)]


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


def save_mixture(folder: Path, kind: str, text_file: Path) -> None:
    texts = [json.loads(line)["text"] for line in text_file.read_text().splitlines()]
    save_llama(folder, texts, tied=True)  # for its tokenizer
    mixture(kind, vocab_size=len(AutoTokenizer.from_pretrained(folder))).save_pretrained(folder)


@pytest.mark.parametrize("by_block", [False, pytest.param(True, marks=pytest.mark.grid)])
def test_a_run_goes_on_with_the_same_spread_bit_for_bit_and_without_one(
    tmp_path: Path, text_file: Path, by_block: bool
) -> None:
    save_mixture(tmp_path / "model", "mixtral", text_file)
    losses = run_on_ranks(runs, 2, tmp_path, text_file, by_block)[0]
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


def runs_under_muon(folder: Path, data: Path) -> dict[str, Any]:
    """A whole run, and one cut in step 4 that goes on from the checkpoint of step 2: losses, then loads of experts."""
    expert_loads.LOAD_EVERY, found = 5, {}
    for name in ("whole", "cut"):
        values = recipe_values(folder / "model", data, folder / name, folder / "cache", max_steps=5)
        values["optimizer"] |= {"kind": "muon", "learning_rates": {"*.mlp.gate.weight": 1e-3}}
        values["checkpoint"] = {"every_steps": 2} if name == "cut" else {}
        if name == "cut":
            metrics_of(values, cut=True)
        metrics = metrics_of(values)
        found[name] = [record["loss"] for record in metrics]
        found[name] += [record["expert_load"] for record in metrics if "expert_load" in record]
    return found


def test_a_run_under_muon_goes_on_bit_for_bit(tmp_path: Path, text_file: Path) -> None:
    save_mixture(tmp_path / "model", "deepseek_v3", text_file)
    losses = run_on_ranks(runs_under_muon, 2, tmp_path, text_file)[0]
    assert losses["cut"] == losses["whole"]
    whole, cut = (load_file(tmp_path / name / "export" / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
