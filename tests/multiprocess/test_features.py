"""What must work with every sharded model: checkpointed dropout, frozen and tiny parameters, LoRA, compile, evaluation.

Each case is compared with a plain model on one process; all cases of a number of ranks share one start.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate.utils import TorchDynamoPlugin
from peft import LoraConfig, get_peft_model
from support import tiny
from support.backend import accelerated
from support.plain_loop import Trained, plain_loop
from support.ranks import run_on_ranks
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from toolkit.sharding import Checkpointing, Compilation, compile_blocks, plan_units

STEPS = 4
ROWS = 8
OLD_ACCELERATE = version("accelerate").startswith("1.13.")


llama = functools.partial(tiny.llama, num_hidden_layers=4)


def gpt2_with_dropout() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    dropout = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}
    return GPT2LMHeadModel(GPT2Config(vocab_size=131, n_embd=48, n_layer=4, n_head=4, n_positions=32, **dropout))


def lora_llama(dropout: float = 0.0, rank: int = 2) -> Any:
    model = get_peft_model(
        llama(), LoraConfig(r=rank, lora_dropout=dropout, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros at first: then lora_A would have no gradient
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


class TwoSmallHeads(nn.Module):
    """Parameters of one row: on more ranks most of their shards are empty."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.one = nn.Linear(16, 1)
        self.two = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.one(x) + 2 * self.two(x)


def frozen_llama() -> LlamaForCausalLM:
    model = llama()
    model.model.embed_tokens.weight.requires_grad_(False)
    for block in model.model.layers[:2]:
        block.requires_grad_(False)
    return model


def token_rows(step: int) -> torch.Tensor:
    return torch.randint(0, 131, (ROWS, 16), generator=torch.Generator().manual_seed(step))


def language_loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=rows, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), rows[:, 1:].flatten())


def head_loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return (model(rows[:, :16].float() / 131) - 1).square().mean()


MODELS = {
    "frozen": (frozen_llama, language_loss),
    "small heads": (TwoSmallHeads, head_loss),
    "tied": (lambda: llama(tie_word_embeddings=True), language_loss),
}
SPECIAL = ("frozen", "small heads")
"""Tried under every strategy; tied ones and adapters are in test_all_pairs.py."""


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@functools.cache
def plain_run(name: str) -> Trained:
    make, loss_of = MODELS[name]
    model: Any = make()
    batches = [token_rows(step) for step in range(STEPS)]
    return plain_loop(model, batches, lambda rows: loss_of(model, rows), max_norm=0.3, optimizer=adamw(model))


def sharded_run(
    name: str, strategy: str, prepare_model: Callable[[Any], None] = lambda _: None, **kwargs: Any
) -> dict[str, Any]:
    accelerator = accelerated(strategy, **kwargs)
    make, loss_of = MODELS[name]
    model: Any = make()
    names = {id(p): n for n, p in model.named_parameters()}
    prepare_model(model)
    optimizer = adamw(model)
    asked = [names[id(p)] for p in optimizer.param_groups[0]["params"]]
    model, optimizer = accelerator.prepare(model, optimizer)
    inner = accelerator.unwrap_model(model)
    names = {id(p): n for n, p in inner.named_parameters()}
    bound = [names[id(p)] for p in optimizer.param_groups[0]["params"]]
    rows = ROWS // accelerator.num_processes
    mine = slice(accelerator.process_index * rows, (accelerator.process_index + 1) * rows)
    losses, norms = [], []
    for step in range(STEPS):
        model.eval()
        with torch.no_grad():  # an evaluation between steps must leave nothing gathered
            loss_of(model, token_rows(99)[mine])
        model.train()
        loss = loss_of(model, token_rows(step)[mine])
        accelerator.backward(loss)
        norms.append(float(whole(accelerator.clip_grad_norm_(model.parameters(), 0.3))))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    with torch.no_grad():
        loss_of(model, token_rows(99)[mine])
    kinds = {isinstance(p, DTensor) for p in inner.parameters()}
    state = accelerator.get_state_dict(model)
    return {
        "losses": losses,
        "norms": norms,
        "weights": {n: whole(p) for n, p in inner.named_parameters()},
        "state": {key: value.clone() for key, value in state.items()} if accelerator.is_main_process else {},
        "rebound": asked == bound,
        "distinct": len(bound) == len(set(bound)),
        "kinds": kinds,
    }


