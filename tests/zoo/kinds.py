"""Every type of transformers that an objective can train, tiny, with rows of unequal lengths to train it on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support.every_model import causal_kinds
from support.every_multimodal import multimodal_kinds, small_config
from support.tiny import SIZES, tiny_config
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.auto import modeling_auto

LENGTHS = (17, 7, 13, 11, 16, 8, 14, 10)
"""Tokens of each row; two by two they fill a sample of `MAX_LENGTH`."""

UNPADDED = (24, 8, 16, 24, 8, 16, 24, 16)
"""Of rows that a run without packing does not pad, as it pads to multiples of 8; they have 128 targets.

Dividing by a power of two rounds nothing, so that gradients in bf16 do not depend on when a loss is divided.
"""

MAX_LENGTH = 24
CLASSES = ("a", "b", "c")
VOCABULARY = SIZES["vocab_size"]
END = 2
"""The token that ends a text."""

IN_PARTS = (
    *("audioflamingo3", "encoder-decoder", "fsmt", "musicflamingo", "seamless_m4t", "seamless_m4t_v2"),
    *("t5gemma", "t5gemma2", "ultravbert"),
)
"""Types whose sizes have names or parts of their own, besides all that read images or sound."""

AUTO: dict[str, Any] = {
    "causal_lm": AutoModelForCausalLM,
    "preference": AutoModelForCausalLM,
    "sequence_classification": AutoModelForSequenceClassification,
    "reward": AutoModelForSequenceClassification,
    "token_classification": AutoModelForTokenClassification,
    "seq2seq": AutoModelForSeq2SeqLM,
}
"""By objective, the class of transformers that builds the model."""


def kinds_of(objective: str) -> list[str]:
    """Names of the types of an objective, as far as this version of transformers has them."""
    found: Callable[[str], list[str]] = lambda name: [  # noqa: E731
        kind for kind in getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES") if kind in CONFIG_MAPPING
    ]
    if objective in ("causal_lm", "preference"):
        return causal_kinds()
    if objective == "reward":  # what writes text, and has a classifier
        return [kind for kind in found("SEQUENCE_CLASSIFICATION") if kind in causal_kinds()]
    names = {"sequence_classification": "SEQUENCE_CLASSIFICATION", "token_classification": "TOKEN_CLASSIFICATION"}
    return found(names.get(objective, "SEQ_TO_SEQ_CAUSAL_LM"))


def save_tiny(kind: str, objective: str, folder: Path) -> None:
    """Saves a model in float32 with its tokenizer, whose weights are large enough to tell tokens apart."""
    torch.manual_seed(0)
    in_parts = kind in IN_PARTS or kind in multimodal_kinds()
    config = _without_dropout(small_config(kind) if in_parts else tiny_config(kind))
    config.classifier_dropout = 0.0  # which transformers takes for 0.1 if it isn't there
    if objective in ("sequence_classification", "token_classification"):
        config.num_labels = len(CLASSES)
        config.id2label = dict(enumerate(CLASSES))
        config.label2id = {name: number for number, name in enumerate(CLASSES)}
    if objective == "reward":
        config.num_labels = 1
    starts = objective in ("seq2seq", "sequence_classification") and config.is_encoder_decoder
    if starts and not (getattr(config, "decoder_start_token_id", None) or VOCABULARY) < VOCABULARY:
        config.decoder_start_token_id = 0
    model = AUTO[objective].from_config(config, dtype=torch.float32)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.7 * module.in_features**-0.5)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.5)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and ("gate" in name or "router" in name):
            # Chooses clearly, and is not saturated where it is wide, as Zaya's of 256.
            nn.init.normal_(parameter, std=min(1.0, 32 / parameter.shape[-1]))
        elif parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    words = {"<pad>": 0, "<s>": 1, "</s>": END, "<unk>": 3} | {f"t{i}": i for i in range(4, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if objective == "sequence_classification":  # BART's reads the last token that ends a text
        tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", END)])
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder / "tokenizer")


def _without_dropout(config: PretrainedConfig) -> PretrainedConfig:
    for name, value in dict(vars(config)).items():
        if ("drop" in name or "jitter" in name) and isinstance(value, float):
            setattr(config, name, 0.0)
        if isinstance(value, PretrainedConfig):
            _without_dropout(value)
    return config


Rows = list[dict[str, Any]]
"""Rows of tokens: `ids` with `label`, `tags` or `target`, or `prompt`, `chosen` and `rejected`."""


def rows_of(objective: str, lengths: tuple[int, ...] = LENGTHS) -> Rows:
    """Eight rows of unequal lengths."""
    generator = torch.Generator().manual_seed(1)

    def draw(count: int) -> list[int]:
        return torch.randint(4, VOCABULARY, (count,), generator=generator).tolist()

    rows: Rows = []
    for number, length in enumerate(lengths):
        if objective in ("preference", "reward"):
            # Two prompts, their completions and the tokens that end them are as long as the row.
            asked = 1 + (length >= 10)
            written = length - 2 * asked - 2
            sides = {"chosen": draw(written // 3), "rejected": draw(written - written // 3)}
            rows.append({"prompt": draw(asked), **sides})
        else:
            ids = draw(length - 1)
            tags = [token % len(CLASSES) for token in ids]
            rows.append({"ids": ids, "label": number % 3, "tags": tags, "target": draw(3 + length % 5)})
    return rows


def write_rows(objective: str, path: Path, lengths: tuple[int, ...] = LENGTHS) -> None:
    """The rows as a file that the toolkit reads."""
    written = []
    for row in rows_of(objective, lengths):
        if objective in ("preference", "reward"):
            # A space before each completion, as no token holds one.
            written.append({"prompt": text(row["prompt"]), **{s: " " + text(row[s]) for s in ("chosen", "rejected")}})
        elif objective == "sequence_classification":
            written.append({"text": text(row["ids"]), "label": CLASSES[row["label"]]})
        elif objective == "token_classification":
            tags = [CLASSES[tag] for tag in row["tags"]]
            written.append({"tokens": [f"t{token}" for token in row["ids"]], "tags": tags})
        elif objective == "seq2seq":
            written.append({"source": text(row["ids"]), "target": text(row["target"])})
        else:
            written.append({"text": text(row["ids"])})
    path.write_text("".join(json.dumps(row) + "\n" for row in written), encoding="utf-8")


def text(ids: list[int]) -> str:
    return " ".join(f"t{token}" for token in ids)
