"""Tiny causal language models that compute in bfloat16, as transformers loads them in that type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "n_embd": 16,
    "n_head": 2,
    "n_layer": 2,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
}


def save_tiny(kind: str, folder: Path) -> None:
    """Saves a model in float32, none of whose weights bfloat16 could hold."""
    own = AutoConfig.for_model(kind)
    torch.manual_seed(0)
    config = type(own)(**{name: value for name, value in SIZES.items() if hasattr(own, name)})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and ("gate" in name or "router" in name):
            nn.init.normal_(parameter)  # chooses clearly
        elif parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)


def loaded(folder: Path | str, dtype: torch.dtype) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.config.use_cache = False
    return model.eval()  # without dropout


def output_types(model: nn.Module) -> dict[str, torch.dtype]:
    """Fills as the model runs: of each module, by its path, the type of its first output."""
    found: dict[str, torch.dtype] = {}

    def look(path: str, output: Any) -> None:
        first = output if torch.is_tensor(output) else next((x for x in output if torch.is_tensor(x)), None)
        if first is not None:
            found.setdefault(path, first.dtype)

    for path, module in model.named_modules():
        if path:  # what leaves the model is float32, so that the loss is

            def hook(_module: nn.Module, _args: Any, output: Any, path: str = path) -> None:
                look(path, output if torch.is_tensor(output) or isinstance(output, tuple | list) else ())

            module.register_forward_hook(hook)
    return found
