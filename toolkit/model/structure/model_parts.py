"""Parts of a model that reads more than text: its language model, which text rows train, and the rest.

Today's checkpoints are multimodal: a language model next to towers for images or sound, and projectors between them.
The whole model is loaded, trained in its language part, and exported with the rest as it was.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from toolkit.errors import BadInputError
from toolkit.recipe.schema import AdapterSection, ModelSection
from toolkit.sharding.fsdp2.unused import has_branches

# transformers 5.24.0's Llama 4 reads this of the output of its language model, which lacks it: all forwards fail.
MoeCausalLMOutputWithPast.image_outputs = None

WHOLE = (AutoModelForImageTextToText, AutoModelForMultimodalLM)
"""Auto classes of models that read more than text."""


def writer_class(config: PretrainedConfig) -> Any:
    """Returns the auto class of a model that writes text: of the whole one, if the configuration names that.

    transformers' class for causal models maps some of these types (Qwen 3.5, Llama 4) to their language model alone,
    and does not know others (Qwen 3 VL, Mistral 3), which are whole also if the configuration names no class.
    """
    named = (config.architectures or [""])[0]
    of_text = type(config) in AutoModelForCausalLM._model_mapping
    for auto in WHOLE:
        whole = auto._model_mapping.get(type(config), None)
        names = [kind.__name__ for kind in (whole if isinstance(whole, tuple) else (whole,)) if kind]
        if named in names or (names and not named and not of_text):
            return auto
    return AutoModelForCausalLM


LANGUAGE, PROJECTOR, VISION = "language", "projector", "vision"
"""Words of `model.train`: the language model with embeddings and head, the projectors, the towers."""

_PROJECTOR = re.compile(
    r"(^|\.)(\w*projector|visual_projection|connector|merger|deepstack_merger_list|aligner|embed_vision)(\.|$)"
)
_BESIDE_WORDS = re.compile(r"\.layers\.\d+\.(.+\.)?vision_\w+\.")
"""Modules in a layer of the language model that only tokens of images enter, such as Ernie's `vision_moe`."""


def asked_parts(model: ModelSection, adapter: AdapterSection, has_images: bool) -> Sequence[str]:
    """Returns the parts to train of a model that reads more than text, in words of `model.train`.

    Raises:
        BadInputError: if no row reaches a part.
    """
    train = model.train
    if train is None:
        return (LANGUAGE, PROJECTOR) if has_images and adapter.kind == "none" else (LANGUAGE,)
    if not has_images and set(train) != {LANGUAGE}:
        raise BadInputError(
            f"model.train: {', '.join(train)}: rows without images reach the language model alone; remove it"
        )
    return train


def sees(model: nn.Module) -> bool:
    """Tells whether the model reads more than text."""
    if not isinstance(model, PreTrainedModel):
        return False
    # The files of a reward model name a class that does not write.
    scores = hasattr(model, "score") and any(type(model.config) in whole._model_mapping for whole in WHOLE)
    return scores or writer_class(model.config) is not AutoModelForCausalLM


def writer_of(config: PretrainedConfig, field: str) -> Any:
    """Returns the same as `writer_class`.

    Args:
        field: the field of the recipe that names the model.

    Raises:
        BadInputError: if the type reads more than text, and its files name a class that does not write any.
    """
    auto, named = writer_class(config), (config.architectures or [""])[0]
    is_whole = any(type(config) in whole._model_mapping for whole in WHOLE)
    if named and is_whole and auto is AutoModelForCausalLM and type(config) not in auto._model_mapping:
        raise BadInputError(
            f"{field}: its config.json names {named} in architectures, a class that does not write text; name a model "
            "that does"
        )
    return auto


def needs_more_than_text(model: str, why: str) -> BadInputError:
    """Returns the error for a model that cannot run on rows of text.

    Args:
        model: the field of the recipe and the class of the model.
        why: continues the sentence.
    """
    return BadInputError(
        f"{model} cannot run on rows of text alone{why}; name a model that reads text without other inputs"
    )


