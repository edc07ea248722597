"""Small models that read more than text, each with a tokenizer in its folder; their language models are alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from support.cases import cases
from support.tiny import VOCAB_SIZE
from toolkit.data.tokens.tokenizer import _train_byte_pairs

FAMILIES: dict[str, dict[str, Any]] = cases(__file__)["FAMILIES"]
"""Type -> its configuration."""


def save_multimodal(kind: str, folder: Path, texts: list[str]) -> Path:
    """The model as transformers saves it, under the names of the hub's files."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **FAMILIES[kind])
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim == 1:  # a weight that nobody reads right would not show among ones and zeros
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    _train_byte_pairs(iter(texts), VOCAB_SIZE).save_pretrained(folder)
    return folder
