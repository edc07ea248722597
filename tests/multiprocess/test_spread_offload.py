"""Spread experts with offloaded optimizer state: the run is that without offload bit for bit, and a plain loop's.

And with a gradient scaler, whose overflows every rank must see.
"""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import get_fsdp2_grad_scaler
from support import offload_loops
from support.moe import MODELS, mixture
from support.offload_loops import (
    VOCABULARY,
    Case,
    Found,
    bf16_ulps,
    differences,
    learning_rate,
    loss_of,
    make_optimizer,
)
from support.ranks import meet, run_on_ranks
from torch import nn

from toolkit.sharding import OffloadSettings, sharding_kwargs
from toolkit.sharding.fsdp2.shards import whole_tensor
from toolkit.sharding.offload import executors
from toolkit.sharding.plan.units import stacked_experts
from toolkit.sharding.plugin import reset_accelerate

STEPS, MAX_NORM = 3, 0.1  # which every step's norm is above
OVERFLOW = 1
CLIPPED = Case(max_norm=MAX_NORM)
FLOAT32 = replace(CLIPPED, precision="no", optimizer="sgd")


@dataclass(frozen=True)
class Spread:
    """A run.

    Attributes:
        size: ranks of a group.
        prefetch: blocks gathered ahead.
        others: executors beside cpu_torch.
        settings: of offload.
    """

    case: Case = CLIPPED
    kind: str = "mixtral"
    size: int = 2
    prefetch: int | None = None
    others: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return f"{self.kind}-{self.size}-{self.case}"


def make(spread: Spread) -> Any:
    """A mixture; without clipping, no forward uses one of its experts' parameters, which AdamW must then leave alone.

    Clipping without offload counts zeros for it, which are summed in another order: a last bit of the norm.
    """
    model = mixture(spread.kind, vocab_size=VOCABULARY)
    if spread.case.max_norm is None:
        list(stacked_experts(model).values())[-1].unused = nn.Parameter(torch.ones(4, 3, 5))
    return model


def trained(spread: Spread, executor: str | None) -> Found:
    """Steps of a stock loop over the toolkit's backend; executor None: without offload."""
    offload = executor and OffloadSettings(executor=executor, **spread.settings)
    arguments: dict[str, Any] = {"experts": spread.size, "prefetch": spread.prefetch}
    if spread.case.strategy == "hybrid":
        # Two hosts: replicas of one do not offload.
        os.environ.update(LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        arguments["shard_size"] = 2
    accelerator, model, optimizer = offload_loops.prepare(spread.case, offload, make(spread), **arguments)
    if executor == "cpu_torch":
        offload_loops.slow_down(model, 0.002)
    losses, norms = offload_loops.train(spread.case, accelerator, model, optimizer, range(STEPS))
    found = Found(losses, norms, offload_loops.masters(model))
    accelerator.state.fsdp_plugin.close()
    return found


def compare(spreads: list[Spread]) -> list[tuple[Found, list[str], list[int]]]:
    """For each: the run, what differs from it with offload, and how far off other executors are."""
    found = []
    with patch.object(executors, "STREAM_CHUNK", 2048):  # units pass through the device in several chunks
        for spread in spreads:
            gathered = trained(spread, None)
            far = [bf16_ulps(trained(spread, other), gathered) for other in spread.others]
            found.append((gathered, differences(trained(spread, "cpu_torch"), gathered), far))
    return found


def half() -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """In float16, by a scaler, which a CPU run of Accelerate has not: norms, scales, weights.

    In the second step one expert's gradient, which one rank alone holds, is not finite.
    """
    meet()
    reset_accelerate()
    accelerator = Accelerator(cpu=True, **sharding_kwargs("zero3", experts=2))
    accelerator.scaler = get_fsdp2_grad_scaler(device="cpu", init_scale=2.0**10)
    accelerator.native_amp = True
    accelerator.state._mixed_precision = "fp16"
    model = make(Spread())
    model.set_experts_implementation("eager")  # torch multiplies groups in bf16 and float32 alone
    model, optimizer = accelerator.prepare(model, make_optimizer(model, FLOAT32))
    norms, scales = [], []
    for step in range(STEPS):
        accelerator.backward(loss_of(model, FLOAT32, step, 0))
        if step == OVERFLOW and dist.get_rank() == 1:
            model.model.layers[0].mlp.experts.down_proj.grad.to_local()[0, 0, 0] = math.inf
        norms.append(whole_tensor(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)).item())
        optimizer.step()
        optimizer.zero_grad()
        scales.append(accelerator.scaler.get_scale())
    return norms, scales, {name: whole_tensor(parameter).detach() for name, parameter in model.named_parameters()}


