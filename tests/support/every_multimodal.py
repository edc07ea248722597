"""Every type of transformers that reads images or sound beside text, small: its default configuration, cut down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForMultimodalLM,
    EvollaForProteinText2Text,
    PretrainedConfig,
    ShieldGemma2ForImageClassification,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)
from transformers.utils import is_timm_available

from support.cases import cases
from support.tiny import VOCAB_SIZE
from support.tiny_multimodal import FAMILIES
from toolkit.data.tokens.tokenizer import _train_byte_pairs

SIZES = {field: size for size, fields in cases(__file__)["SIZES"].items() for field in fields}
"""Of fields in any of a configuration's parts."""

OF_KIND: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("multimodal_sizes.json").read_text())
"""What types need to be built small, beside the usual names of fields."""

OF_TIMM = ("fast_vlm", "gemma3n", "perception_lm")
UNTRIED = {} if is_timm_available() else dict.fromkeys(OF_TIMM, "its tower is built by timm")
"""By type, why it is not tried here."""

_READS_FIRST = "cannot run on rows of text alone: what it reads first is"
REFUSED: dict[str, str] = {
    **dict.fromkeys(("blip", "blip-2", "instructblip", "instructblipvideo", "kosmos-2", "pi0"), _READS_FIRST),
    **dict.fromkeys(("pix2struct", "pp_formulanet", "vision-encoder-decoder"), _READS_FIRST),
    **dict.fromkeys(("idefics", "kyutai_speech_to_text", "voxtral_realtime"), "cannot run on rows of text alone"),
    **dict.fromkeys(("florence2", "t5gemma2", "udop"), "is an encoder-decoder"),
    **dict.fromkeys(("qwen2_5_omni", "qwen3_omni_moe"), "has no forward to train"),
    "diffusion_gemma": "does not write a text token by token",
    "evolla": "there is no model of type evolla that can generate text",
    "paligemma": "the logits of a token depend on later tokens",
    "shieldgemma2": "ShieldGemma2ForImageClassification in architectures, a class that does not write text",
}
"""By type, a part of what is said."""

_MIXES, _CANNOT_SHARE = "which mix the tokens of a row", "mixes the tokens of a row elsewhere than in attention"
_NOT_READ = dict.fromkeys(("inkling2", "inkling2_loop"), "peft would not read")
NO_EXPERTS = "holds its experts as stacked parameters"
"""A part of what is said of types without any, and of those whose class transformers does not mark."""
REFUSED_WITH: dict[str, dict[str, str]] = {
    "shared_rows": {
        **dict.fromkeys(("dots3_note", "glm5_next", "hy_v4_vl", "inkling2", "inkling2_loop"), _MIXES),
        **dict.fromkeys(("inkling_mm_model", "lfm3_vl", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7"), _MIXES),
        **dict.fromkeys(("mistral_large4", "nemotron_h_omni", "qwen3_5", "nemo_speechlm"), _MIXES),
        **dict.fromkeys(("qwen3_5_moe", "qwen4_exp", "unlimited_ocr"), _MIXES),
        **dict.fromkeys(("gemma4_unified", "git", "kosmos-2.5", "molmo2", "paligemma"), _CANNOT_SHARE),
        **dict.fromkeys(("moss_transcribe_diarize", "vibevoice_asr"), "takes no position_ids, and a part of a row"),
    },
    "by_block": {"git": "changes in place what its embeddings or a block return"},
    "experts": {"llama4": NO_EXPERTS, "muse_spark": "has no row for each of the 4 experts"},
    "lora": _NOT_READ,
    "nf4": {**_NOT_READ, "ovis2": "nf4 needs matrices of a multiple of 64 weights"},
}
"""By case of `support.whole_models` and type, a part of what is said beside `REFUSED`."""

WITHOUT_SIZES = {
    *("aya_vision", "chameleon", "cohere_compass", "deepseek_ocr2", "diffusion_gemma", "emu3", "granite4_vision"),
    *("hunyuan_vl", "perception_lm", "qwen3_omni_moe", "qwen4_exp"),
}
"""Types that transformers itself cannot build from their default configuration."""

_OWN_CLASSES = {"evolla": EvollaForProteinText2Text, "shieldgemma2": ShieldGemma2ForImageClassification}
"""By type, the class of its files, which transformers' mapping does not give."""


def multimodal_kinds() -> list[str]:
    """Names of all types, as far as this version of transformers has them."""
    names = [*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES]
    return [kind for kind in dict.fromkeys(names) if kind in CONFIG_MAPPING]


def small_config(kind: str) -> PretrainedConfig:
    """Raises whatever transformers does where a type's fields do not go together at these sizes."""
    if kind in FAMILIES:
        return AutoConfig.for_model(kind, **FAMILIES[kind])
    fields = _joined(_cut(AutoConfig.for_model(kind).to_dict()), OF_KIND.get(kind, {}))
    fields.pop("model_type")
    return AutoConfig.for_model(kind, **fields)


def _cut(fields: dict[str, Any]) -> dict[str, Any]:
    left_out = ("id2label", "label2id", "dtype", "transformers_version", "architectures", "per_layer_config")
    cut = {name: _cut_value(name, value) for name, value in fields.items() if name not in left_out}
    if isinstance(types := cut.get("layer_types"), list):
        kinds = list(dict.fromkeys(types))
        cut["layer_types"] = (kinds * 2)[:2]
    if isinstance(types := cut.get("mlp_layer_types"), list):
        cut["mlp_layer_types"] = types[-2:]
    return cut


def _cut_value(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        if name.endswith("config") or "model_type" in value:
            return _cut(value)
        return {
            inner: _cut_value(inner, each) if isinstance(each, dict | list) else each for inner, each in value.items()
        }
    if name == "mrope_section" and isinstance(value, list):
        return [4, 2, 2]
    if isinstance(value, float) and "dropout" in name:
        return 0.0  # the plain loop has none
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if name in SIZES:
        return SIZES[name]
    if name.endswith(("_token_id", "_token_index", "_token")) and value >= VOCAB_SIZE:
        return {"image": 5, "video": 6, "audio": 7}.get(name.partition("_")[0], 9)
    return min(value, VOCAB_SIZE) if "vocab_size" in name else value


def _joined(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    inner = {name: _joined(fields.get(name) or {}, value) for name, value in changes.items() if isinstance(value, dict)}
    return {**fields, **changes, **inner}


def _made(kind: str, config: PretrainedConfig) -> Any:
    make = _OWN_CLASSES[kind]._from_config if kind in _OWN_CLASSES else AutoModelForMultimodalLM.from_config
    return make(config, dtype=torch.float32)


def on_meta(kind: str, small: bool) -> Any:
    """The model without values, small or as its default configuration has it."""
    with torch.device("meta"):
        return _made(kind, small_config(kind) if small else AutoConfig.for_model(kind))


def save_small(kind: str, folder: Path, texts: list[str]) -> None:
    """The model as transformers saves it, whose routers choose clearly, and a tokenizer."""
    torch.manual_seed(0)
    model = _made(kind, small_config(kind))
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and name.endswith(("gate.weight", "router.weight")):
            nn.init.normal_(parameter)
        elif parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    _train_byte_pairs(iter(texts), VOCAB_SIZE).save_pretrained(folder)