def runs_under_strategies() -> dict[tuple[str, str], dict[str, Any]]:
    # On one rank nothing is sharded, whatever the strategy; hybrid needs two groups of two.
    strategies = {1: ["zero3"], 2: ["zero1", "zero2", "zero3"], 4: ["zero3", "hybrid"]}[int(os.environ["WORLD_SIZE"])]
    return {(name, strategy): sharded_run(name, strategy) for name in SPECIAL for strategy in strategies}


def test_models_with_special_parameters_train_as_the_plain_model(on_2_ranks: list[dict[str, Any]]) -> None:
    require_plain([found["strategies"] for found in on_2_ranks])


@pytest.mark.grid
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_models_with_special_parameters_on_other_numbers_of_ranks(num_ranks: int) -> None:
    require_plain(run_on_ranks(runs_under_strategies, num_ranks))


def require_plain(of_ranks: list[dict[tuple[str, str], dict[str, Any]]]) -> None:
    for rank, found in enumerate(of_ranks):
        for (name, strategy), run in found.items():
            plain = plain_run(name)
            where = f"{name}, {strategy}, rank {rank} of {len(of_ranks)}"
            assert run["rebound"], f"{where}: the optimizer's parameters are not those of the model"
            assert run["distinct"], f"{where}: several parameters became one"
            assert run["kinds"] == {True}, f"{where}: a parameter stayed gathered after an evaluation"
            assert run["losses"] == pytest.approx(plain.losses, rel=1e-6), where
            assert run["norms"] == pytest.approx(plain.norms, rel=1e-5), where
            for parameter, value in plain.weights.items():
                torch.testing.assert_close(run["weights"][parameter], value, rtol=0, atol=2e-5, msg=where)
            if rank == 0:
                assert all(torch.equal(run["state"][key], value) for key, value in run["weights"].items()), where


def gradients(make: Any, strategy: str, checkpointing: Any, micro_batches: int = 2) -> dict[str, Any]:
    """Gradients of two micro-batches with dropout, from the same random state."""
    accelerator = accelerated(strategy, checkpointing=checkpointing)
    model = make()
    model, _ = accelerator.prepare(model, adamw(model))
    model.train()
    inner = accelerator.unwrap_model(model)
    calls = [0]
    block = next(m for n, m in inner.named_modules() if n.endswith((".h.0.mlp", "layers.0.mlp")))
    block.register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    torch.manual_seed(7 + accelerator.process_index)
    for micro in range(micro_batches):
        loss = language_loss(model, token_rows(micro)[:2])
        accelerator.backward(loss)
    found = {n: whole(p.grad) for n, p in inner.named_parameters() if p.grad is not None}
    return {"gradients": found, "loss": loss.item(), "calls": calls[0]}


def checkpointed_gradients() -> dict[str, dict[str, Any]]:
    found = {}
    for name, make in (("gpt2", gpt2_with_dropout), ("lora", lambda: lora_llama(dropout=0.1))):
        for strategy in ("zero3", "zero1"):
            found[f"{name} {strategy} none"] = gradients(make, strategy, None)
            found[f"{name} {strategy} all"] = gradients(make, strategy, Checkpointing(every=1))
            found[f"{name} {strategy} second"] = gradients(make, strategy, Checkpointing(every=2))
            found[f"{name} {strategy} offload"] = gradients(make, strategy, Checkpointing(every=1, offload=True))
    return found


def test_checkpointed_dropout_gives_the_same_gradients(on_2_ranks: list[dict[str, Any]]) -> None:
    for found in (of_rank["dropout"] for of_rank in on_2_ranks):
        for key, run in found.items():
            reference = found[key.rpartition(" ")[0] + " none"]
            assert run["calls"] == (2 if key.endswith("none") else 4), f"{key}: the first block must run again"
            assert run["loss"] == reference["loss"], key
            assert set(run["gradients"]) == set(reference["gradients"])
            for name, gradient in reference["gradients"].items():
                assert gradient.abs().max() > 0, (key, name)
                assert torch.equal(run["gradients"][name], gradient), (key, name)


def compiled_losses() -> dict[str, Any]:
    found = {}
    for strategy in ("zero3", "zero2"):
        plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=True)
        found[strategy] = sharded_run("tied", strategy, dynamo=plugin)["losses"]
    return found


