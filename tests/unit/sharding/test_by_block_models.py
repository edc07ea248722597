"""Models that hand things from block to block: what accumulation by block carries, and what it refuses by name."""

from __future__ import annotations

import functools
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.fsdp2_trace import fake_ranks
from support.tiny import llama
from torch.distributed.device_mesh import init_device_mesh

from toolkit.errors import BadInputError
from toolkit.run.checks.by_block_check import check_forwards
from toolkit.sharding import Checkpointing, checkpoint_blocks, plan_units
from toolkit.sharding.apply import apply
from toolkit.sharding.blocks.by_block import ByBlock
from toolkit.sharding.fsdp2.fsdp import groups_of_module
from toolkit.sharding.plan.strategy import STRATEGIES

ROWS = [torch.randint(0, 131, (1, 12), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    with fake_ranks(1):  # a group of one, which sends nothing
        yield


def by_block(model: Any) -> ByBlock:
    plan = plan_units(model)
    checkpoint_blocks(model, plan, Checkpointing(1))
    apply(model, plan, STRATEGIES["zero3"], init_device_mesh("cpu", (1,)), "no", lambda: True)
    return ByBlock(model, plan)


def around_blocks(model: Any, forward: Callable[..., Any]) -> Any:
    """The model with `forward(number, own forward, ...)` in place of each block's."""
    for number, block in enumerate(model.model.layers):
        block.forward = functools.partial(forward, number, block.forward)
    return model


def by_attribute(is_kept: bool) -> Any:
    """The first block leaves something for the second, in an attribute or in a global."""
    kept: dict[str, Any] = {}
    model = llama(num_hidden_layers=3)

    def forward(number: int, own: Any, hidden: torch.Tensor, **kwargs: Any) -> Any:
        place = model.model.__dict__ if is_kept else kept
        if number == 0:
            place["left"] = hidden.mean()
        return own(hidden if number == 0 else hidden * place["left"], **kwargs)

    return around_blocks(model, forward)


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_model_that_hands_on_past_its_arguments_is_refused(is_kept: bool) -> None:
    model = by_attribute(is_kept)
    runner = by_block(model)
    with pytest.raises(BadInputError, match=r"cannot run LlamaForCausalLM.*logits of the \w+ micro-batch differ"):
        check_forwards(model, runner, torch.device("cpu"), False)


def test_one_that_does_not_is_not() -> None:
    model = llama(num_hidden_layers=3)
    check_forwards(model, by_block(model), torch.device("cpu"), False)
    assert model.training


def test_the_check_asks_for_no_cache() -> None:
    """As training does: the cache of `qwen4_exp` lacks a state that its blocks would keep there."""
    given: list[Any] = []

    def forward(_number: int, own: Any, hidden: torch.Tensor, cache: Any = None, **kwargs: Any) -> Any:
        given.append(cache)
        return own(hidden, cache=cache, **kwargs)

    model = around_blocks(llama(num_hidden_layers=3, use_cache=True), forward)
    runner = by_block(model)
    model.config.use_cache = True  # checkpointing turns it off, where it finds it
    check_forwards(model, runner, torch.device("cpu"), False)
    assert given
    assert given == [None] * len(given)


def test_a_loss_of_what_a_block_does_not_return_is_refused() -> None:
    """As balance losses of routers are, which hooks collect inside of the blocks."""
    model: Any = llama(num_hidden_layers=3)
    runner = by_block(model)

    def loss(row: torch.Tensor) -> torch.Tensor:
        inside: list[torch.Tensor] = []
        handle = model.model.layers[1].mlp.register_forward_hook(lambda _module, _args, out: inside.append(out))
        of_row = model(input_ids=row, labels=row).loss
        handle.remove()
        return of_row + inside[0].square().mean()  # type: ignore[no-any-return]

    with pytest.raises(BadInputError, match="cannot run LlamaForCausalLM, whose losses or blocks use"):
        runner.run([functools.partial(loss, ROWS[0])])


def sharing() -> Any:
    """The first block writes into a mapping that all are given, as Gemma 3n's do with keys and values."""

    def forward(number: int, own: Any, hidden: torch.Tensor, shared: Any = None, **kwargs: Any) -> Any:
        if number == 0:
            shared["first"] = (hidden.sin(), hidden.cos())
        sine, cosine = shared["first"]
        return own(hidden + sine * cosine.mean(), **kwargs)

    return around_blocks(llama(num_hidden_layers=3), forward)


def test_what_blocks_write_into_a_mapping_reaches_the_later_ones() -> None:
    model, plain = sharing(), sharing()
    runner = by_block(model)

    def loss(model: Any, row: torch.Tensor) -> torch.Tensor:
        return model(input_ids=row, labels=row, shared=UserDict()).loss  # type: ignore[no-any-return]

    losses = runner.run([functools.partial(loss, model, row) for row in ROWS])
    expected = [loss(plain, row) for row in ROWS]
    torch.stack(expected).sum().backward()
    assert [float(found) for found in losses] == pytest.approx([float(found.detach()) for found in expected], rel=1e-6)
    for (name, found), parameter in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad.full_tensor(), parameter.grad, rtol=0, atol=1e-6, msg=name)


def test_evaluation_by_block_gives_what_each_forward_gives() -> None:
    model = llama(num_hidden_layers=3)
    runner = by_block(model)
    forwards = [functools.partial(lambda row: model(input_ids=row).logits, row) for row in ROWS]
    with torch.no_grad():
        expected = [forward() for forward in forwards]
    for found, one in zip(runner.evaluate(forwards), expected, strict=True):
        assert torch.equal(found, one)
        assert not found.requires_grad


def test_a_forward_that_fails_inside_a_block_leaves_it_to_be_freed_after_the_next_ones() -> None:
    model = llama(num_hidden_layers=2)
    runner = by_block(model)
    groups = [group for block in model.model.layers for group in groups_of_module(block)]
    before = [group.post_forward_mesh_info for group in groups]
    hook = model.model.layers[1].mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runner.evaluate([functools.partial(lambda row: model(input_ids=row).logits, row) for row in ROWS])
    hook.remove()
    assert None not in before
    assert [group.post_forward_mesh_info for group in groups] == before
