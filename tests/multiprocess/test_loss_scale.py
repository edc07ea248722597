"""fp16 and an overflow on one rank alone: all ranks skip that step, with one loss scale, as a plain loop does.

The CPU has fp16's arithmetic; its scaler is given to `Accelerator` by hand, which makes none on CPU ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.backend import accelerated
from support.moe import mixture
from support.offload_loops import VOCABULARY, Case, learning_rate, loss_of, make_model, make_optimizer
from support.ranks import run_on_ranks
from torch import nn

from toolkit.sharding.fsdp2.shards import local_tensor, whole_tensor
from toolkit.sharding.loss_scale import share_overflows

STEPS, RANKS, MAX_NORM = 5, 4, 0.8
OVERFLOW, WHERE = 2, 1
"""The step whose numbers are not finite, on this rank."""
SCALE = 2.0**10
TOLERANCE = 1e-4
GROWS = 2
"""Steps without an overflow after which the scale is doubled."""


@dataclass(frozen=True)
class Run:
    """Attributes:
    infinite: what is: this rank's `loss`, before any reduction, or its `reduced` gradient.
    clipped: without it, the scaler looks for infinities when the optimizer steps.
    optimizer: a fused AdamW skips a step itself, SGD is not called.
    experts: ranks of a group that spreads them; of a mixture, in which an expert's gradient is infinite.
    """

    strategy: str
    infinite: str = "loss"
    clipped: bool = True
    optimizer: str = "sgd"
    experts: int = 1

    @property
    def case(self) -> Case:
        return Case(tied=False, precision="fp16", max_norm=MAX_NORM, optimizer=self.optimizer)


RUNS = [
    Run("hybrid"),
    Run("hybrid", optimizer="adamw"),
    Run("hybrid", "reduced"),
    Run("hybrid", "reduced", optimizer="adamw"),
    Run("hybrid", "reduced", clipped=False),
    Run("hybrid", "reduced", clipped=False, optimizer="adamw"),
    Run("zero1"),
    Run("zero2"),
    Run("zero3"),
    Run("zero3", "reduced"),
    Run("zero3", "reduced", experts=2),
    Run("ddp"),
    Run("ddp", "reduced"),
]


@dataclass
class Found:
    losses: list[float]
    norms: list[float]
    scales: list[float]
    weights: list[dict[str, torch.Tensor]]


def scaler() -> Any:
    return torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=GROWS)


def prepared(run: Run) -> tuple[Any, Any, Any]:
    accelerator = accelerated(run.strategy, experts=run.experts)
    accelerator.scaler, accelerator.native_amp = scaler(), True
    accelerator.state._mixed_precision = "fp16"
    if run.strategy == "ddp":
        share_overflows(accelerator.scaler)  # as toolkit/run/stages/accelerator.py does
    model = model_of(run)
    return accelerator, *accelerator.prepare(model, make_optimizer(model, run.case))


def model_of(run: Run) -> Any:
    if run.experts == 1:
        return make_model(run.case)
    model = mixture("mixtral", vocab_size=VOCABULARY)
    model.set_experts_implementation("eager")  # torch multiplies groups in bf16 and float32 alone
    return model


def spoil(run: Run, model: nn.Module) -> None:
    """An expert's gradient is on one rank of a group alone."""
    chosen = [p for name, p in model.named_parameters() if run.experts == 1 or name.endswith("experts.down_proj")]
    gradient = next(p.grad for p in chosen if p.grad is not None and local_tensor(p.grad).numel())
    local_tensor(gradient).view(-1)[0] = math.inf


