"""Steps of a loop of one's own that a trainer never takes equal those of torch's own loop, or are refused by name."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import meet, run_on_ranks
from torch import nn

STEPS = 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        for layer in self.layers[:depth]:
            x = layer(x)
        return self.head(x)


class Parts:
    """What a loop is written with: of the toolkit on the rows of this rank, or of torch on those of all ranks."""

    def __init__(self, strategy: str | None, accumulation: int, split: bool) -> None:
        model = Model()
        named = list(model.named_parameters())
        chosen = [[p for name, p in named if name.startswith("layers.0") is first] for first in (True, False)]
        groups = chosen if split else [[p for _, p in named]]
        optimizers = [torch.optim.AdamW(group, lr=0.05, weight_decay=0.5) for group in groups]
        self.accelerator = None if strategy is None else accelerator_of(strategy, accumulation)
        self.model, *self.optimizers = (
            (model, *optimizers) if self.accelerator is None else self.accelerator.prepare(model, *optimizers)
        )
        self.accumulation = accumulation

    def loss(self, number: int, depth: int = 3) -> torch.Tensor:
        mine = range(dist.get_world_size()) if self.accelerator is None else [dist.get_rank()]
        rows = [torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * number + rank)) for rank in mine]
        return torch.stack([self.model(each, depth).square().mean() for each in rows]).mean()

    def backward(self, loss: torch.Tensor) -> None:
        if self.accelerator is None:
            (loss / self.accumulation).backward()
        else:
            self.accelerator.backward(loss)

    def clip(self, limit: float) -> None:
        owner = torch.nn.utils if self.accelerator is None else self.accelerator
        owner.clip_grad_norm_(self.model.parameters(), limit)

    def weights(self) -> dict[str, torch.Tensor]:
        state = self.model.state_dict()
        return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}


def accelerator_of(strategy: str, accumulation: int) -> Any:
    from accelerate import Accelerator

    from toolkit.sharding import OffloadSettings, sharding_kwargs
    from toolkit.sharding.launched import accumulation_plugin
    from toolkit.sharding.plugin import reset_accelerate

    reset_accelerate()
    word, _, offload = strategy.partition("+")
    settings = OffloadSettings(executor="cpu_torch") if offload else None
    replicas = 2 if word == "hybrid" else None
    backend: Any = sharding_kwargs(word, unit_classes=["Block"], offload=settings, replicate_size=replicas)
    return Accelerator(gradient_accumulation_plugin=accumulation_plugin(accumulation), **backend)


def step(parts: Parts) -> None:
    for optimizer in parts.optimizers:
        optimizer.step()
        optimizer.zero_grad()


def forward_before_the_step(parts: Parts) -> None:
    """As for a figure of the rows: FSDP2 keeps what it has gathered, for a backward that never comes."""
    for number in range(STEPS):
        parts.backward(parts.loss(number))
        parts.loss(number)
        step(parts)


def two_norms(parts: Parts) -> None:
    for number in range(STEPS):
        parts.backward(parts.loss(number))
        parts.clip(0.1)
        parts.clip(float("inf"))
        step(parts)


def windows(parts: Parts, depths: tuple[int, int]) -> None:
    owner = parts.accelerator
    for number, (micro, depth) in itertools.product(range(STEPS), enumerate(depths)):
        with nullcontext() if owner is None else owner.accumulate(parts.model):
            parts.backward(parts.loss(2 * number + micro, depth))
            if owner is not None or micro == 1:
                step(parts)


def a_window_given_up(parts: Parts) -> None:
    if parts.accelerator is not None:
        with parts.accelerator.accumulate(parts.model):
            parts.backward(parts.loss(50))
        with parts.accelerator.accumulate(parts.model):
            parts.loss(51)
            parts.optimizers[0].zero_grad()
    windows(parts, (3, 3))


def last_rows_go_less_deep(parts: Parts) -> None:
    windows(parts, (3, 2))


def plain_steps(parts: Parts) -> None:
    for number in range(STEPS):
        parts.backward(parts.loss(number))
        step(parts)


CASES: dict[str, tuple[Callable[[Parts], None], str, int, bool]] = {
    "stale, zero2": (forward_before_the_step, "zero2", 1, False),
    "stale, zero3": (forward_before_the_step, "zero3", 1, False),
    "stale, offload": (forward_before_the_step, "zero3+offload", 1, False),
    "two optimizers": (plain_steps, "zero3", 1, True),
    "two norms, offload": (two_norms, "zero3+offload", 1, False),
    "given up, zero1": (a_window_given_up, "zero1", 2, False),
    "given up, zero3": (a_window_given_up, "zero3", 2, False),
}
ON_FOUR_RANKS = {
    "given up, hybrid": (a_window_given_up, "hybrid", 2, False),
    "less deep, hybrid": (last_rows_go_less_deep, "hybrid", 2, False),
}


def differences(names: list[str]) -> dict[str, float]:
    """Returns how far the weights of each case are off."""
    found = {}
    for name in names:
        loop, strategy, accumulation, split = (CASES | ON_FOUR_RANKS)[name]
        meet()
        ended = []
        for word in (None, strategy):
            parts = Parts(word, accumulation, split)
            loop(parts)
            ended.append(parts.weights())
        found[name] = max((ended[1][key] - value).abs().max().item() for key, value in ended[0].items())
    return found


@pytest.mark.parametrize(
    ("num_ranks", "names"), [pytest.param(2, [*CASES], marks=pytest.mark.first), (4, [*ON_FOUR_RANKS])]
)
def test_the_weights_are_those_of_the_plain_loop(num_ranks: int, names: list[str]) -> None:
    for found in run_on_ranks(differences, num_ranks, names):
        assert {name: off for name, off in found.items() if off >= 2e-6} == {}


def refusals() -> list[str]:
    """Returns the errors of loops whose step offload cannot take."""
    from toolkit.errors import BadInputError

    def freeze(parts: Parts) -> None:
        parts.model.layers[0].linear.requires_grad_(False)

    def add(parts: Parts) -> None:
        extra = parts.optimizers[0].optimizer
        extra.param_groups.append({**extra.param_groups[0], "params": [extra.param_groups[0]["params"].pop()]})

    def clip(parts: Parts) -> None:
        parts.backward(parts.loss(0))
        parts.clip(0.1)

    found = []
    for change in (freeze, add, clip):
        meet()
        parts = Parts("zero3+offload", 1, split=False)
        plain_steps(parts)
        try:
            change(parts)
            plain_steps(parts)
            found.append("")
        except BadInputError as error:
            found.append(str(error))
    return found


def test_offload_refuses_what_it_has_no_place_for() -> None:
    frozen, added, clipped = run_on_ranks(refusals, 1)[0]
    assert "(first: layers.0.linear.weight)" in frozen
    assert "frozen, unfrozen or added to the optimizer after accelerator.prepare" in added
    assert "between clip_grad_norm_ and optimizer.step" in clipped
