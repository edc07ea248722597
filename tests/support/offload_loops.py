"""One training run in two ways: ordinary FSDP2 mixed precision written out with torch alone, and the toolkit's offload.

Both of them return what must be equal bit for bit: every step's loss on this rank, its norm, and the weights.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRMSNorm

from support.backend import accelerated, close
from support.ranks import meet
from support.tiny import llama
from toolkit.sharding import Checkpointing, OffloadSettings
from toolkit.sharding.offload import engine_of, executors

STEPS = 4
VOCABULARY = 199  # odd: no dimension of the embeddings divides by 2
LAYERS = 3


@dataclass(frozen=True)
class Case:
    """What differs between runs; the rest (decay groups, a falling learning rate) is always there."""

    tied: bool = True
    max_norm: float | None = 0.8
    accumulation: int = 1
    checkpointing: bool = False
    prefetch: bool = False
    precision: str = "bf16"
    optimizer: str = "adamw"
    strategy: str = "zero3"
    freeze: str | None = None  # parameters whose name contains it
    forwards: int = 1  # before each backward
    poison: int | None = None  # the step whose loss is not a number
    unused: bool = False  # each block has parameters that no forward uses
    lora: bool = False  # rank 1: fewer rows than ranks
    evaluate: bool = False  # after every step
    compiled: bool = False  # each block
    partly: bool = False  # the last micro-batch's loss uses neither the last block nor the head
    kept: bool = False  # the authors keep the blocks' norms in float32; not in `ordinary`

    def __str__(self) -> str:
        plain = Case()
        told = [f"{k}={v}" for k, v in vars(self).items() if v != getattr(plain, k)]
        return ",".join(told) or "plain"


@dataclass
class Found:
    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


def blocks_of(model: Any) -> list[Any]:
    return list(model.get_base_model().model.layers if hasattr(model, "get_base_model") else model.model.layers)


class KeptNorms(LlamaForCausalLM):
    """Its authors keep the norms of its blocks in float32."""

    _keep_in_fp32_modules_strict: ClassVar = {"input_layernorm"}


class Norm(LlamaRMSNorm):
    """Computes in float32, and gives back what it was given."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = super().forward(hidden.float())
        return found.to(hidden.dtype)


def make_model(case: Case) -> Any:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS}
    model: Any = llama(**sizes, tie_word_embeddings=case.tied, use_cache=False)
    if case.unused:
        for block in model.model.layers:
            block.self_attn.unused = nn.Linear(16, 24)
    if case.lora:
        return get_peft_model(model, LoraConfig(r=1, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    if case.kept:
        model.__class__ = KeptNorms
        for block in model.model.layers:
            block.input_layernorm = Norm(model.config.hidden_size)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(case.freeze is None or case.freeze not in name)
    return model


def device() -> str:
    """Of the ranks: the GPU where `TEST_BACKEND` has one."""
    return "cuda" if "cuda" in os.environ.get("TEST_BACKEND", "") else "cpu"


def tokens(step: int, micro: int, forward: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + 10 * forward + dist.get_rank())
    # No text: the stream checker takes what is sent to "cpu" for memory of the host.
    return torch.randint(0, VOCABULARY, (2, 16), generator=generator).to(torch.device(device()))


def loss_of(model: nn.Module, case: Case, step: int, micro: int) -> torch.Tensor:
    losses = []
    for forward in range(case.forwards):
        ids = tokens(step, micro, forward)
        if case.partly and micro == case.accumulation - 1:
            hidden = model(input_ids=ids, output_hidden_states=True).hidden_states[-2]
            losses.append(hidden.float().square().mean())
            continue
        logits = model(input_ids=ids).logits
        losses.append(F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten()))
    loss = torch.stack(losses).mean()
    return loss * float("nan") if case.poison == step and dist.get_rank() == 0 else loss


@torch.no_grad()
def evaluate(model: nn.Module, case: Case) -> float:
    model.eval()
    loss = loss_of(model, replace(case, poison=None), 1000, 0).item()
    model.train()
    return loss


def make_optimizer(model: nn.Module, case: Case) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    if case.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=1e-1, momentum=0.9)
    return {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[case.optimizer](groups, lr=1e-2, fused=True)


def learning_rate(case: Case, step: int) -> float:
    return (1e-1 if case.optimizer == "sgd" else 1e-2) / (1 + 0.3 * step)


def prefetch_forward(model: nn.Module) -> None:
    """Each block asks for the next one's parameters before it runs itself."""
    blocks = blocks_of(model)
    model.set_modules_to_forward_prefetch([blocks[0]])
    for block, following in itertools.pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])


