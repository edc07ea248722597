"""What transformers' own model learns from each row alone and unpadded: plain loops, without the toolkit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from zoo.kinds import AUTO, CLASSES, END, Rows

Loss = Callable[[Any, dict[str, Any]], tuple[torch.Tensor, int]]
"""Of a row: the summed loss, and its terms."""


def causal_lm(model: Any, row: dict[str, Any]) -> tuple[torch.Tensor, int]:
    ids = torch.tensor([[*row["ids"], END]])
    logits = model(input_ids=ids, use_cache=False).logits.view(1, ids.shape[1], -1)
    return F.cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="sum"), ids.shape[1] - 1


def sequence_classification(model: Any, row: dict[str, Any]) -> tuple[torch.Tensor, int]:
    logits = model(input_ids=torch.tensor([[*row["ids"], END]])).logits
    return F.cross_entropy(logits.float(), torch.tensor([row["label"]]), reduction="sum"), 1


def token_classification(model: Any, row: dict[str, Any]) -> tuple[torch.Tensor, int]:
    logits = model(input_ids=torch.tensor([row["ids"]])).logits
    return F.cross_entropy(logits[0].float(), torch.tensor(row["tags"]), reduction="sum"), len(row["tags"])


def seq2seq(model: Any, row: dict[str, Any]) -> tuple[torch.Tensor, int]:
    labels = torch.tensor([[*row["target"], END]])
    source = torch.tensor([row["ids"]])  # a tokenizer ends sources or does not: this one does not
    logits = model(input_ids=source, labels=labels, use_cache=False).logits
    return F.cross_entropy(logits[0].float(), labels[0], reduction="sum"), labels.shape[1]


def preference(model: Any, row: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """DPO with beta 0.1; `model.before` is the model before its first step."""
    sums = []
    for side in ("chosen", "rejected"):
        ids = torch.tensor([[*row["prompt"], *row[side], END]])
        first = len(row["prompt"])
        of_both = []
        for one in (model, model.before[0]):
            logits = one(input_ids=ids, use_cache=False).logits.view(1, ids.shape[1], -1).float().log_softmax(dim=-1)
            of_both.append(logits[0, :-1].gather(1, ids[0, 1:, None])[first - 1 :].sum())
        sums.append(of_both[0] - of_both[1].detach())
    return -F.logsigmoid(0.1 * (sums[0] - sums[1])), 1


def reward(model: Any, row: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """Bradley-Terry of the scores that transformers' classifier gives each completion alone."""
    scores = [
        model(input_ids=torch.tensor([[*row["prompt"], *row[side], END]])).logits.float().view(())
        for side in ("chosen", "rejected")
    ]
    return -F.logsigmoid(scores[0] - scores[1]), 1


LOSSES: dict[str, Loss] = {
    "causal_lm": causal_lm,
    "sequence_classification": sequence_classification,
    "token_classification": token_classification,
    "seq2seq": seq2seq,
    "preference": preference,
    "reward": reward,
}


def loaded(objective: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A model as transformers loads it in a type, ready to be trained; dropout is 0."""
    labels: dict[str, Any] = {"num_labels": 1} if objective == "reward" else {}
    if objective in ("sequence_classification", "token_classification"):
        labels = {"num_labels": len(CLASSES)}
    model = AUTO[objective].from_pretrained(folder, dtype=dtype, **labels)
    model.config.get_text_config().use_cache = False  # which Jamba's classifier fills and cannot use
    return model.train()


def trained(objective: str, model: nn.Module, windows: list[Rows], settings: dict[str, float]) -> list[float]:
    """Trains in place; the loss of each step, a mean over the terms of its rows."""
    if objective == "preference":
        model.before = (copy.deepcopy(model).eval(),)  # type: ignore[assignment]  # a tuple is no submodule
    optimizer = _adamw(model, settings)
    losses = []
    for rows in windows:
        found = [LOSSES[objective](model, row) for row in rows]
        count = sum(terms for _, terms in found)
        loss = torch.stack([loss for loss, _ in found]).sum() / count
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained_in_bf16(objective: str, folder: Path, windows: list[Rows], settings: dict[str, float]) -> tuple[Any, Any]:
    """The trained float32 weights, as a model, and the loss of each step.

    A copy that transformers loads in bf16 runs each row; its gradients are summed in float32, and step the weights. The
    copy has in float32 what its authors keep there (routers and norms of some types), and what follows the head (a
    scale or a cap of the logits), as the run has.
    """
    weights, copied = loaded(objective, folder), loaded(objective, folder, torch.bfloat16)
    if (head := copied.get_output_embeddings()) is not None:
        head.register_forward_hook(lambda _module, _args, logits: logits.float())
    pairs = list(zip(weights.parameters(), copied.parameters(), strict=True))
    optimizer = _adamw(weights, settings)
    losses = []
    for rows in windows:
        for weight, rounded in pairs:
            rounded.data.copy_(weight.data)
        total, count = 0.0, 0
        for row in rows:
            loss, terms = LOSSES[objective](copied, row)
            loss.backward()  # type: ignore[no-untyped-call]
            total, count = total + loss.item(), count + terms
            for weight, rounded in pairs:
                if rounded.grad is not None:
                    gradient = rounded.grad.float()
                    weight.grad = gradient if weight.grad is None else weight.grad + gradient
                    rounded.grad = None
        for weight, _ in pairs:
            if weight.grad is not None:
                weight.grad /= count
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / count)
    return weights, losses


def _adamw(model: nn.Module, settings: dict[str, float]) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=settings["learning_rate"],
        betas=(settings["beta1"], settings["beta2"]),
        eps=settings["eps"],
        weight_decay=0.0,
    )
