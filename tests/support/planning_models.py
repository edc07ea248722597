"""Small models of several kinds as workloads: on the meta device to plan, or real to measure."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BertConfig,
    Ernie4_5_MoeConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    T5Config,
)

from toolkit.model.adapters.adapters import add_adapter
from toolkit.objectives.causal_lm import CausalLM
from toolkit.objectives.classification import SequenceClassification
from toolkit.planning.workload.workload import UNMASKED, Workload, register_unmasked
from toolkit.recipe.schema import AdapterSection

ROPE = {"num_attention_heads": 8, "num_key_value_heads": 2}
DECODERS = ("llama", "qwen2", "qwen3", "gpt2", "mixtral")
KINDS = (*DECODERS, "bert", "t5")
CLASSES = 4


def config_of(kind: str, layers: int, vocabulary: int = 2048, width: int = 128, dropout: float = 0.0) -> Any:
    """The configuration of one of KINDS."""
    common: dict[str, Any] = {"vocab_size": vocabulary, "hidden_size": width, "num_hidden_layers": layers}
    gated = {**common, **ROPE, "intermediate_size": 3 * width - 32}
    made = {
        "llama": lambda: LlamaConfig(**gated),
        "qwen2": lambda: Qwen2Config(**gated, tie_word_embeddings=True),
        "qwen3": lambda: Qwen3Config(**gated, head_dim=32),
        "mixtral": lambda: MixtralConfig(**{**gated, "intermediate_size": width}, num_local_experts=4),
        "ernie4_5_moe": lambda: Ernie4_5_MoeConfig(  # keeps its routers in float32
            **{**gated, "intermediate_size": width},
            moe_intermediate_size=width // 2,
            moe_num_experts=64,
            moe_k=2,
            moe_num_shared_experts=0,
            moe_layer_start_index=0,
        ),
        "gpt2": lambda: GPT2Config(
            vocab_size=vocabulary,
            n_embd=width,
            n_layer=layers,
            n_head=8,
            n_positions=512,
            bos_token_id=0,
            eos_token_id=0,
            attn_pdrop=dropout,
            embd_pdrop=dropout,
            resid_pdrop=dropout,
        ),
        "bert": lambda: BertConfig(
            **common,
            num_attention_heads=8,
            intermediate_size=4 * width,
            num_labels=CLASSES,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        ),
        "t5": lambda: T5Config(
            vocab_size=vocabulary,
            d_model=width,
            d_ff=2 * width,
            d_kv=32,
            num_layers=layers,
            num_heads=8,
            dropout_rate=dropout,
            decoder_start_token_id=0,
            pad_token_id=0,
            tie_word_embeddings=True,
        ),
    }[kind]()
    made.use_cache = False
    return made


def build(config: Any, *, meta: bool = True, dtype: torch.dtype = torch.float32, attention: str | None = None) -> Any:
    """The model of a configuration, on the meta device or with weights."""
    auto = {"bert": AutoModelForSequenceClassification, "t5": AutoModelForSeq2SeqLM}.get(
        config.model_type, AutoModelForCausalLM
    )
    register_unmasked()
    own = "sdpa" if config.model_type in ("bert", "t5") else UNMASKED
    make = partial(auto.from_config, config, dtype=dtype, attn_implementation=attention or own)
    if not meta:
        torch.manual_seed(0)
        return make()
    with init_empty_weights(include_buffers=False):
        model = make()
    model.tie_weights()
    return model


class TextToText:
    """The model's own loss."""

    unit = "tokens"

    def loss_sum(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = model(**batch, use_cache=False).loss
        return loss


def of_whole_logits(model: nn.Module) -> CausalLM:
    """The head's loss leaves out targets that do not count; on fake tensors it cannot know which and keeps them all."""
    objective = CausalLM(model, packed=False)
    objective.head_loss = "as asked by a test"
    return objective


def objective_of(kind: str, whole_logits: bool = False) -> Callable[[nn.Module], Any]:
    if kind in (*DECODERS, "ernie4_5_moe") and whole_logits:
        return of_whole_logits
    if kind == "t5":
        return lambda _model: TextToText()
    return (lambda model: SequenceClassification(model, CLASSES)) if kind == "bert" else partial(CausalLM, packed=False)


def batch_of(kind: str, tokens: int, vocabulary: int, rows: int) -> dict[str, torch.Tensor]:
    """(B, T) of random tokens."""
    ids = torch.randint(1, vocabulary, (rows, tokens))
    if kind == "bert":
        mask = torch.ones_like(ids)
        mask[0, -1] = 0  # a batch that is padded: transformers drops a mask of ones
        labels = torch.zeros(rows, dtype=torch.long)
        return {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids), "labels": labels}
    batch = {"input_ids": ids, "labels": ids.clone()}
    return batch if kind == "t5" else {**batch, "position_ids": torch.arange(tokens).repeat(rows, 1)}


def workload(
    kind: str,
    *,
    precision: str = "bf16",
    tokens: int = 64,
    layers: int = 2,
    lora: bool = False,
    meta: bool = True,
    dtype: torch.dtype = torch.float32,
    whole_logits: bool = False,
    **config: Any,
) -> Workload:
    """A workload of one of KINDS."""
    shape = config_of(kind, layers, **config)
    model = build(shape, meta=meta, dtype=dtype)
    if lora:
        model = add_adapter(model, AdapterSection(kind="lora", r=8), None)
    batch = partial(batch_of, kind, tokens, shape.vocab_size)
    return Workload(model, objective_of(kind, whole_logits), batch, precision, tokens)
