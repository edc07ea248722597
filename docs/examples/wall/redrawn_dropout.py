"""torchtitan#1323, as in Accelerate 1.15: FSDP2's activation checkpointing draws dropout anew in backward.

`fsdp2_apply_ac` wraps the blocks with `preserve_rng_state=False`, so gradients belong to other masks than the loss.
(torchtitan had the same, and has mended it.) Accelerate has FSDP on GPUs alone; here its own code runs on CPU ranks,
told that they are for FSDP. The gradient norm of one step of GPT-2 next to that without checkpointing.
"""

from __future__ import annotations

import os

import torch
from _common import on_ranks, show, unequal_rows
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from transformers import GPT2Config, GPT2LMHeadModel

from toolkit import sharding_kwargs
from toolkit.sharding import Checkpointing

SPECIAL = {"attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
CONFIG = GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.5, **SPECIAL)


def norm(accelerator: Accelerator) -> float:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(CONFIG).train()
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    row = torch.tensor([unequal_rows(2)[accelerator.process_index]])
    torch.manual_seed(1 + accelerator.process_index)
    accelerator.backward(model(input_ids=row, labels=row).loss)
    return float(accelerator.clip_grad_norm_(model.parameters(), 1e9))


def stock(checkpointing: bool) -> float:
    os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = "GPT2Block"
    accelerator = Accelerator(cpu=True)
    AcceleratorState().fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", activation_checkpointing=checkpointing
    )
    AcceleratorState().distributed_type = PartialState().distributed_type = DistributedType.FSDP
    return norm(accelerator)


def ours() -> float:
    return norm(Accelerator(cpu=True, **sharding_kwargs("zero3", checkpointing=Checkpointing(1))))


if __name__ == "__main__":
    show("gradient norm", peer=on_ranks(stock, True), ours=on_ranks(ours), right=on_ranks(stock, False))
