"""The loss without whole logits, on ranks: gradients of every strategy are the plain ones of all rows together.

Accumulation, masks, and a micro-batch without any target on one rank; the plain side is written out here.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.ranks import meet, run_on_ranks
from support.tiny import llama
from transformers import Gemma2Config, Gemma2ForCausalLM

K, VOCABULARY, T = 2, 96, 24
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
CASES = [(strategy, model, "no") for strategy in STRATEGIES for model in ("untied", "tied and capped")]
CASES += [(strategy, "tied and capped", "bf16") for strategy in ("ddp", "zero3")]


def make_model(kind: str) -> Any:
    if kind == "untied":
        return llama(vocab_size=VOCABULARY)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": VOCABULARY, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = Gemma2Config(**sizes, head_dim=8, final_logit_softcapping=0.5, attention_dropout=0.0)
    return Gemma2ForCausalLM._from_config(config, attn_implementation="eager")


def batch_of(rank: int, micro: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(10 * rank + micro)
    ids = torch.randint(0, VOCABULARY, (2, T), generator=draw)
    masked = torch.rand((2, T), generator=draw) < 0.4
    if (rank, micro) == (1, 1):
        masked[:] = True
    return {"input_ids": ids, "labels": ids.masked_fill(masked, -100), "position_ids": torch.arange(T).expand(2, T)}


@functools.cache
def plain(kind: str, num_ranks: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of rank 0's micro-batches, and the gradients of the sum over all ranks' ones."""
    model, losses = make_model(kind).train(), []
    for rank in range(num_ranks):
        for micro in range(K):
            batch = batch_of(rank, micro)
            logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1].float()
            loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")
            loss.backward()
            losses += [loss.item()] * (rank == 0)
    return losses, {name: parameter.grad for name, parameter in model.named_parameters()}


def toolkit(strategy: str, kind: str, precision: str) -> tuple[list[float], dict[str, torch.Tensor], str]:
    from accelerate import Accelerator

    from toolkit import sharding_kwargs
    from toolkit.objectives.causal_lm import CausalLM
    from toolkit.objectives.losses import fused_linear_cross_entropy
    from toolkit.sharding.blocks.checkpointing import Checkpointing
    from toolkit.sharding.fsdp2.shards import whole_tensor
    from toolkit.sharding.launched import accumulation_plugin
    from toolkit.sharding.plugin import reset_accelerate

    meet()
    reset_accelerate()
    fused_linear_cross_entropy.MIN_CHUNK_TOKENS, fused_linear_cross_entropy.CHUNK_ENTRIES = 10, 1
    more = {"checkpointing": Checkpointing(1)} if strategy == "zero3" else {}
    accelerator = Accelerator(
        mixed_precision=precision,
        gradient_accumulation_plugin=accumulation_plugin(K),
        **sharding_kwargs(strategy, **more),
    )
    model = make_model(kind)
    objective = CausalLM(model, packed=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    told = objective.check_head_loss(model, accelerator.device, precision != "no")
    model.train()
    losses = []
    for micro in range(K):
        with accelerator.accumulate(model):
            loss = objective.loss_sum(model, batch_of(accelerator.process_index, micro))
            losses.append(loss.item())
            accelerator.backward(loss * K * accelerator.num_processes)
    named = {name.removeprefix("module."): parameter.grad for name, parameter in model.named_parameters()}
    return losses, {name: whole_tensor(gradient).float() for name, gradient in named.items()}, told


def offloaded(whole: bool) -> list[float]:
    """Losses of four steps with the optimizer's state in host memory."""
    from accelerate import Accelerator

    from toolkit import sharding_kwargs
    from toolkit.objectives.causal_lm import CausalLM
    from toolkit.sharding.plugin import reset_accelerate

    meet()
    reset_accelerate()
    plugins = sharding_kwargs("zero3", offload="optimizer")
    accelerator = Accelerator(**plugins)
    model = make_model("tied and capped")
    objective = CausalLM(model, packed=False)
    if whole:
        objective.head_loss = "asked for by this test"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for step in range(4):
        loss = objective.loss_sum(model, batch_of(accelerator.process_index, 2 * step))
        losses.append(loss.item())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    plugins["fsdp_plugin"].close()
    return losses


def all_cases() -> tuple[dict[Any, Any], tuple[list[float], list[float]]]:
    return {case: toolkit(*case) for case in CASES}, (offloaded(False), offloaded(True))


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.grid), 2])
def found(request: pytest.FixtureRequest) -> tuple[int, Any]:
    return request.param, run_on_ranks(all_cases, request.param)


def test_gradients_are_the_plain_ones(found: Any) -> None:
    for case in CASES:
        require_plain(*found, case)


def require_plain(num_ranks: int, ranks: Any, case: tuple[str, str, str]) -> None:
    losses, gradients = plain(case[1], num_ranks)
    tolerance = 1e-6 if case[2] == "no" else 3e-2
    assert ranks[0][0][case][0] == pytest.approx(losses, rel=tolerance)
    for by_case, _ in ranks:
        _, own, told = by_case[case]
        assert told == "from the head's inputs, logits of 10 tokens at a time"
        assert own.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert float((own[name] - gradient).norm()) <= tolerance * float(gradient.norm()), (case, name)
    if num_ranks == 2:
        assert ranks[1][0][case][0][1] == 0.0, "no target at all"


def test_offloaded_state_takes_the_same_steps(found: Any) -> None:
    for _, (own, whole) in found[1]:
        assert own == pytest.approx(whole, rel=1e-6)
        assert own[-1] != own[0]