def require_text(model: PreTrainedModel, field: str) -> None:
    """Checks that a model that reads more than text can continue rows of text.

    Args:
        field: the field of the recipe that names the model.

    Raises:
        BadInputError: if it cannot.
    """
    name = type(model).__name__
    if model.main_input_name != "input_ids":
        raise needs_more_than_text(f"{field}: {name}", f": what it reads first is {model.main_input_name}")
    if type(model).forward is nn.Module.forward:  # Qwen's Omni models are several, which `generate` calls one by one
        raise BadInputError(f"{field}: {name} has no forward to train; name the model in it that writes text")
    if not hasattr(model, "prepare_inputs_for_generation"):  # which peft looks for, too
        raise BadInputError(f"{field}: {name} does not write a text token by token; name a model that does")
    if model.config.is_encoder_decoder:
        of_targets = type(model.config) in AutoModelForSeq2SeqLM._model_mapping
        mend = "set objective.kind=seq2seq" if of_targets else "name a decoder"
        raise BadInputError(f"{field}: {name} is an encoder-decoder, which writes a target for a source; {mend}")


def untrained(model: nn.Module, trained: Sequence[str]) -> set[str]:
    """Returns names of the parameters of parts that are not trained, in a model that reads more than text.

    Args:
        trained: the trained parts, in words of `model.train`.
    """
    return {name for name, part in parts_of(model).items() if part not in trained}


def parts_of(model: nn.Module) -> dict[str, str]:
    """Returns the part of each parameter, in words of `model.train`; empty if the model only reads text."""
    if not isinstance(model, PreTrainedModel) or not sees(model):
        return {}
    readers: list[Any] = [model.get_decoder(), *([model.get_encoder()] if model.config.is_encoder_decoder else [])]
    heads = [model.get_output_embeddings(), getattr(model, "score", None)]
    language = [*readers, model.get_input_embeddings(), *heads]
    towers = [tower for reader in readers for tower in _towers_within(reader)]
    reached = {id(parameter) for module in language if module is not None for parameter in module.parameters()}
    reached -= {id(parameter) for module in towers for parameter in module.parameters()}

    def part_of(name: str, parameter: nn.Parameter) -> str:
        if id(parameter) in reached and not _BESIDE_WORDS.search(name):
            return LANGUAGE
        return PROJECTOR if _PROJECTOR.search(name) else VISION

    return {name: part_of(name, parameter) for name, parameter in model.named_parameters()}


def _towers_within(decoder: nn.Module) -> list[nn.Module]:
    """Returns children of a decoder that hold a model with another class of configuration, and their projectors.

    The decoders of GIT and Phi-4 contain the towers.
    """
    config: Any = getattr(decoder, "config", None)
    if config is None:
        return []
    own = (type(config), type(config.get_text_config()))
    towers = [
        child
        for child in decoder.children()
        if any(isinstance(inner, PreTrainedModel) and type(inner.config) not in own for inner in child.modules())
    ]
    beside = [child for name, child in decoder.named_children() if _PROJECTOR.search(name)]
    return towers + beside if towers else []


def freeze_untrained(model: nn.Module, trained: Sequence[str]) -> None:
    """Freezes the parts that are not trained."""
    names = untrained(model, trained)
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.requires_grad_(False)


def may_leave_unused(model: nn.Module, trained: Sequence[str]) -> bool:
    """Tells whether a forward may leave trained parameters out, which torch's DistributedDataParallel must know.

    Besides branches, these are layers of towers: LLaVA does not use the last ones, nor Gemma 3 the pooling. SqueezeBERT
    has a pooler for its classifier, which a tagger does not use.
    """
    return _leaves_pooler(model) or has_branches(model) or VISION in trained


def _leaves_pooler(model: nn.Module) -> bool:
    """Tells whether a pooler is trained in another model than a classifier of whole texts, which reads it."""
    if any(type(module).__name__.endswith("ForSequenceClassification") for module in model.modules()):
        return False
    poolers = (module for name, module in model.named_modules() if name.endswith("pooler"))
    return any(parameter.requires_grad for module in poolers for parameter in module.parameters())


def untrained_modules(model: nn.Module, trained: Sequence[str]) -> list[str]:
    """Returns paths of modules whose parameters are all `untrained`; an adapter on them would get no gradient."""
    names = untrained(model, trained)
    if not names:
        return []
    held = {path: {f"{path}.{name}" for name, _ in module.named_parameters()} for path, module in model.named_modules()}
    return [path for path, inside in held.items() if path and inside and inside <= names]
