"""Tiny models and random rows that share samples."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from toolkit.data.samples.packing import best_fit, whole
from toolkit.data.samples.samples import TextSamples

VOCABULARY = 90
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCABULARY}


def qwen(attention: str) -> nn.Module:
    config = Qwen3Config(**SIZES, intermediate_size=64, num_key_value_heads=2, head_dim=8, max_position_embeddings=64)
    return Qwen3ForCausalLM._from_config(config, attn_implementation=attention)


def gpt2(attention: str) -> nn.Module:
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=VOCABULARY, n_positions=64)
    model = GPT2LMHeadModel._from_config(config, attn_implementation=attention)
    return model.eval()  # its dropout


class Documents:
    """Random rows; two thirds of the tokens are targets."""

    def __init__(self, count: int, seed: int = 0) -> None:
        draw = np.random.default_rng(seed)
        self.rows = [draw.integers(1, VOCABULARY, draw.integers(2, 30)) for _ in range(count)]
        self.targets = [np.append(False, draw.random(len(row) - 1) < 0.67) for row in self.rows]

    def __len__(self) -> int:
        return len(self.rows)

    def tokens(self, row: int, start: int = 0, stop: int | None = None) -> Any:
        return self.rows[row][start:stop], self.targets[row][start:stop]


def packed(rows: Documents) -> TextSamples:
    lengths = np.array([len(row) for row in rows.rows])
    pieces = whole(np.arange(len(rows)), lengths, 32)
    sample_of = best_fit(pieces.lengths(), 32)
    in_order = pieces.take(np.argsort(sample_of, kind="stable"))
    return TextSamples(rows, in_order, np.cumsum(np.bincount(sample_of)).tolist(), 32, True, 0)
