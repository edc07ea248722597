"""Ranks that use different parameters of one unit take the step of the plain loop, under every strategy.

The plain loop runs all ranks' rows in one process. An expert that only one rank used gets that rank's gradient; one
that no rank used keeps its weights to the last bit, and is not decayed.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.backend import accelerated, close
from support.plain_loop import Trained, plain_loop
from support.ranks import meet, run_on_ranks
from torch import nn

from toolkit.errors import TrainingError
from toolkit.sharding import OffloadSettings
from toolkit.sharding.fsdp2.shards import whole_tensor
from toolkit.sharding.fsdp2.unused import has_branches

STEPS = 3
SIZES = (32, 16, 24, 32)  # of the experts; the last one is never used


class Expert(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.up = nn.Linear(16, size)
        self.down = nn.Linear(size, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.experts = nn.ModuleList(Expert(size) for size in SIZES)

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        return x + self.experts[chosen](self.norm(x))


class Model(nn.Module):
    """Its first block's input needs no gradient, so that nothing in the graph comes after that block's backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: torch.Tensor, chosen: int, skipped: int | None = None) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number != skipped:
                x = layer(x, chosen)
        return x


def rows(step: int, micro: int, rank: int) -> torch.Tensor:
    return torch.randn(2, 16, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


def chosen(micro: int, rank: int) -> int:
    """One rank alternates, the others use one expert: in a window some experts are used in one micro-batch alone."""
    return (rank + micro) % 2 if rank % 2 == 0 else 2


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def plain(num_ranks: int, accumulation: int, clipped: bool) -> Trained:
    model = Model()

    def loss_of(step: int) -> torch.Tensor:
        pairs = itertools.product(range(accumulation), range(num_ranks))
        losses = [model(rows(step, *pair), chosen(*pair)).square().mean() for pair in pairs]
        return torch.stack(losses).mean()

    limit = 0.5 if clipped else None
    return plain_loop(model, range(STEPS), loss_of, max_norm=limit, optimizer=make_optimizer(model))


def sharded(strategy: str, accumulation: int, during_backward: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
    word, _, offload = strategy.partition("+")
    settings = OffloadSettings(executor="cpu_torch", during_backward=during_backward) if offload else None
    accelerator = accelerated(word, accumulation, unit_classes=["Layer"], offload=settings)
    model = Model()
    if word == "ddp":
        accelerator.ddp_handler.find_unused_parameters = has_branches(model)
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    norms = []
    for step in range(STEPS):
        for micro in range(accumulation):
            with accelerator.accumulate(model):
                rank = dist.get_rank()
                accelerator.backward(model(rows(step, micro, rank), chosen(micro, rank)).square().mean())
                if accelerator.sync_gradients and not during_backward:
                    norms.append(float(whole_tensor(accelerator.clip_grad_norm_(model.parameters(), 0.5))))
                optimizer.step()
                optimizer.zero_grad()
    state = accelerator.unwrap_model(model).state_dict()
    weights = {name: whole_tensor(value).clone() for name, value in state.items()}
    close(accelerator)
    return weights, norms


CASES = [
    *((word, accumulation, False) for word in ("ddp", "zero1", "zero2", "zero3") for accumulation in (1, 2)),
    ("zero2+offload", 2, False),
    ("zero3+offload", 1, False),
    ("zero3+offload", 1, True),
]
ON_FOUR_RANKS = [("hybrid", 2, False), ("zero3", 1, False)]


def compare(cases: list[tuple[str, int, bool]]) -> list[tuple[float, float, bool]]:
    """For each case: how far weights and norms are off, and whether the unused expert kept its weights."""
    found = []
    for strategy, accumulation, during_backward in cases:
        meet()
        by_hand = plain(dist.get_world_size(), accumulation, clipped=not during_backward)
        expected, expected_norms = by_hand.weights, [] if during_backward else by_hand.norms
        weights, norms = sharded(strategy, accumulation, during_backward)
        off = max((weights[name] - expected[name]).abs().max().item() for name in expected)
        norm_off = max((abs(a / b - 1) for a, b in zip(norms, expected_norms, strict=True)), default=0.0)
        start = dict(Model().named_parameters())
        kept = all(torch.equal(weights[name], start[name]) for name in start if ".experts.3." in name)
        found.append((off, norm_off, kept))
    return found


@pytest.mark.parametrize(("num_ranks", "cases"), [(2, CASES), (4, ON_FOUR_RANKS)])
def test_unequal_experts_take_the_plain_step(num_ranks: int, cases: list[tuple[str, int, bool]]) -> None:
    for found in run_on_ranks(compare, num_ranks, cases):
        for case, (off, norm_off, kept) in zip(cases, found, strict=True):
            assert off < 4e-6, case  # float32; 2.1e-6 on four ranks
            assert norm_off < 1e-6, case
            assert kept, case


def skip_different_blocks() -> str:
    """Rank 0 leaves out the second block and rank 1 the third, which has the same sizes."""
    accelerator = accelerated("zero3", unit_classes=["Layer"])
    model = Model()
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    rank = dist.get_rank()
    accelerator.backward(model(rows(0, 0, rank), 0, skipped=rank + 1).square().mean())
    try:
        optimizer.step()
    except TrainingError as error:
        return str(error)
    return ""


def test_ranks_that_use_different_blocks_do_not_take_a_step() -> None:
    for message in run_on_ranks(skip_different_blocks, 2):
        assert "used different units" in message


def step_on_gradients_of_its_own() -> bool:
    """Whether a step on gradients that no backward has made moves every parameter, after others were dropped."""
    accelerator = accelerated("zero3", unit_classes=["Layer"])
    model = Model()
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    accelerator.backward(model(rows(0, 0, 0), 0).square().mean())
    model.zero_grad()
    before = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return all(not torch.equal(p.full_tensor(), before[name]) for name, p in model.named_parameters())


def test_gradients_that_no_backward_has_made_are_kept() -> None:
    """As torch makes an optimizer's state, before it loads one from a checkpoint."""
    assert run_on_ranks(step_on_gradients_of_its_own, 1) == [True]


def expert_of(step: int) -> int:
    """The last expert is used for the first time after the checkpoint."""
    return 3 if step >= 2 else 0


def train_and_resume(strategy: str, folder: str) -> tuple[float, bool]:
    """How far a run is off the plain loop, and whether it goes on from its checkpoint to the last bit."""
    ends = []
    for first_step in (0, 2):
        accelerator = accelerated(strategy, unit_classes=["Layer"])
        model = Model()
        model, optimizer = accelerator.prepare(model, make_optimizer(model))
        if first_step:
            accelerator.load_state(folder)
        for step in range(first_step, 4):
            if step == 2 and not first_step:
                accelerator.save_state(folder)
            accelerator.backward(model(rows(step, 0, dist.get_rank()), expert_of(step)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        ends.append({name: whole_tensor(value).clone() for name, value in model.state_dict().items()})
        close(accelerator)
    by_hand = Model()

    def loss_of(step: int) -> torch.Tensor:
        return torch.stack([by_hand(rows(step, 0, rank), expert_of(step)).square().mean() for rank in range(2)]).mean()

    found = plain_loop(by_hand, range(4), loss_of, max_norm=None, optimizer=make_optimizer(by_hand))
    off = max((ends[0][name] - value).abs().max().item() for name, value in found.weights.items())
    return off, all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


def trained_and_resumed(folder: str) -> list[tuple[float, bool]]:
    return [train_and_resume(strategy, f"{folder}/{strategy}") for strategy in ("zero3", "zero3+offload")]


def test_a_parameter_first_used_after_a_resume(tmp_path: Path) -> None:
    """Accelerate's own checkpoint, whose loader wants the state of every parameter."""
    for rank in run_on_ranks(trained_and_resumed, 2, str(tmp_path)):
        for off, exact in rank:
            assert off < 2e-6
            assert exact
