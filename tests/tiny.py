"""The tiny Llama of the tests, in memory or in a folder as a user would have it, and a recipe that trains it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedTokenizerFast

from toolkit.data.tokenizer import _train_byte_pairs

VOCAB_SIZE = 320
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
"""Of models of every family; each family has some of these fields."""


def tiny_config(kind: str) -> PretrainedConfig:
    """The configuration of a small model of any family, by its name in transformers."""
    own = AutoConfig.for_model(kind)
    return type(own)(**{name: value for name, value in SIZES.items() if hasattr(own, name)})  # type: ignore[no-any-return]


def llama(attention: str | None = None, *, seed: int = 0, **fields: Any) -> LlamaForCausalLM:
    """A float32 Llama of about 28,000 parameters: two blocks, heads of width 8, an odd vocabulary, untied.

    Args:
        attention: transformers' name of the implementation; None leaves the choice to transformers.
        fields: of its configuration, where a test needs others.
    """
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 64}
    sizes |= {"vocab_size": 131, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**{**sizes, **fields})
    return LlamaForCausalLM._from_config(config, attn_implementation=attention)  # type: ignore[no-any-return]


def save_llama(folder: Path, texts: list[str], *, tied: bool, layers: int = 2, seed: int = 0) -> Path:
    """A Llama of about 50,000 parameters with its own tokenizer, saved by transformers."""
    tokenizer: PreTrainedTokenizerFast = _train_byte_pairs(iter(texts), VOCAB_SIZE)
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": layers}
    llama(seed=seed, **sizes, **special, tie_word_embeddings=tied).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def recipe_values(model: Path, data: Path, output: Path, cache: Path, **training: Any) -> dict[str, Any]:
    """A recipe of 20 steps on the tiny Llama; `training` replaces fields of that section."""
    return {
        "model": {"name_or_path": str(model)},
        "data": {"train": str(data), "max_length": 32, "cache_dir": str(cache), "shuffle": False},
        "optimizer": {"learning_rate": 2e-3, "weight_decay": 0.1},
        "schedule": {"kind": "linear", "warmup_steps": 4},
        "training": {"output_dir": str(output), "max_steps": 20, "max_grad_norm": 0.5, **training},
    }
