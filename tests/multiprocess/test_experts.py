"""A step of a mixture of experts on ranks: that of a plain loop with the balance loss written out."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from moe import MODELS, micro_batches, mixture, plain_step
from ranks import meet, run_on_ranks
from torch.optim.lr_scheduler import LambdaLR

from toolkit.objectives.balance import build_balance
from toolkit.objectives.causal_lm import CausalLM
from toolkit.recipe.schema import ObjectiveSection, TrainingSection
from toolkit.sharding import Checkpointing, plan_units, sharding_kwargs
from toolkit.sharding.apply import prepare_blocks
from toolkit.sharding.by_block import ByBlock
from toolkit.sharding.plugin import reset_accelerate
from toolkit.sharding.shards import whole_tensor
from toolkit.training.trainer import Trainer

COEF, Z = 0.3, 0.05
Case = tuple[str, str, int, bool, str]
"""Model, strategy, micro-batches a step, whether blocks are checkpointed, how they accumulate."""

SMALL: list[Case] = [
    ("mixtral", "zero3", 3, True, "by_block"),
    ("mixtral", "zero3", 3, False, "by_micro_batch"),
    ("qwen3_moe", "ddp", 3, True, "by_micro_batch"),
    ("deepseek_v3", "zero3", 1, True, "by_micro_batch"),
    ("gpt_oss", "zero2", 3, True, "by_micro_batch"),
    ("olmoe", "zero3", 1, False, "by_micro_batch"),
    ("granitemoe", "zero1", 3, False, "by_micro_batch"),
]
WHOLE: list[Case] = [
    *itertools.product(MODELS, ("zero3", "ddp"), (1, 3), (False, True), ("by_micro_batch",)),
    *((kind, "zero3", 3, True, "by_block") for kind in MODELS),
]


def windows_of(num_ranks: int, accumulation: int) -> list[list[dict[str, torch.Tensor]]]:
    """The micro-batches of each rank, dealt in turn."""
    rows = micro_batches(num_ranks * accumulation)
    return [rows[rank::num_ranks] for rank in range(num_ranks)]


def sharded_step(case: Case) -> Any:
    """One step of the trainer on this rank's micro-batches: its figures and all gradients."""
    kind, strategy, accumulation, checkpointed, accumulate = case
    reset_accelerate()
    checkpointing = Checkpointing(1) if checkpointed else None
    model = mixture(kind)
    sharded = strategy != "ddp"
    plugins = sharding_kwargs(strategy, checkpointing=checkpointing if sharded else None)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation, **plugins)
    balance = build_balance(ObjectiveSection(router_aux_coef=COEF, router_z_coef=Z), model)
    plan = plan_units(model)
    if not sharded:
        prepare_blocks(model, plan, checkpointing, None)
    objective = CausalLM(model, packed=False)
    found: dict[str, torch.Tensor] = {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    prepared, prepared_optimizer = accelerator.prepare(model, optimizer)
    inner = accelerator.unwrap_model(prepared)

    def look(*_: Any) -> None:
        for name, parameter in inner.named_parameters():
            if parameter.grad is not None:
                found[name] = whole_tensor(parameter.grad).clone()

    prepared_optimizer.optimizer.register_step_pre_hook(look)
    schedule = LambdaLR(optimizer, lambda step: 1.0)
    settings = TrainingSection(output_dir="unused", max_steps=1, max_grad_norm=None)
    nothing: Any = type("Told", (), {"warn": staticmethod(print)})()
    by_block = ByBlock(inner, plugins["fsdp_plugin"].unit_plan) if accumulate == "by_block" else None
    trainer = Trainer(
        accelerator,
        prepared,
        prepared_optimizer,
        schedule,
        objective,
        settings,
        nothing,
        nothing,
        by_block=by_block,
        balance=balance,
    )
    step = trainer.train_step(windows_of(accelerator.num_processes, accumulation)[accelerator.process_index])
    return {"loss": step.loss, "norm": step.grad_norm, "experts": step.experts, "gradients": found}


def steps_of(cases: list[Case]) -> list[Any]:
    found = []
    for case in cases:
        meet()
        found.append(sharded_step(case))
    return found


def compare(case: Case, num_ranks: int, found: dict[str, Any]) -> None:
    kind, _, accumulation, _, accumulate = case
    plain = plain_step(mixture(kind), windows_of(num_ranks, accumulation), COEF, Z, accumulate == "by_block")
    assert found["loss"] == pytest.approx(plain.loss, rel=1e-6)
    assert found["experts"]["balance_loss"] == pytest.approx(plain.balance, rel=1e-6)
    torch.testing.assert_close(torch.tensor(found["experts"]["expert_load"]), plain.shares, rtol=0, atol=6e-5)
    norm = torch.stack([gradient.square().sum() for gradient in plain.gradients.values()]).sum().sqrt()
    assert found["norm"] == pytest.approx(float(norm), rel=1e-6)
    assert found["gradients"].keys() >= plain.gradients.keys()
    for name, gradient in plain.gradients.items():
        largest = float(gradient.abs().max())
        torch.testing.assert_close(found["gradients"][name], gradient, rtol=0, atol=1e-6 * max(1.0, largest), msg=name)


def test_a_step_is_that_of_a_plain_loop_with_the_balance_loss_written_out() -> None:
    for case, found in zip(SMALL, run_on_ranks(steps_of, 2, SMALL)[0], strict=True):
        compare(case, 2, found)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_model_on_any_ranks_with_any_accumulation(num_ranks: int) -> None:
    for case, found in zip(WHOLE, run_on_ranks(steps_of, num_ranks, WHOLE, seconds=900)[0], strict=True):
        compare(case, num_ranks, found)
