"""One step of the trainer on a tiny mixture of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.optim.lr_scheduler import LambdaLR

from support.moe import Step, micro_batches, mixture
from toolkit.data.samples.sequence_parts import Part
from toolkit.model.attention.attention_by_heads import attend_by_heads
from toolkit.objectives.causal_lm import CausalLM
from toolkit.objectives.losses.balance import build_balance
from toolkit.recipe.objectives.objective_section import ObjectiveSection
from toolkit.recipe.schema import TrainingSection
from toolkit.sharding import Checkpointing, plan_units, sharding_kwargs
from toolkit.sharding.apply import prepare_blocks
from toolkit.sharding.blocks.by_block import ByBlock
from toolkit.sharding.fsdp2.shards import whole_tensor
from toolkit.sharding.parallel.sequence_parallel import form_groups
from toolkit.sharding.plugin import reset_accelerate
from toolkit.training.extensions.expert_loads import ExpertLoads
from toolkit.training.trainer import Trainer

Case = tuple[str, str, int, bool, str]
"""Model, strategy, micro-batches a step, whether blocks are checkpointed, how they accumulate."""


def windows_of(num_ranks: int, accumulation: int) -> list[list[dict[str, torch.Tensor]]]:
    """The micro-batches of each rank, dealt in turn."""
    rows = micro_batches(num_ranks * accumulation)
    return [rows[rank::num_ranks] for rank in range(num_ranks)]


def sharded_step(
    case: Case,
    coef: float,
    z: float,
    max_norm: float | None = None,
    experts: int = 1,
    change: Callable[[Any], Any] = lambda model: model,
    sequence: int = 1,
    chunk_tokens: int | None = None,
    mixed_precision: str = "no",
) -> Any:
    """One step of the trainer on this rank's micro-batches: figures and gradients, as the optimizer sees them.

    Args:
        experts: ranks of a group that spreads its experts.
        change: what is done to the model before it is sharded.
        sequence: ranks that share a row.
        chunk_tokens: of norms and MLPs of checkpointed blocks.
    """
    kind, strategy, accumulation, checkpointed, accumulate = case
    reset_accelerate()
    checkpointing = Checkpointing(1, chunk_tokens=chunk_tokens) if checkpointed else None
    model = change(mixture(kind))
    form_groups(sequence)
    if sequence > 1:
        attend_by_heads(model)
    sharded = strategy != "ddp"
    plugins = sharding_kwargs(
        strategy,
        replicate_size=2 if strategy == "hybrid" else None,
        checkpointing=checkpointing if sharded else None,
        experts=experts,
    )
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=accumulation, mixed_precision=mixed_precision, **plugins
    )
    balance = build_balance(ObjectiveSection(router_aux_coef=coef, router_z_coef=z), model)
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
    settings = TrainingSection(output_dir="unused", max_steps=1, max_grad_norm=max_norm)
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
        by_block=by_block,
        balance=balance,
        extensions=[ExpertLoads(balance, nothing)],
    )
    group, part = divmod(accelerator.process_index, sequence)
    window = windows_of(accelerator.num_processes // sequence, accumulation)[group]
    step = trainer.train_step([Part(part, sequence).of(batch) for batch in window])
    return {"loss": step.loss, "norm": step.grad_norm, "experts": step.metrics, "gradients": found}


def compare_step(found: dict[str, Any], plain: Step) -> None:
    """Holds what `sharded_step` returned against the plain loop's step, within 1e-6."""
    assert found["loss"] == pytest.approx(plain.loss, rel=1e-6)
    assert found["experts"]["balance_loss"] == pytest.approx(plain.balance, rel=1e-6)
    torch.testing.assert_close(torch.tensor(found["experts"]["expert_load"]), plain.shares, rtol=0, atol=6e-5)
    norm = torch.stack([gradient.square().sum() for gradient in plain.gradients.values()]).sum().sqrt()
    assert found["norm"] == pytest.approx(float(norm), rel=1e-6)
    assert found["gradients"].keys() == plain.gradients.keys()
    for name, gradient in plain.gradients.items():
        largest = float(gradient.abs().max())
        torch.testing.assert_close(found["gradients"][name], gradient, rtol=0, atol=1e-6 * max(1.0, largest), msg=name)
