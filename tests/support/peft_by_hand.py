"""peft's own training loop, written out: what runs with adapters are compared with."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import peft
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoTokenizer

from support.texts import make_texts

ROWS_PER_STEP, SEED = 12, 3
TEXTS = [" ".join(text.split()[:16]) for text in make_texts(40, seed=1)]


def adapted(base: nn.Module, settings: dict[str, Any], seed: int = SEED) -> Any:
    """With peft's adapters, whose A is drawn as the toolkit draws it."""
    model = peft.get_peft_model(base, peft.LoraConfig(**{"task_type": "CAUSAL_LM", **settings}))
    for name, parameter in model.named_parameters():
        if ".lora_A." in name:
            of_name = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8]) >> 1
            uniform = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(of_name)) * 2 - 1
            parameter.data.copy_(uniform / math.sqrt(parameter.shape[1]))
    return model


def peft_loop(
    base: nn.Module, tokenizer_folder: Path, settings: dict[str, Any], num_steps: int, eps: float = 1e-8
) -> dict[str, Any]:
    """peft as its own documentation has it, row by row: losses, and the adapter at the end.

    Args:
        settings: arguments of `LoraConfig`.
    """
    return loop_of(adapted(base, settings), tokenizer_folder, num_steps, eps)


def loop_of(model: Any, tokenizer_folder: Path, num_steps: int, eps: float = 1e-8) -> dict[str, Any]:
    """As `peft_loop`, of a model that has its adapters."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=2e-2,
        eps=eps,
        foreach=False,
    )
    documents = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in TEXTS]
    losses = []
    for step in range(num_steps):
        batch = [torch.tensor([documents[(step * ROWS_PER_STEP + i) % len(documents)]]) for i in range(ROWS_PER_STEP)]
        count = sum(ids.shape[1] - 1 for ids in batch)
        total = 0.0
        for ids in batch:
            logits = model(input_ids=ids).logits[0, :-1]
            loss = F.cross_entropy(logits, ids[0, 1:], reduction="sum") / count
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return {"losses": losses, "adapter": peft.get_peft_model_state_dict(model, save_embedding_layers=False)}
