"""Builds the plain side's model: transformers' model in float32, with bitsandbytes' values and peft's adapters.

The run's model decides which layers are quantised and adapted, as the report's facts say. It does not decide their
values: bitsandbytes quantises whole matrices, which become ordinary linear layers, and peft adds its own layers.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel

from toolkit.model.adapters.adapters import base_of, has_adapter
from toolkit.model.load import LoadedModel
from toolkit.model.quantised.quantised import matrix_of_4_bits, plain_layer, quantised_layers
from toolkit.model.structure.model_parts import freeze_untrained, writer_class
from toolkit.recipe.recipe import Recipe


def plain_model(recipe: Recipe, loaded: LoadedModel) -> nn.Module:
    """Returns the recipe's model before its first step, all in float32. Does not use the toolkit's loading of slices.

    Args:
        recipe: names the model and its adapters.
        loaded: the toolkit's model, without weights.
    """
    built = loaded.model
    torch.manual_seed(recipe.training.seed)
    model = _load_whole(recipe, built)
    freeze_untrained(model, loaded.trained)
    quantised = [path.replace(".base_layer", "") for path, _ in quantised_layers(base_of(built))]
    if recipe.adapter.quantize != "none":
        for path in quantised:
            _quantise(model.get_submodule(path), recipe)
    elif quantised:
        _dequantise_stored(model)
    model = model.float()
    return _add_adapters(model, recipe, built) if has_adapter(built) else model


def _load_whole(recipe: Recipe, built: Any) -> PreTrainedModel:
    section, config = recipe.model, base_of(built).config
    settings: dict[str, Any] = {"dtype": getattr(torch, section.dtype), "trust_remote_code": section.trust_remote_code}
    if section.attention != "auto":
        settings["attn_implementation"] = section.attention
    auto: Any = AutoModelForSeq2SeqLM if recipe.objective.spec.encoder_decoder else writer_class(config)
    if section.name_or_path is None:
        return auto.from_config(config, **settings)
    if recipe.adapter.quantize != "none" or not any(quantised_layers(built)):
        settings["config"] = config
    # Otherwise transformers reads from the files that they are quantised; `built` has removed that from its config.
    return auto.from_pretrained(section.name_or_path, revision=section.revision, use_safetensors=True, **settings)


@torch.no_grad()
def _quantise(layer: nn.Module, recipe: Recipe) -> None:
    """Quantises the weights of a linear layer to 4 or 8 bits and back."""
    from bitsandbytes.functional import int8_vectorwise_quant, quantize_4bit

    weight: Any = layer.weight
    if recipe.adapter.quantize == "int8":
        packed, largest, _ = int8_vectorwise_quant(weight.half())
        weight.data = packed.float() * (largest / 127)[:, None]
        return
    double = recipe.adapter.double_quantization
    packed, state = quantize_4bit(weight.data, blocksize=64, compress_statistics=double, quant_type="nf4")
    weight.data = matrix_of_4_bits(packed, state, torch.float32)


@torch.no_grad()
def _dequantise_stored(model: nn.Module) -> None:
    """Replaces the bitsandbytes layers that transformers has loaded by ordinary linear layers."""
    from bitsandbytes.nn import Linear4bit

    for path, layer in list(model.named_modules()):
        if isinstance(layer, Linear4bit):
            model.set_submodule(path, plain_layer(layer, torch.float32))
    # transformers refuses to change the dtype of a quantised model, which this one no longer is.
    model.is_quantized = False  # type: ignore[assignment]
    vars(model).pop("quantization_method", None)


def _add_adapters(model: PreTrainedModel, recipe: Recipe, built: Any) -> nn.Module:
    """Returns peft's model, with the initial values of docs/adapters.md or the values of an adapter's folder."""
    import peft

    if recipe.adapter.start_from is not None:
        started: nn.Module = peft.PeftModel.from_pretrained(
            model, Path(recipe.adapter.start_from).expanduser(), is_trainable=True
        )
        return started.float()
    section, built_config = recipe.adapter, built.peft_config["default"]
    config = peft.LoraConfig(
        task_type=recipe.objective.spec.peft_task,
        r=section.r,
        lora_alpha=2 * section.r if section.alpha is None else section.alpha,
        target_modules=built_config.target_modules,
        target_parameters=built_config.target_parameters,
        modules_to_save=section.modules_to_save,
        use_rslora=section.use_rslora,
        use_dora=section.use_dora,
    )
    adapted: nn.Module = peft.get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if ".lora_A." in name:
            uniform = torch.rand(parameter.shape, generator=_generator(recipe, name)) * 2 - 1
            parameter.data = uniform / math.sqrt(parameter[0].numel())
        elif ".lora_embedding_B." in name:
            parameter.data = torch.randn(parameter.shape, generator=_generator(recipe, name))
    return adapted


def _generator(recipe: Recipe, name: str) -> torch.Generator:
    """Returns a generator seeded by the run's seed and the parameter's name."""
    digest = hashlib.sha256(f"{recipe.training.seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
