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


def _by_type(listed: dict[Any, list[str]]) -> dict[str, Any]:
    return {name: value for value, names in listed.items() for name in names}


TABLES = cases(__file__)
SIZES = _by_type(TABLES["SIZES"])
"""Of fields in any of a configuration's parts."""

OF_KIND: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("multimodal_sizes.json").read_text())
"""What types need to be built small, beside the usual names of fields."""

OF_TIMM = ("fast_vlm", "gemma3n", "perception_lm")
UNTRIED = {} if is_timm_available() else dict.fromkeys(OF_TIMM, "its tower is built by timm")
"""By type, why it is not tried here."""

REFUSED: dict[str, str] = _by_type(TABLES["REFUSED"])
"""By type, a part of what is said."""

NO_EXPERTS = "holds its experts as stacked parameters"
"""A part of what is said of types without any, and of those whose class transformers does not mark."""
REFUSED_WITH = {case: _by_type(words) for case, words in TABLES["REFUSED_WITH"].items()}
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
