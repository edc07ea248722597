"""toolkit.optim: groups and the learning rate's shape, against values written out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from toolkit.optim import build_optimizer, build_schedule, learning_rate_factor, parameter_groups
from toolkit.recipe import OptimizerSection, ScheduleSection


def factors(num_steps: int, **fields: object) -> list[float]:
    factor = learning_rate_factor(ScheduleSection(**fields), num_steps)  # type: ignore[arg-type]
    return [factor(step) for step in range(num_steps)]


def test_linear() -> None:
    assert factors(6, kind="linear", warmup_steps=2) == pytest.approx([1 / 3, 2 / 3, 1, 2 / 3, 1 / 3, 0])


def test_linear_to_a_floor() -> None:
    assert factors(5, kind="linear", min_factor=0.2) == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])


def test_cosine() -> None:
    assert factors(5, kind="cosine", min_factor=0.1) == pytest.approx([1, 0.868198, 0.55, 0.231802, 0.1], abs=1e-6)


def test_constant_after_warmup_fraction() -> None:
    assert factors(10, kind="constant", warmup_fraction=0.2) == pytest.approx([1 / 3, 2 / 3] + [1.0] * 8)


def test_warmup_stable_decay() -> None:
    found = factors(10, kind="warmup_stable_decay", warmup_steps=1, decay_fraction=0.4)
    assert found == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 2 / 3, 1 / 3, 0])


def test_the_scheduler_steps_once_per_optimizer_step() -> None:
    model = nn.Linear(2, 2)
    optimizer = build_optimizer(model, OptimizerSection(learning_rate=1.0))
    schedule = build_schedule(optimizer, ScheduleSection(kind="linear"), 3)
    seen = []
    for _ in range(3):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert seen == pytest.approx([1.0, 0.5, 0.0])


def test_vectors_and_frozen_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False))
    model[2].weight.requires_grad_(False)
    decayed, plain = parameter_groups(model, 0.1)
    assert decayed == {"params": [model[0].weight], "weight_decay": 0.1}
    assert plain["params"] == [model[0].bias, model[1].weight, model[1].bias]
    assert plain["weight_decay"] == 0.0


def test_the_optimizer_is_fused() -> None:
    optimizer = build_optimizer(nn.Linear(2, 2), OptimizerSection(learning_rate=1.0))
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.defaults["fused"] is True
