"""Two ranks with a pretended device each train what two CPU ranks train: strategies, and the executors of offload."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support.offload_loops import STEPS, Case, Found, loss_of, masters, ordinary, prepare, train
from support.pretended_steps import NCCL, WITHOUT_DEVICES, started_anew

pytestmark = [
    pytest.mark.grid,
    pytest.mark.skipif(importlib.util.find_spec("pretended_device") is None, reason="runs inside of tests/cuda/run.py"),
]


@dataclass(frozen=True)
class Run:
    case: Case
    executor: str | None = None
    device_state_gib: float = 0.0


PLAIN = Case(tied=False)
RUNS = {
    "zero1": Run(Case(strategy="zero1", accumulation=2)),
    "zero2": Run(Case(strategy="zero2", accumulation=2)),
    "zero3": Run(PLAIN),
    "zero3, tied, accumulation": Run(Case(accumulation=3)),
    "zero3, prefetch and checkpointing": Run(Case(prefetch=True, checkpointing=True, tied=False)),
    "zero3, LoRA": Run(Case(lora=True)),
    "zero3, float32": Run(replace(PLAIN, precision="no")),
    "zero3, evaluation": Run(replace(PLAIN, evaluate=True)),
    "cpu_torch": Run(Case(accumulation=3), "cpu_torch"),
    "cpu_fused": Run(PLAIN, "cpu_fused"),
    "device_stream": Run(Case(prefetch=True), "device_stream"),
    "resident": Run(Case(), "cpu_torch", 1.0),
    "zero1, offload": Run(Case(strategy="zero1", accumulation=3), "cpu_torch"),
    "LoRA, offload": Run(Case(lora=True), "device_stream"),
}


def train_all() -> dict[str, tuple[Found, dict[str, int]]]:
    """What every run finds on this rank's device; and what the device has seen of it."""
    import pretended_device

    from toolkit.sharding import OffloadSettings
    from toolkit.sharding.offload import executors

    os.environ["ACCELERATE_USE_CPU"] = "false"
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    executors.STREAM_CHUNK = 2048  # every unit passes through the device in several chunks
    found = {}
    for name, run in RUNS.items():
        before = pretended_device.counters()
        settings: Any = "none"
        if run.executor is not None:
            settings = OffloadSettings(run.executor, device_state_gib=run.device_state_gib)  # type: ignore[arg-type]
        accelerator, model, optimizer = prepare(run.case, settings)
        assert accelerator.device == torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        losses, norms = train(run.case, accelerator, model, optimizer)
        weights = masters(model)
        if run.executor is not None:
            accelerator.state.fsdp_plugin.close()
        accelerator.end_training()
        after = pretended_device.counters()
        found[name] = Found(losses, norms, weights), {key: after[key] - before[key] for key in after}
        assert pretended_device.failed == {}, pretended_device.failed
    return found


def on_cpu_ranks() -> list[Found]:
    return [ordinary(run.case) for run in RUNS.values()]


@pytest.fixture(scope="module")
def on_devices() -> list[dict[str, tuple[Found, dict[str, int]]]]:
    return started_anew(train_all, 2, **NCCL)


@pytest.fixture(scope="module")
def expected() -> list[dict[str, Found]]:
    without_devices = started_anew(on_cpu_ranks, 2, **WITHOUT_DEVICES)
    return [dict(zip(RUNS, each, strict=True)) for each in without_devices]


@pytest.mark.parametrize("name", RUNS)
def test_devices_train_what_cpu_ranks_train(
    on_devices: list[dict[str, tuple[Found, dict[str, int]]]], expected: list[dict[str, Found]], name: str
) -> None:
    for found, of_cpu in zip(on_devices, expected, strict=True):
        own, exact = found[name][0], of_cpu[name]
        assert len(own.losses) >= STEPS
        assert own.losses == pytest.approx(exact.losses, rel=2e-3)
        assert own.norms == pytest.approx(exact.norms, rel=2e-2)
        assert own.weights.keys() == exact.weights.keys()
        for weight, tensor in exact.weights.items():
            torch.testing.assert_close(own.weights[weight].float(), tensor.float(), atol=2e-2, rtol=2e-2, msg=weight)


@pytest.mark.parametrize("name", RUNS)
def test_devices_are_used_and_never_misused(
    on_devices: list[dict[str, tuple[Found, dict[str, int]]]], name: str
) -> None:
    for found in on_devices:
        seen = found[name][1]
        assert seen["misuses"] == 0
        assert seen["launches"] > 100
        assert seen["products"] > 20
        assert seen["collectives"] > 4


# fp16: an overflow that one rank's shard alone has


def overflow(
    strategy: str, at: int | None
) -> tuple[list[float], dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Scales of the loss and weights after each step; at one step, rank 1 finds an infinity in its own shard."""
    import torch.distributed as dist

    from toolkit.sharding.fsdp2.shards import local_tensor, whole_tensor

    case = replace(PLAIN, strategy=strategy, precision="fp16")
    accelerator, model, optimizer = prepare(case, "none", shard_size=2 if strategy == "hybrid" else None)
    scales, steps = [], []
    for step in range(STEPS):
        accelerator.backward(loss_of(model, case, step, 0))
        if step == at and dist.get_rank() == 1:
            gradient = next(p.grad for p in model.parameters() if p.grad is not None and local_tensor(p.grad).numel())
            local_tensor(gradient).view(-1)[0] = float("inf")
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scales.append(accelerator.scaler.get_scale())
        steps.append({name: whole_tensor(p).detach().float().cpu().clone() for name, p in model.named_parameters()})
    accelerator.end_training()
    return scales, steps[-1], steps


OVERFLOWS = {"zero1": 2, "zero2": 2, "zero3": 2, "hybrid": 4}
"""Strategies, and on how many ranks."""


def overflow_all() -> dict[str, Any]:
    os.environ["ACCELERATE_USE_CPU"] = "false"
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    here = [strategy for strategy, num_ranks in OVERFLOWS.items() if num_ranks == int(os.environ["WORLD_SIZE"])]
    return {strategy: (overflow(strategy, None), overflow(strategy, 1)) for strategy in here}


@pytest.fixture(scope="module")
def overflowed() -> Callable[[int], list[dict[str, Any]]]:
    """By the number of ranks."""
    return functools.cache(lambda num_ranks: started_anew(overflow_all, num_ranks, **NCCL))


@pytest.mark.parametrize("strategy", OVERFLOWS)
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    overflowed: Callable[[int], list[dict[str, Any]]], strategy: str
) -> None:
    of_ranks = overflowed(OVERFLOWS[strategy])
    for rank in of_ranks:
        (scales, _, _), (lowered, _, steps) = rank[strategy]
        # Without the infinity the second step is taken. Later ones may overflow at that scale, and not at half of it.
        assert scales[:2] == [scales[0]] * 2
        assert lowered == [scales[0], *[scales[0] / 2] * 3]
        before, skipped, after = steps[0], steps[1], steps[2]
        assert all(torch.equal(before[name], skipped[name]) for name in before), "the step was not skipped"
        assert any(not torch.equal(skipped[name], after[name]) for name in after), "nothing is learned after it"
        assert all(tensor.isfinite().all() for tensor in after.values())
    first, *others = (rank[strategy][1][1] for rank in of_ranks)
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)
