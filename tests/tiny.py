"""Tiny models and recipes for tests, saved as a user would have them: in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from toolkit.data.tokenizer import _train_byte_pairs

VOCAB_SIZE = 320


def save_llama(folder: Path, texts: list[str], *, tied: bool, layers: int = 2, seed: int = 0) -> Path:
    """A Llama of about 50,000 parameters with its own tokenizer, saved by transformers."""
    tokenizer: PreTrainedTokenizerFast = _train_byte_pairs(iter(texts), VOCAB_SIZE)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
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
