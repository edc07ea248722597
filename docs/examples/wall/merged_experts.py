"""Accelerate 1.15: `accelerate merge-weights` writes experts by names that no checkpoint of the hub has.

transformers 5 holds the experts of a layer as two tensors, and `save_pretrained` writes them one by one again, as on
the hub. The merged file of FSDP's shards has the two tensors. Servers and converters that look for the hub's names do
not find the experts (verl#6896 mends the same on its way to vLLM). Counted are the hub's tensors that the file lacks.
Accelerate has FSDP on GPUs alone; here its own code runs on CPU ranks, told that they are for FSDP.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from _common import SIZES, on_ranks, run_recipe, save, show, text, unequal_rows
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import merge_fsdp_weights
from safetensors import safe_open
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 64, "head_dim": 8}
ON_THE_HUB = {
    f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
    for layer in range(SIZES["num_hidden_layers"])
    for expert in range(EXPERTS["num_experts"])
    for part in ("gate", "up", "down")
}


def lacking(folder: str) -> int:
    found: set[str] = set()
    for path in Path(folder).glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found.update(file.keys())
    assert "model.norm.weight" in found
    return len(ON_THE_HUB - found)


def peer(model: str, folder: str) -> int:
    os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = "Qwen3MoeDecoderLayer"
    accelerator = Accelerator(cpu=True)
    AcceleratorState().fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", state_dict_type="SHARDED_STATE_DICT"
    )
    AcceleratorState().distributed_type = PartialState().distributed_type = DistributedType.FSDP
    loaded = Qwen3MoeForCausalLM.from_pretrained(model)
    accelerator.prepare(loaded, torch.optim.AdamW(loaded.parameters()))
    accelerator.save_state(folder)
    merge_fsdp_weights(f"{folder}/pytorch_model_fsdp_0", f"{folder}/merged")
    return lacking(f"{folder}/merged")


def main() -> None:
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SIZES, **EXPERTS}))
    with tempfile.TemporaryDirectory() as folder:
        saved = save(model, f"{folder}/model")
        recipe = {"model": {"name_or_path": saved}, "sharding": {"strategy": "zero3"}}
        recipe["data"] = {"train": [{"text": text(row)} for row in unequal_rows(8)], "packing": False}
        run_recipe(recipe, folder)
        ours = lacking(f"{folder}/run/export")
        show("experts lacking", peer=on_ranks(peer, saved, f"{folder}/state"), right=0, ours=ours)


if __name__ == "__main__":
    main()
