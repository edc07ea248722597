"""Norms and MLPs in chunks of tokens: gradients of the model whole, no third forward, and what is refused."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.packed_rows import Documents, packed
from support.tiny import llama
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.data.samples.sequence_parts import WHOLE
from toolkit.errors import BadInputError
from toolkit.objectives.causal_lm import CausalLM
from toolkit.planning.memory.fake import fake_ranks
from toolkit.run.checks.sequence_check import check_parts
from toolkit.sharding import Checkpointing, checkpoint_blocks, plan_units
from toolkit.sharding.apply import apply
from toolkit.sharding.blocks.by_block import ByBlock
from toolkit.sharding.blocks.chunks import Chunks, in_chunks
from toolkit.sharding.plan.strategy import STRATEGIES

IN_CHUNKS = Checkpointing(1, chunk_tokens=10)
"""5 tokens of each of two rows: 23 tokens are four chunks and three tokens."""

ROWS = torch.randint(1, 131, (2, 23), generator=torch.Generator().manual_seed(1))
SIZES: dict[str, Any] = {"vocab_size": 131, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "gemma3_text":  # four norms a block, one of them behind the MLP
        config = AutoConfig.for_model(kind, **SIZES, **HEADS, head_dim=8)
    elif kind == "gpt2":  # biases, LayerNorm
        sizes = {"vocab_size": 131, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        config = AutoConfig.for_model(kind, **sizes, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    else:
        model = llama()
        if kind == "lora":
            torch.manual_seed(3)
            targets = ["gate_proj", "up_proj", "down_proj", "q_proj"]
            model = get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
        return model.train()
    return AutoModelForCausalLM.from_config(config).float().train()


def loss_of(model: Any, rows: torch.Tensor = ROWS) -> torch.Tensor:
    return model(input_ids=rows, labels=rows, use_cache=False).loss  # type: ignore[no-any-return]


def require_equal(found: Any, plain: Any) -> None:
    largest = max(float(p.grad.abs().max()) for p in plain.parameters() if p.grad is not None)
    for (name, mine), parameter in zip(found.named_parameters(), plain.named_parameters(), strict=True):
        expected = parameter[1].grad
        assert (mine.grad is None) == (expected is None), name
        if expected is not None:
            gradient = mine.grad.full_tensor() if hasattr(mine.grad, "full_tensor") else mine.grad
            torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-6 * largest, msg=name)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt2", "lora"])
def test_gradients_are_those_of_the_model_whole(kind: str) -> None:
    plain, model = model_of(kind), model_of(kind)
    checkpoint_blocks(model, plan_units(model), IN_CHUNKS)
    expected, found = loss_of(plain), loss_of(model)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    expected.backward()
    found.backward()
    require_equal(model, plain)


def test_behind_a_checkpoint_no_chunk_is_computed_a_third_time() -> None:
    model, calls = llama(), []
    checkpoint_blocks(model, plan_units(model), IN_CHUNKS)
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda _module, args, _out: calls.append(args[0].shape))
    loss_of(model).backward()
    sizes = [5, 5, 5, 5, 3]
    assert [shape[1] for shape in calls] == sizes + sizes, "once in forward and once in backward"


def by_rounds(model: Any) -> torch.Tensor:
    loss = loss_of(model)
    loss.backward()
    return loss


def all_at_once(model: Any, runner: ByBlock) -> torch.Tensor:
    return torch.stack(runner.run([functools.partial(loss_of, model, rows[None]) for rows in ROWS])).sum() / 2


@pytest.mark.parametrize("is_by_block", [False, True])
def test_sharded_models_have_the_same_gradients(is_by_block: bool) -> None:
    plain, model = llama(), llama()
    checkpointing = Checkpointing(1, offload=True, chunk_tokens=5 if is_by_block else 10)
    with fake_ranks(1):
        plan = plan_units(model)
        apply(model, plan, STRATEGIES["zero3"], init_device_mesh("cpu", (1,)), "no", lambda: True, checkpointing)
        found = all_at_once(model, ByBlock(model, plan)) if is_by_block else by_rounds(model)
        expected = loss_of(plain)
        (2 * expected if is_by_block else expected).backward()
        torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-6, atol=0)
        require_equal(model, plain)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(hidden, 0.5) * self.scale


def test_backward_draws_the_random_numbers_of_forward() -> None:
    module = Dropping()
    in_chunks(module, Chunks(4))
    hidden = torch.ones(1, 30, 8, requires_grad=True)
    output = module(hidden)
    torch.rand(7)
    state = torch.get_rng_state()
    output.sum().backward()
    assert torch.equal(hidden.grad, output), "the mask, times 2"
    assert 60 < int((output == 0).sum()) < 180
    assert torch.equal(torch.get_rng_state(), state), "what is drawn later is as without chunks"


def test_sums_of_many_chunks_in_16_bits_are_as_exact_as_one_product() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(16, 16).bfloat16()
    hidden = torch.randn(1, 2048, 16).bfloat16() + 1
    exact = hidden.double().sum(dim=(0, 1)).expand(16, 16)
    whole = torch.autograd.grad(linear(hidden).sum(), linear.weight)[0]
    in_chunks(linear, Chunks(16))
    found = torch.autograd.grad(linear(hidden).sum(), linear.weight)[0]
    assert float((found - exact).abs().max()) <= 1.01 * max(
        float((whole - exact).abs().max()), float(exact.max()) / 256
    )


def test_autocast_is_that_of_the_forward() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(16, 16)
    hidden = torch.randn(1, 64, 16, requires_grad=True)
    found = []
    for tokens in (64, 16):
        in_chunks(linear, Chunks(tokens))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = linear(hidden)
        found.append((output, torch.autograd.grad(output.float().square().sum(), hidden)[0]))
    for whole, chunked in zip(*found, strict=True):
        assert whole.dtype == chunked.dtype
        assert torch.equal(whole, chunked)


def test_blocks_that_send_tokens_to_experts_are_refused() -> None:
    config = AutoConfig.for_model("mixtral", **SIZES, **HEADS, num_local_experts=4)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(BadInputError, match=r"sharding.chunk_tokens: the blocks of MixtralForCausalLM have no MLP"):
        checkpoint_blocks(model, plan_units(model), IN_CHUNKS)


class Mixing(nn.Module):
    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.own(hidden.cumsum(dim=1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_mixing", [False, True])
def test_a_model_whose_mlps_mix_tokens_is_refused_before_the_first_step(is_mixing: bool) -> None:
    model: Any = llama()
    if is_mixing:
        model.model.layers[1].mlp = Mixing(model.model.layers[1].mlp)
    checkpoint_blocks(model, plan_units(model), Checkpointing(1, chunk_tokens=8192))
    arguments = (model, CausalLM(model), packed(Documents(9)), WHOLE, torch.device("cpu"), False)
    assert check_parts(*arguments) is None, "nothing is in chunks"
    if not is_mixing:
        found = check_parts(*arguments, chunked=True)
        assert found is not None
        assert 0 < found < 1e-6
        assert all(parameter.grad is None for parameter in model.parameters())
        return
    with pytest.raises(BadInputError, match=r"sharding.chunk_tokens: LlamaForCausalLM .* mixes the tokens of a row"):
        check_parts(*arguments, chunked=True)
