"""The tiny Llama of the tests, in memory or in a folder as a user would have it, and a recipe that trains it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedTokenizerFast

from support.cases import cases
from toolkit.data.tokens.tokenizer import _train_byte_pairs
from toolkit.recipe.objectives.objective_section import ObjectiveSection

VOCAB_SIZE = 320
SIZES: dict[str, int] = cases(__file__)["SIZES"]
"""Of models of every family; each family has some of these fields."""


OF_KIND: dict[str, dict[str, Any]] = cases(__file__)["OF_KIND"]
"""What else the families need, by their names in transformers."""

_UNSET = {
    "falcon": {"head_dim"},
    "funnel": {"num_hidden_layers", "hidden_size", "num_attention_heads"},
    "prophetnet": {"num_hidden_layers"},
    "xlnet": {"max_position_embeddings"},
    "xlstm": {"qk_head_dim", "v_head_dim"},
}


def tiny_config(kind: str) -> PretrainedConfig:
    """The configuration of a small model of any family, by its name in transformers."""
    own = AutoConfig.for_model(kind)
    fields = {name: value for name, value in SIZES.items() if _has(own, name) and name not in _UNSET.get(kind, ())}
    return type(own)(**(fields | OF_KIND.get(kind, {})))  # type: ignore[no-any-return]


def _has(config: PretrainedConfig, field: str) -> bool:
    try:
        return hasattr(config, field)
    except RuntimeError:  # gemma4's, which may differ from layer to layer
        return False


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


def with_sections(values: dict[str, Any], sections: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A recipe's values, with fields of its sections added or replaced."""
    return {**values, **{name: {**values.get(name, {}), **fields} for name, fields in sections.items()}}


NEEDED: dict[str, dict[str, Any]] = {
    "distillation": {"teacher": "-"},
    "grpo": {"max_new_tokens": 8, "group_size": 2, "rewards": [{"name": "any", "match": "a"}]},
}


def objective_of(kind: str) -> ObjectiveSection:
    """An objective with the settings that it must have."""
    return ObjectiveSection.model_validate({"kind": kind, **NEEDED.get(kind, {})})


def unfinish(run: Path) -> None:
    """Makes a finished run one that was cut off behind its last checkpoint."""
    for name in ("finished.json", "report.html"):
        (run / name).unlink(missing_ok=True)