def on_ranks(run: Run) -> Found:
    accelerator, model, optimizer = prepared(run)
    found = Found([], [], [], [])
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(run.case, step)
        is_here = step == OVERFLOW and dist.get_rank() == WHERE
        with torch.autocast("cpu", torch.float16, enabled=run.strategy == "ddp"):
            loss = loss_of(model, run.case, step, 0)
        accelerator.backward(loss * math.inf if is_here and run.infinite == "loss" else loss)
        if is_here and run.infinite == "reduced":
            spoil(run, model)
        if run.clipped:
            found.norms.append(whole_tensor(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)).item())
        optimizer.step()
        optimizer.zero_grad()
        found.losses.append(loss.item())
        found.scales.append(accelerator.scaler.get_scale())
        named = ((name.removeprefix("module."), parameter) for name, parameter in model.named_parameters())
        found.weights.append({name: whole_tensor(parameter).detach().clone() for name, parameter in named})
    accelerator.end_training()
    return found


def all_runs() -> list[Found]:
    return [on_ranks(run) for run in RUNS]


def plain(run: Run) -> Found:
    """All ranks' rows in one process, in float16 with weights in float32, and the scaler written out."""
    model, compute = model_of(run), model_of(run).half()
    optimizer = make_optimizer(model, run.case)
    scale, since = SCALE, 0
    found = Found([], [], [], [])
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(run.case, step)
        compute.load_state_dict(model.state_dict())
        sums = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
        for rank in range(RANKS):
            compute.zero_grad()
            with patch.object(dist, "get_rank", lambda rank=rank: rank):
                loss = loss_of(compute, run.case, step, 0)
            found.losses.append(loss.item())
            (loss * scale * (math.inf if (step, rank) == (OVERFLOW, WHERE) else 1)).backward()
            for name, parameter in compute.named_parameters():
                sums[name] += parameter.grad.float() / RANKS
        for name, parameter in model.named_parameters():
            parameter.grad = sums[name] / scale
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM if run.clipped else math.inf)
        found.norms.append(norm.item())
        if norm.isfinite():
            optimizer.step()
            since += 1
        else:
            scale, since = scale / 2, 0
        if since == GROWS:
            scale, since = 2 * scale, 0
        found.scales.append(scale)
        found.weights.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    return found


@pytest.fixture(scope="module")
def found() -> dict[Run, list[Found]]:
    return dict(zip(RUNS, zip(*run_on_ranks(all_runs, RANKS), strict=True), strict=True))


def test_ranks_skip_the_step_together_and_learn_what_the_plain_loop_does(found: dict[Run, list[Found]]) -> None:
    for run, of_ranks in found.items():
        require_plain(run, of_ranks)


def require_plain(run: Run, of_ranks: list[Found]) -> None:
    exact = plain(run)
    assert exact.scales == [SCALE, 2 * SCALE, SCALE, SCALE, 2 * SCALE]
    for rank, own in enumerate(of_ranks):
        assert own.scales == exact.scales
        losses = [loss for step, loss in enumerate(exact.losses[rank::RANKS]) if step != OVERFLOW]
        assert [loss for step, loss in enumerate(own.losses) if step != OVERFLOW] == pytest.approx(losses, rel=2e-3)
        for step, (mine, first) in enumerate(zip(own.weights, of_ranks[0].weights, strict=True)):
            assert all(torch.equal(mine[name], first[name]) for name in first), f"rank {rank} differs in step {step}"
        before, skipped, after = own.weights[OVERFLOW - 1 : OVERFLOW + 2]
        assert all(torch.equal(before[name], skipped[name]) for name in before), "the step was not skipped"
        assert any(not torch.equal(skipped[name], after[name]) for name in after)
        # AdamW's steps are of the learning rate also where a gradient is next to nothing.
        for name, weight in exact.weights[-1].items() if run.optimizer == "sgd" else ():
            torch.testing.assert_close(own.weights[-1][name], weight, rtol=0, atol=TOLERANCE, msg=name)
        if run.clipped:
            taken = [norm for step, norm in enumerate(own.norms) if step != OVERFLOW]
            assert taken == pytest.approx([n for s, n in enumerate(exact.norms) if s != OVERFLOW], rel=2e-2)