def own_compiled_losses() -> dict[str, tuple[list[float], int, str | None]]:
    """Losses, graphs and what failed, of blocks compiled by ourselves."""
    compilation = Compilation("aot_eager")
    ours: dict[str, Any] = {"compilation": compilation}
    everything = {**ours, "checkpointing": Checkpointing(1, offload=True), "offload": "optimizer"}
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "ddp": ("ddp", {"prepare_model": lambda model: compile_blocks(model, plan_units(model), compilation)}),
        "zero1": ("zero1", ours),
        "zero2, checkpointed": ("zero2", {**ours, "checkpointing": Checkpointing(1)}),
        "zero3, checkpoints and state offloaded": ("zero3", everything),
    }
    if int(os.environ["WORLD_SIZE"]) == 4:
        cases = {"hybrid": ("hybrid", ours)}
    found = {}
    for name, (strategy, kwargs) in cases.items():
        counters.clear()
        losses = sharded_run("tied", strategy, **kwargs)["losses"]
        found[name] = (losses, counters["stats"]["unique_graphs"], compilation.problem)
    return found


@pytest.mark.skipif(OLD_ACCELERATE, reason="compile_regions of 1.13 cannot copy FSDP2 modules")
def test_compiled_blocks_train_the_same(on_2_ranks: list[dict[str, Any]]) -> None:
    plain = plain_run("tied")
    for losses in on_2_ranks[0]["compiled"].values():
        assert losses == pytest.approx(plain.losses, rel=1e-5)


def test_one_graph_for_all_blocks_under_every_strategy(on_2_ranks: list[dict[str, Any]]) -> None:
    require_one_graph(on_2_ranks[0]["own compiled"])


@pytest.mark.grid
def test_one_graph_for_all_blocks_on_four_ranks() -> None:
    require_one_graph(run_on_ranks(own_compiled_losses, 4)[0])


def require_one_graph(found: dict[str, tuple[list[float], int, str | None]]) -> None:
    plain = plain_run("tied")
    for name, (losses, num_graphs, problem) in found.items():
        assert losses == pytest.approx(plain.losses, rel=1e-5), name
        # Training, evaluation, and a forward without gradients in training mode, whatever the number of blocks.
        assert num_graphs == 3, name
        assert problem is None


def precisions() -> dict[str, dict[str, Any]]:
    found = {}
    for name, strategy, precision, held in (
        ("bf16", "zero3", "bf16", torch.float32),
        ("bf16 checkpoint", "zero2", "bf16", torch.bfloat16),
        ("pure bf16", "zero3", "no", torch.bfloat16),
        ("float32", "zero1", "no", torch.float32),
    ):
        accelerator, model = accelerated(strategy, precision=precision), llama().to(held)
        model, _ = accelerator.prepare(model, adamw(model))
        computed: list[torch.dtype] = []
        model.model.layers[1].mlp.register_forward_hook(lambda _m, _i, out, seen=computed: seen.append(out.dtype))
        logits = model(input_ids=token_rows(0), use_cache=False).logits
        accelerator.backward(logits.square().mean())
        parameters = list(model.parameters())
        found[name] = {
            "logits": logits.dtype,
            "compute": computed[0],
            "held": {p.dtype for p in parameters},
            "gradients": {p.grad.dtype for p in parameters if p.grad is not None},
        }
    return found


def test_what_is_computed_held_and_returned_in_which_type(on_2_ranks: list[dict[str, Any]]) -> None:
    found = on_2_ranks[0]["precisions"]
    f32, b16 = torch.float32, torch.bfloat16
    mixed = {"logits": f32, "compute": b16, "held": {f32}, "gradients": {f32}}
    assert found["bf16"] == mixed
    assert found["bf16 checkpoint"] == mixed, "weights of a 16-bit checkpoint get float32 masters"
    assert found["pure bf16"] == {"logits": f32, "compute": b16, "held": {b16}, "gradients": {b16}}
    assert found["float32"] == {"logits": f32, "compute": f32, "held": {f32}, "gradients": {f32}}


def all_on_2_ranks() -> dict[str, Any]:
    return {
        "strategies": runs_under_strategies(),
        "dropout": checkpointed_gradients(),
        "precisions": precisions(),
        "own compiled": own_compiled_losses(),
        "compiled": {} if OLD_ACCELERATE else compiled_losses(),
    }


@pytest.fixture(scope="module")
def on_2_ranks() -> list[dict[str, Any]]:
    return run_on_ranks(all_on_2_ranks, 2)
