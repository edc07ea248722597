"""A tower of blocks that no forward enters: the step is the plain loop's, and nothing of the tower is gathered."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from support.backend import accelerated, close
from support.ranks import run_on_ranks
from support.traffic import Traffic
from torch import nn

from toolkit.sharding.blocks.by_block import ByBlock

NUM_MICRO_BATCHES, NUM_BLOCKS = 2, 3
CASES = ["zero1", "zero2", "zero3", "zero3+by_block"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


class Model(nn.Module):
    """Towers on both sides of the blocks that rows go through."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.vision = nn.ModuleList(Block() for _ in range(2))
        self.layers = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.audio = nn.ModuleList(Block() for _ in range(2))
        for parameter in self.vision.parameters():
            parameter.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def rows(micro: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 16, generator=torch.Generator().manual_seed(10 * micro + rank))


def plain_step() -> dict[str, torch.Tensor]:
    model = Model()
    for micro in range(NUM_MICRO_BATCHES):
        for rank in range(2):
            (model(rows(micro, rank)) / (2 * NUM_MICRO_BATCHES)).backward()
    torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1).step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def loss_of_window(model: nn.Module, batch: torch.Tensor) -> Any:
    return model(batch) / NUM_MICRO_BATCHES


def sharded_steps() -> list[tuple[float, int, int]]:
    """For each case: how far the weights are off, and the gathers of a forward and of a window's backwards."""
    expected, found = plain_step(), []
    for case in CASES:
        word, _, is_by_block = case.partition("+")
        accelerator = accelerated(word, NUM_MICRO_BATCHES, unit_classes=["Block"])
        model: Any = Model()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        batches, counted = [rows(micro, dist.get_rank()) for micro in range(NUM_MICRO_BATCHES)], Traffic()
        if is_by_block:
            with counted:
                by_block = ByBlock(model, accelerator.state.fsdp_plugin.unit_plan)
                by_block.run([partial(loss_of_window, model, batch) for batch in batches])
            optimizer.optimizer.step()
        for batch in () if is_by_block else batches:
            with accelerator.accumulate(model):
                with counted:
                    accelerator.backward(model(batch))
                optimizer.step()
        whole = {name: tensor.full_tensor() for name, tensor in model.named_parameters()}
        off = max((whole[name] - expected[name]).abs().max().item() for name in expected)
        found.append((off, counted.calls["all_gather"], counted.calls["reduce_scatter"]))
        close(accelerator)
    return found


def test_the_step_is_that_of_a_plain_loop_and_no_block_of_a_tower_is_gathered() -> None:
    """A block is gathered for a forward and again for its backward; ZeRO-1 and by block do so once for a window."""
    found, other = run_on_ranks(sharded_steps, 2)
    assert found == other
    assert {case: off for case, (off, *_) in zip(CASES, found, strict=True) if off >= 2e-6} == {}
    gathers = {case: calls for case, (_, calls, _) in zip(CASES, found, strict=True)}
    each = 2 * NUM_BLOCKS
    assert gathers == {
        "zero1": NUM_BLOCKS,
        "zero2": NUM_BLOCKS,
        "zero3": each * NUM_MICRO_BATCHES,
        "zero3+by_block": each,
    }
