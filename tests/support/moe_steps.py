"""One step of the trainer on a tiny mixture of experts, and that of a plain loop to compare it with."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from support.backend import accelerated
from support.moe import Step, micro_batches, mixture, plain_step
from toolkit.data.samples.sequence_parts import Part
from toolkit.model.attention.attention import attend_by_heads
from toolkit.objectives.causal_lm import CausalLM
from toolkit.objectives.losses.balance import build_balance
from toolkit.recipe.objectives.objective_section import ObjectiveSection
from toolkit.recipe.schema import TrainingSection
from toolkit.run.parts.experts import ExpertLoads
from toolkit.sharding import Checkpointing, plan_units
from toolkit.sharding.apply import prepare_blocks
from toolkit.sharding.blocks.by_block import ByBlock
from toolkit.sharding.fsdp2.shards import whole_tensor
from toolkit.sharding.parallel.sequence_parallel import form_groups
from toolkit.training.trainer import Trainer


def unchanged(model: Any) -> Any:
    return model


@dataclass(frozen=True)
class Case:
    """A step of a mixture.

    Attributes:
        kind: its type in transformers.
        accumulation: micro-batches of the step.
        checkpointed: whether its blocks are.
        experts: ranks of a group that spreads its experts.
        coef: of the balance loss.
        sequence: ranks that share a row.
        fields: of its configuration, by name.
        change: what is done to the model before it is sharded, and to that of the plain loop.
    """

    kind: str
    strategy: str = "zero3"
    accumulation: int = 1
    checkpointed: bool = False
    by_block: bool = False
    experts: int = 1
    coef: float = 0.3
    max_norm: float | None = None
    sequence: int = 1
    precision: str = "no"
    fields: tuple[tuple[str, Any], ...] = ()
    change: Callable[[Any], Any] = unchanged

    def model(self) -> Any:
        return self.change(mixture(self.kind, **dict(self.fields)))

    def plain(self, num_ranks: int, model: Any = None) -> Step:
        """The step of a plain loop on the rows of so many ranks."""
        windows = windows_of(num_ranks // self.sequence, self.accumulation)
        return plain_step(model or self.model(), windows, self.coef, whole=self.by_block)


def windows_of(num_ranks: int, accumulation: int) -> list[list[dict[str, torch.Tensor]]]:
    """The micro-batches of each rank, dealt in turn."""
    rows = micro_batches(num_ranks * accumulation)
    return [rows[rank::num_ranks] for rank in range(num_ranks)]


def steps_of(cases: Sequence[Case]) -> list[Any]:
    """For `run_on_ranks`."""
    return [sharded_step(case) for case in cases]


def sharded_step(case: Case) -> Any:
    """One step of the trainer on this rank's micro-batches: figures and gradients, as the optimizer sees them."""
    os.environ["PARALLELISM_CONFIG_DP_SHARD_SIZE"] = "2" if case.strategy == "hybrid" else "1"
    checkpointing = Checkpointing(1) if case.checkpointed else None
    model = case.model()
    sharded = case.strategy != "ddp"
    settings: dict[str, Any] = {"checkpointing": checkpointing if sharded else None, "experts": case.experts}
    settings |= {"replicate_size": 2} if case.strategy == "hybrid" else {}
    accelerator = accelerated(case.strategy, case.accumulation, case.precision, **settings)
    form_groups(case.sequence)
    if case.sequence > 1:
        attend_by_heads(model)
    balance = build_balance(ObjectiveSection(router_aux_coef=case.coef), model)
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
    nothing: Any = type("Told", (), {"warn": staticmethod(print)})()
    trainer = Trainer(
        accelerator,
        prepared,
        prepared_optimizer,
        LambdaLR(optimizer, lambda step: 1.0),
        objective,
        TrainingSection(output_dir="unused", max_steps=1, max_grad_norm=case.max_norm),
        nothing,
        by_block=ByBlock(inner, accelerator.state.fsdp_plugin.unit_plan) if case.by_block else None,
        balance=balance,
        extensions=[ExpertLoads(balance, nothing)],
    )
    group, part = divmod(accelerator.process_index, case.sequence)
    window = windows_of(accelerator.num_processes // case.sequence, case.accumulation)[group]
    step = trainer.train_step([Part(part, case.sequence).of(batch) for batch in window])
    return {"loss": step.loss, "norm": step.grad_norm, "experts": step.metrics, "gradients": found}


def require_plain(case: Case, found: dict[str, Any], num_ranks: int, model: Any = None) -> None:
    """Holds what `sharded_step` returned against the plain loop's step, within 1e-6 in float32.

    Args:
        model: the plain loop's, if it is not the case's.
    """
    plain, exact = case.plain(num_ranks, model), 1e-6 if case.precision == "no" else 1e-3
    assert found["loss"] == pytest.approx(plain.loss, rel=exact), case
    if case.coef:
        assert found["experts"]["balance_loss"] == pytest.approx(plain.balance, rel=exact), case
        torch.testing.assert_close(torch.tensor(found["experts"]["expert_load"]), plain.shares, rtol=0, atol=6e-5)
    assert found["gradients"].keys() == plain.gradients.keys(), case
    norm = float(torch.stack([gradient.square().sum() for gradient in plain.gradients.values()]).sum().sqrt())
    factor = 1.0 if case.max_norm is None else min(1.0, case.max_norm / (norm + 1e-6))
    if case.precision == "no":
        assert found["norm"] == pytest.approx(norm, rel=1e-6), case  # as it was before it was clipped
    for name, gradient in plain.gradients.items():
        ours, theirs = found["gradients"][name], factor * gradient
        if case.precision == "no":
            allowed = 1e-6 * max(1.0, float(gradient.abs().max()))
            torch.testing.assert_close(ours, theirs, rtol=0, atol=allowed, msg=f"{case}: {name}")
        else:
            # A plain loop in bf16, which also sums micro-batches in it, is up to 0.019 away.
            assert float((ours - theirs).norm()) < 0.03 * float(theirs.norm()), (case, name)
