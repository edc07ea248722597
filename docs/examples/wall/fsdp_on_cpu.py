"""Accelerate 1.15, state.py: an FSDP plugin is dropped on CPU ranks, and nothing is said.

The share of the weights that the first of two ranks holds between steps, with the plugin as its guide makes it. A
rehearsal of the cluster's run on a laptop then rehearses DDP.
"""

from __future__ import annotations

from typing import Any

import torch
from _common import SIZES, on_ranks, show
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from transformers import LlamaConfig, LlamaForCausalLM

from toolkit import sharding_kwargs


def share(**arguments: Any) -> float:
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    whole = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    prepared, _ = Accelerator(cpu=True, **arguments).prepare(model, optimizer)
    local = (getattr(parameter, "_local_tensor", parameter) for parameter in prepared.parameters())
    return sum(part.numel() for part in local) / whole


def peer() -> float:
    wrap = "transformer_based_wrap"
    return share(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy=wrap))


def ours() -> float:
    return share(**sharding_kwargs("zero3"))


if __name__ == "__main__":
    show("share of the weights", peer=on_ranks(peer), ours=on_ranks(ours), right=0.5)
