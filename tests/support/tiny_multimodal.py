"""Small models that read more than text, each with a tokenizer in its folder; their language models are alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from support.tiny import VOCAB_SIZE
from toolkit.data.tokens.tokenizer import _train_byte_pairs

TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 0,
}
EYES = {"hidden_size": 16, "intermediate_size": 24, "patch_size": 14}
CLIP = {**EYES, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28}
QWEN = {**EYES, "depth": 2, "num_heads": 2, "out_hidden_size": 32}
AXES = {"rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2]}}
MARKS = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 3, "vision_end_token_id": 4}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}


def _beside(language: str, eyes: str | None = None, **fields: Any) -> dict[str, Any]:
    vision = CLIP if eyes is None else {**CLIP, "model_type": eyes}
    return {"text_config": {**TEXT, "model_type": language}, "vision_config": vision, "image_token_id": 5, **fields}


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "text_config": {**TEXT, **DELTA, "layer_types": ["linear_attention", "full_attention"]},
        "vision_config": {**QWEN, "num_position_embeddings": 16},
        **MARKS,
    },
    "qwen3_vl": {
        "text_config": {**TEXT, **AXES},
        "vision_config": {**QWEN, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        **MARKS,
    },
    "qwen3_vl_moe": {
        "text_config": {
            **TEXT,
            **AXES,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "router_aux_loss_coef": 0.0,
        },
        "vision_config": {**QWEN, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        **MARKS,
    },
    "mistral3": _beside("mistral", "pixtral"),
    "gemma3": {
        "text_config": {**TEXT, "sliding_window": 16},
        "vision_config": CLIP,
        "mm_tokens_per_image": 4,
        "image_token_index": 5,
        "boi_token_index": 3,
        "eoi_token_index": 4,
    },
    "llama4": {
        "text_config": {**TEXT, "intermediate_size_mlp": 48, "num_local_experts": 2, "num_experts_per_tok": 1},
        "vision_config": {
            **CLIP,
            "intermediate_size": 64,
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
        },
        "image_token_index": 5,
    },
    "qwen2_5_vl": {"text_config": {**TEXT, **AXES}, "vision_config": QWEN, **MARKS},
    "glm4v": {
        "text_config": {**TEXT, **AXES},
        "vision_config": {**QWEN, "image_size": 28},
        **MARKS,
        "image_start_token_id": 3,
        "image_end_token_id": 4,
    },
    "llava": _beside("llama", "clip_vision_model", image_token_index=5),
    "idefics3": _beside("llama", scale_factor=2),
    "smolvlm": _beside("llama", scale_factor=2),
    "internvl": {
        **_beside("qwen2", downsample_ratio=0.5),
        "vision_config": {**CLIP, "image_size": [28, 28], "patch_size": [14, 14]},
    },
    "paligemma": {
        **_beside("gemma", "siglip_vision_model", projection_dim=32, hidden_size=32),
        "vision_config": {**CLIP, "model_type": "siglip_vision_model", "projection_dim": 32, "vision_use_head": False},
    },
    "gemma4": {
        "text_config": {
            **TEXT,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "global_head_dim": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 16,
        },
        "vision_config": {**CLIP, "num_key_value_heads": 2, "head_dim": 8},
        "audio_config": None,
        "image_token_id": 5,
        "video_token_id": 6,
        "audio_token_id": 7,
    },
}
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