def ordinary(case: Case) -> Found:
    """Float32 shards, bf16 compute, float32 reduction, torch's optimizer right after backward."""
    meet()
    model = make_model(case)
    if case.checkpointing:
        for block in blocks_of(model):
            block.forward = checkpointed(block.forward)
    mesh = init_device_mesh(device(), (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if case.precision == "bf16" else None, reduce_dtype=torch.float32
    )
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=replace(policy, output_dtype=torch.float32))
    if case.prefetch:
        prefetch_forward(model)
    compile_blocks(model, case)
    optimizer = make_optimizer(model, case)
    losses, norms = [], []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(case, step)
        for micro in range(case.accumulation):
            if case.strategy == "zero1":  # gradients are summed whole, and reduced once
                model.set_requires_gradient_sync(micro == case.accumulation - 1)
            loss = loss_of(model, case, step, micro)
            (loss / case.accumulation).backward()
            losses.append(loss.item())
        norm = None
        if case.max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_norm).full_tensor()
            norms.append(norm.item())
        if norm is None or norm.isfinite():
            optimizer.step()
        optimizer.zero_grad()
        if case.evaluate:
            losses.append(evaluate(model, case))
            for module in model.modules():  # FSDP2 leaves the root gathered after a forward without backward
                if isinstance(module, FSDPModule):
                    module.reshard()
    return Found(losses, norms, {name: p.full_tensor().detach().cpu() for name, p in model.named_parameters()})


def compile_blocks(model: nn.Module, case: Case) -> None:
    for block in blocks_of(model) if case.compiled else ():
        block.compile(backend="aot_eager")


def checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


def prepare(case: Case, offload: Any, model: nn.Module | None = None, **kwargs: Any) -> tuple[Any, Any, Any]:
    """The stock Accelerator with the toolkit's two arguments: (accelerator, model, optimizer)."""
    settings = {"offload": offload, "checkpointing": Checkpointing(1) if case.checkpointing else None, **kwargs}
    accelerator = accelerated(case.strategy, case.accumulation, case.precision, **settings)
    model = model or make_model(case)
    prepared = accelerator.prepare(model, make_optimizer(model, case))
    if case.prefetch:
        prefetch_forward(prepared[0])
    compile_blocks(prepared[0], case)
    return accelerator, *prepared


def train(
    case: Case, accelerator: Any, model: Any, optimizer: Any, steps: range = range(STEPS)
) -> tuple[list[float], list[float]]:
    """A stock loop; losses and norms. Steps are not skipped by the loop: that is the engine's part."""
    losses, norms = [], []
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(case, step)
        for micro in range(case.accumulation):
            with accelerator.accumulate(model):
                loss = loss_of(model, case, step, micro)
                accelerator.backward(loss)
                losses.append(loss.item())
                if accelerator.sync_gradients and case.max_norm is not None:
                    norm = accelerator.clip_grad_norm_(model.parameters(), case.max_norm)
                    norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
                optimizer.step()
                optimizer.zero_grad()
        if case.evaluate:
            losses.append(evaluate(model, case))
        for group in optimizer.param_groups:
            group["lr"] = 1e9  # a scheduler changes it while units are still being stepped
    return losses, norms


def masters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole float32 weights, as a checkpoint or an export sees them."""
    state = model.state_dict()
    host = {name: state[name].to(device()) for name, _ in model.named_parameters()}  # nccl gathers on the device
    return {name: tensor.full_tensor().detach().cpu().clone() for name, tensor in host.items()}


def offloaded(case: Case, executor: str = "cpu_torch", delay: float = 0.0, **settings: Any) -> Found:
    """The same run with the optimizer state offloaded.

    Args:
        delay: seconds that every unit's step takes longer, so that a forward that does not wait is caught.
    """
    executors.STREAM_CHUNK = 2048  # every unit passes through the device in several chunks
    accelerator, model, optimizer = prepare(case, OffloadSettings(executor=executor, **settings))
    if delay:
        slow_down(model, delay)
    losses, norms = train(case, accelerator, model, optimizer)
    weights = masters(model)
    compute = torch.bfloat16 if case.precision == "bf16" else torch.float32
    for name, parameter in model.named_parameters():  # what the next forward would gather
        assert torch.equal(parameter.full_tensor().cpu(), weights[name].to(parameter.dtype)), name
        assert parameter.dtype == compute or not parameter.requires_grad
        assert parameter.grad is None
    close(accelerator)
    return Found(losses, norms, weights)


def slow_down(model: nn.Module, seconds: float) -> None:
    """Every unit's step takes so much longer."""
    engine = engine_of(model)
    assert engine is not None
    for executor in set(engine._executors.values()):
        step = executor.step

        def late(unit_step: Any, step: Any = step) -> Any:
            time.sleep(seconds)
            return step(unit_step)

        executor.step = late  # type: ignore[method-assign]


def differences(found: Found, expected: Found) -> list[str]:
    """What is not equal bit for bit."""
    told = []
    if not same(found.losses, expected.losses):
        told.append(f"losses {found.losses} != {expected.losses}")
    if not same(found.norms, expected.norms):
        told.append(f"norms {found.norms} != {expected.norms}")
    told += [name for name in expected.weights if not torch.equal(found.weights[name], expected.weights[name])]
    return told


def same(a: list[float], b: list[float]) -> bool:
    return torch.equal(torch.tensor(a).nan_to_num(1e30), torch.tensor(b).nan_to_num(1e30))


def bf16_ulps(found: Found, expected: Found) -> int:
    """Largest distance of the weights, rounded to bf16, counted in bf16 numbers between them."""
    far = 0
    for name, weight in expected.weights.items():
        a, b = (_ordered(w.bfloat16()) for w in (found.weights[name], weight))
        far = max(far, int((a - b).abs().max()))
    return far


def _ordered(values: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the bf16 numbers, neighbours one apart."""
    bits = values.view(torch.int16).to(torch.int32)
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)
