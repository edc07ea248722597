"""The planner's traffic is what collectives carry in real runs, byte for byte."""

from __future__ import annotations

import os
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from support.backend import accelerated
from support.ranks import run_on_ranks
from support.tiny import llama
from support.traffic import Traffic
from torch import nn

from toolkit.planning.memory.probe import Prober
from toolkit.planning.traffic import traffic
from toolkit.planning.workload.unit_shapes import unit_shapes
from toolkit.planning.workload.workload import Workload
from toolkit.sharding import plan_units
from toolkit.sharding.plan.strategy import STRATEGIES, MeshShape, Strategy, mesh_shape, with_reshard_after_forward

CASES = [(strategy, 1, True, "all", "no") for strategy in STRATEGIES]
CASES += [(strategy, 3, False, "all", "no") for strategy in STRATEGIES]
CASES += [(strategy, 3, strategy == "zero2", "lora", "no") for strategy in STRATEGIES]
CASES += [("zero3", 1, True, "last", "no"), ("zero3", 3, False, "last", "bf16"), ("zero3", 1, False, "norm", "no")]
CASES += [("zero3 in nodes", 3, False, "all", "bf16"), ("zero3 in nodes", 1, True, "lora", "no")]
"""(strategy, accumulation, tied, what is trained, precision). In nodes: backward gathers in groups of 2."""


def make_model(tied: bool, trained: str) -> nn.Module:
    """Odd sizes: on 4 ranks, rows are padded and the LoRA matrices' shards of 2 rows are partly empty."""
    sizes = {"vocab_size": 510, "hidden_size": 56, "intermediate_size": 98, "num_hidden_layers": 3}
    model: Any = llama(**sizes, tie_word_embeddings=tied)
    if trained == "lora":
        targets = ["q_proj", "down_proj"]
        return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=targets))
    kept = {"all": "", "last": "model.layers.2", "norm": "model.norm"}[trained]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(kept in name)
    return model  # type: ignore[no-any-return]


def mesh_of(strategy: str, num_ranks: int) -> MeshShape:
    node = 2 if strategy.endswith("in nodes") else None
    shape = mesh_shape(kind_of(strategy), num_ranks, replicate=None, shard=2 if strategy == "hybrid" else None)
    return with_reshard_after_forward(shape, kind_of(strategy), node, num_ranks)


def kind_of(strategy: str) -> Strategy:
    return STRATEGIES[strategy.partition(" ")[0]]


def measure(strategy: str, accumulation: int, tied: bool, trained: str, precision: str, tensor: int = 1) -> Any:
    """Bytes and calls of the second optimizer step; bytes of sends, and of torch's own collectives."""
    node = 2 if strategy.endswith("in nodes") else None
    accelerator = accelerated(
        strategy.partition(" ")[0], accumulation, precision, reshard_after_forward=node, tensor=tensor
    )
    model = make_model(tied, trained)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    ids = torch.arange(32).view(2, 16)
    for _ in range(2):
        with Traffic() as found:
            for _ in range(accumulation):
                with accelerator.accumulate(model):
                    logits = model(input_ids=ids, use_cache=False).logits
                    accelerator.backward(F.cross_entropy(logits.flatten(0, 1), ids.flatten()))
                    optimizer.step()
                    optimizer.zero_grad()
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    return {kind: (found.bytes[kind], found.calls[kind]) for kind in kinds}, found.bytes["send"], found.by_torch


class Logits:
    """The loss of `measure`, for a plan."""

    teacher = None

    def __init__(self, *_: Any) -> None: ...

    def loss_sum(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), batch["input_ids"].flatten())


def batch_of_tokens(size: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.zeros(size, 16, dtype=torch.long)}


def measure_all() -> dict[Any, Any]:
    return {case: measure(*case) for case in possible(int(os.environ["WORLD_SIZE"]))}


def possible(num_ranks: int) -> list[Any]:
    """All cases on 4 ranks; on 2, those of several micro-batches that need no more."""
    return [case for case in CASES if num_ranks >= 4 or (case[0] in STRATEGIES and case[0] != "hybrid" and case[1] > 1)]


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.grid)])
def test_planned_bytes_and_calls_are_those_of_real_collectives(num_ranks: int) -> None:
    measured = run_on_ranks(measure_all, num_ranks)
    for case in possible(num_ranks):
        strategy, accumulation, tied, trained, precision = case
        model = make_model(tied, trained)
        mesh = mesh_of(strategy, num_ranks)
        planned = traffic(
            unit_shapes(model, plan_units(model), precision),
            kind_of(strategy),
            mesh,
            accumulation=accumulation,
            compute_bytes={"no": None, "bf16": 2}[precision],
        )
        expected = {kind: (planned.whole[kind], planned.calls[kind]) for kind in planned.whole}
        if kind_of(strategy).sharded:
            # Once a step the hosts tell each other which parameters were used (unused.py): no traffic of devices.
            trained_parameters = sum(p.requires_grad for p in model.parameters())
            sent_bytes, calls = expected["all_reduce"]
            expected["all_reduce"] = sent_bytes + 8 * (2 + trained_parameters), calls + 1
        for rank in measured:
            found, sent, _ = rank[case]
            assert found == expected, (case, num_ranks)
            assert sent == planned.all_gather + planned.reduce_scatter, (case, num_ranks)


CUT = [("zero3", 1, True, "all", "no"), ("zero3", 3, False, "all", "bf16"), ("zero3", 3, False, "lora", "no")]
"""Cases with tensor groups of two ranks."""


def measure_cut() -> dict[Any, Any]:
    return {case: measure(*case, 2) for case in CUT}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_planned_bytes_of_tensor_groups_are_those_of_real_collectives(num_ranks: int) -> None:
    """Weights and gradients of the parts; hidden states, and the sums of partial gradients."""
    measured = run_on_ranks(measure_cut, num_ranks)
    for case in CUT:
        strategy, accumulation, tied, trained, precision = case
        work = Workload(make_model(tied, trained), Logits, batch_of_tokens, precision, 16, tensor=2)
        probe = Prober(work).probe(2, None)
        exchanged = accumulation * probe.exchanged
        planned = traffic(
            unit_shapes(work.model_copy(), plan_units(work.model), precision),
            kind_of(strategy),
            MeshShape(1, num_ranks // 2, tensor=2),
            accumulation=accumulation,
            compute_bytes={"no": None, "bf16": 2}[precision],
        )
        trained_parameters = sum(p.requires_grad for p in work.model.parameters())
        for rank in measured:
            found, sent, by_torch = rank[case]
            whole = {kind: found[kind][0] - by_torch[kind] for kind in ("all_gather", "reduce_scatter")}
            assert whole == {kind: planned.whole[kind] for kind in whole}, (case, num_ranks)
            assert sent == planned.all_gather + planned.reduce_scatter, (case, num_ranks)
            # The rest is inside groups of two, of which each sends half of a gather and all of a sum; but for the
            # hosts' count of parameters that were used.
            inside = by_torch["all_gather"] // 2 + by_torch["reduce_scatter"] // 2 + by_torch["all_reduce"]
            assert planned.partial > 0
            assert inside - 8 * (2 + trained_parameters) == exchanged + planned.partial, (case, num_ranks)
