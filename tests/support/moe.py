"""Tiny mixtures of experts, and a plain loop for a step of one with its balance loss, written out."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from support.cases import cases

TABLES = cases(__file__)
SIZES: dict[str, Any] = TABLES["SIZES"]
VOCAB_SIZE = SIZES["vocab_size"]
MODELS: dict[str, dict[str, Any]] = TABLES["MODELS"]


def mixture(kind: str, **fields: Any) -> Any:
    """A model of about 10,000 parameters, float32, the same each time; its routers choose clearly."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **MODELS[kind], **fields}))
    for name, parameter in model.named_parameters():
        if "gate.weight" in name or "router" in name:
            nn.init.normal_(parameter, std=1.0)
    return model.train()


def two_experts_alone(model: Any) -> Any:
    """Has a GPT-OSS choose its first two experts for every token."""
    for layer in model.model.layers:
        layer.mlp.router.bias.data = torch.tensor([40.0, 40.0, -40.0, -40.0])
    return model


def by_batched_mm(model: Any) -> Any:
    """Has transformers compute experts by its kernel for few tokens."""
    model.set_experts_implementation("batched_mm")
    return model


def micro_batches(number: int) -> list[dict[str, torch.Tensor]]:
    """Rows of unequal lengths, padded to 12 tokens; two a micro-batch, and one that is padding alone."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for i in range(number):
        lengths = torch.tensor([12 - i % 5, 3 + i % 4])
        ids = torch.randint(2, VOCAB_SIZE, (2, 12), generator=generator)
        real = torch.arange(12) < lengths[:, None]
        found.append(
            {
                "input_ids": ids.where(real, 0),
                "labels": ids.where(real, -100),
                "position_ids": torch.arange(12).repeat(2, 1),
                "lengths": lengths,
            }
        )
    return found


class Step:
    """What the plain loop finds: the loss, the balance loss, gradients by name, and shares of choices by layer."""

    def __init__(self, loss: float, balance: float, gradients: dict[str, torch.Tensor], shares: torch.Tensor) -> None:
        self.loss, self.balance, self.gradients, self.shares = loss, balance, gradients, shares


def plain_step(model: Any, windows: list[list[dict[str, torch.Tensor]]], coef: float, whole: bool) -> Step:
    """One step: all rows one after another, the balance loss a term like any other, autograd for the rest.

    Args:
        windows: of each rank, its micro-batches.
        whole: balance over the whole step; otherwise over all micro-batches so far, of all ranks.
    """
    top_k = 2
    rounds = list(zip(*windows, strict=True))  # micro-batches that the ranks run at the same time
    targets = sum(int((b["labels"][:, 1:] != -100).sum()) for window in windows for b in window)
    tokens = sum(int(b["lengths"].sum()) for window in windows for b in window)
    seen: list[list[torch.Tensor]] = []  # by round and layer: logits of the real tokens
    loss = torch.zeros(())
    for batches in rounds:
        of_round = []
        for batch in batches:
            logits, routed = _forward(model, batch)
            ce = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")
            loss = loss + ce / targets
            of_round.append(routed)
        seen.append([torch.cat(layers) for layers in zip(*of_round, strict=True)])
    extra, minimised, shares = torch.zeros(()), 0.0, []
    num_layers = len(seen[0])
    for layer in range(num_layers):
        experts = [chosen(model, of_round[layer], layer, top_k) for of_round in seen]
        everything = torch.cat(experts).sum(dim=0)
        shares.append(everything / everything.sum())
        for number, of_round in enumerate(seen):
            counted = torch.cat(experts if whole else experts[: number + 1])
            f = counted.sum(dim=0) / len(counted)
            probabilities = scores(model, of_round[layer])
            balance = len(f) * (probabilities.mean(dim=0) * f).sum()
            share = len(of_round[layer]) / tokens
            extra = extra + share * coef * balance / num_layers
            minimised += share * float(balance) / num_layers
    (loss + extra).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return Step(float(loss), minimised, gradients, torch.stack(shares))


def _forward(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits, and each layer's router logits of the real tokens, as transformers itself gives them."""
    inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "use_cache": False}
    output = model.model(**inputs, output_router_logits=True)
    logits = model.lm_head(output.last_hidden_state) / getattr(model.config, "logits_scaling", 1.0)
    real = (torch.arange(12) < batch["lengths"][:, None]).flatten()
    return logits, [layer.flatten(0, -2)[real] for layer in output.router_logits]


def scores(model: Any, logits: torch.Tensor) -> torch.Tensor:
    if model.config.model_type != "deepseek_v3":
        return logits.float().softmax(dim=-1)
    return logits.sigmoid() / logits.sigmoid().sum(dim=-1, keepdim=True)


def chosen(model: Any, logits: torch.Tensor, layer: int, top_k: int) -> torch.Tensor:
    """(tokens, experts), 1 for the experts of a token."""
    logits = logits.detach()
    if model.config.model_type == "deepseek_v3":
        bias = model.model.layers[layer].mlp.gate.e_score_correction_bias
        biased = logits.sigmoid() + bias
        # The better one of two groups of two experts, of which each token has both.
        groups = biased.view(-1, 2, 2).sum(dim=-1).argmax(dim=-1)
        indices = torch.stack([2 * groups, 2 * groups + 1], dim=-1)
    else:
        indices = logits.topk(top_k, dim=-1).indices
    return F.one_hot(indices, logits.shape[-1]).sum(dim=1).float()