def run_all(spreads: list[Spread]) -> tuple[list[Any], Any]:
    return compare(spreads), half()


def plain(
    spread: Spread, num_ranks: int, skipped: int | None = None
) -> tuple[list[list[float]], list[float], dict[str, torch.Tensor]]:
    """All ranks' rows in one process: losses by rank, norms, weights; a step may be skipped."""
    case, model = spread.case, make(spread)
    optimizer = make_optimizer(model, case)
    losses: list[list[float]] = [[] for _ in range(num_ranks)]
    norms = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(case, step) if skipped is None else group["lr"]
        for micro, rank in itertools.product(range(case.accumulation), range(num_ranks)):
            with patch.object(dist, "get_rank", lambda rank=rank: rank):
                loss = loss_of(model, case, step, micro)
            (loss / (num_ranks * case.accumulation)).backward()
            losses[rank].append(loss.item())
        if case.max_norm is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), case.max_norm).item())
        if step != skipped:
            optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: parameter.detach() for name, parameter in model.named_parameters()}


def check(spread: Spread, of_ranks: list[tuple[Found, list[str], list[int]]]) -> None:
    for _, different, far in of_ranks:
        assert different == [], spread
        assert all(ulps <= 1 for ulps in far), (spread, far)
    weights = of_ranks[0][0].weights
    unused = [weight for name, weight in weights.items() if name.endswith("experts.unused")]
    assert len(unused) == (spread.case.max_norm is None)
    assert all(torch.equal(weight, torch.ones(4, 3, 5)) for weight in unused)
    if spread.case.precision != "no":
        return
    losses, norms, expected = plain(spread, len(of_ranks))
    assert min(norms, default=1.0) > MAX_NORM
    for rank, (found, _, _) in enumerate(of_ranks):
        assert found.losses == pytest.approx(losses[rank], rel=1e-6)
        assert found.norms == pytest.approx(norms, rel=1e-6)
    assert weights.keys() == expected.keys()
    # Steps of SGD move weights by 3e-3, those of AdamW by 2e-2, also where a gradient is next to nothing.
    tolerance = 1e-7 if spread.case.optimizer == "sgd" else 5e-5
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=tolerance, msg=f"{spread}: {name}")


ALL = ("cpu_fused", "device_stream")
ON_FOUR = [
    Spread(replace(CLIPPED, accumulation=2, checkpointing=True), others=ALL),
    Spread(replace(FLOAT32, strategy="zero1", accumulation=3), "deepseek_v3"),
    Spread(FLOAT32, "qwen3_moe", size=4, prefetch=1),
    Spread(replace(FLOAT32, strategy="hybrid", accumulation=2)),
    Spread(
        Case(precision="no", max_norm=None), "gpt_oss", settings={"during_backward": True, "device_state_gib": 1e-5}
    ),
]
"""Rows of two ranks and of one; the two of a replica are one each."""


def test_offload_is_the_run_without_it_and_the_plain_loop() -> None:
    compared, halves = zip(*run_on_ranks(run_all, 4, ON_FOUR), strict=True)
    for spread, *of_ranks in zip(ON_FOUR, *compared, strict=True):
        check(spread, of_ranks)
    _, expected_norms, expected = plain(Spread(FLOAT32), 4, skipped=OVERFLOW)
    for norms, scales, weights in halves:
        assert scales == [1024, 512, 512]
        assert not math.isfinite(norms.pop(OVERFLOW))
        assert norms == pytest.approx([expected_norms[0], expected_norms[2]], rel=1e-3)
        for name, weight in expected.items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=5e-5, msg=name)


SCHEDULES = [("zero3", 1, False), ("zero3", 3, True), ("zero2", 1, True), ("zero2", 3, False), ("zero1", 3, False)]


@pytest.mark.grid
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_model_and_schedule(num_ranks: int) -> None:
    spreads = []
    for size, (strategy, accumulation, checkpointing) in itertools.product((2, 4), SCHEDULES):
        change = {"strategy": strategy, "accumulation": accumulation, "checkpointing": checkpointing}
        spreads += [Spread(replace(FLOAT32, **change), kind, size) for kind in MODELS]
        # In bf16 the kernel of experts asks for rows of 16 bytes.
        spreads += [Spread(replace(CLIPPED, **change), kind, size, others=ALL) for kind in ("mixtral", "olmoe")]
    spreads = [spread for spread in spreads if num_ranks % spread.size == 0]
    found = run_on_ranks(compare, num_ranks, spreads)
    for spread, *of_ranks in zip(spreads, *found, strict=True):
        check(spread, of_ranks)
