"""Merges an adapter that exists into its base, and writes a folder that needs no peft (`toolkit merge`)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase

from toolkit.checkpoint.beside_weights.model_files import in_older_names
from toolkit.checkpoint.export import (
    ExportSettings,
    ExportSource,
    compare_logits,
    dtype_of_export,
    logits_of_random_tokens,
    write_export,
)
from toolkit.data.templates.stops import add_ends
from toolkit.data.tokens.tokenizer import identity
from toolkit.errors import BadInputError, first_line
from toolkit.generation.text.load import (
    ModelPlace,
    adapter_base,
    adapter_quantisation,
    find_model,
    load_base,
    stop_tokens,
    tokenizer_of,
    with_adapter,
)
from toolkit.model.beside_weights.base_files import PROCESSORS, TOKENIZERS, BaseFiles, model_folder
from toolkit.model.load import load_stored, take_generation_settings
from toolkit.model.quantised.quantised import dequantise_loaded, quantise_loaded
from toolkit.model.quantised.stored_quantised import take_quantisation
from toolkit.model.structure.tying import adapts_tied, untie
from toolkit.model.weights.file_names import FileNames
from toolkit.model.weights.weights import names_in_files
from toolkit.paths import GIB
from toolkit.recipe.schema import AdapterSection, ExportSection, ModelSection
from toolkit.sharding.fsdp2.shards import state_once


@dataclass(frozen=True)
class Merged:
    """A merged model.

    Attributes:
        base: the folder of the base.
        dtype: torch's name of the dtype of the weights.
        logits_difference: the largest difference from the logits of base and adapter, as a share of the largest one.
    """

    base: str
    dtype: str
    logits_difference: float


def merge_adapter(adapter: str, to: Path, base: str | None = None, dtype: str | None = None) -> Merged:
    """Adds an adapter to its base in float32, and writes the whole model. Holds it in host memory in float32, twice.

    A base that was quantised in training is quantised and dequantised first: the adapter belongs to those weights.

    Args:
        adapter: the folder of the adapter, or of its run.
        to: the new folder.
        base: the folder of the base, or its hub name. None takes what the adapter names.
        dtype: torch's name of the dtype of the new weights. None takes that of the base.

    Raises:
        BadInputError: if the folder is there, is not an adapter's, or does not fit its base.
        ExportError: if the new folder gives other logits than the adapter on its base, or cannot be written.
    """
    if to.exists():
        raise BadInputError(f"--to: {str(to)!r} exists; name a new folder")
    place = find_model(adapter)
    if not place.is_adapter:
        found = "is not a folder here" if place.on_hub else "is a whole model"
        raise BadInputError(f"{adapter!r} {found}; name the folder of an adapter (adapter_config.json)")
    of_base = adapter_base(place) if base is None else _in_folder(find_model(base))
    quantisation = adapter_quantisation(place, of_base)
    model = _load(of_base)
    written = dtype_of_export(dtype, model.dtype, is_adapter=False)
    quantise_loaded(model, quantisation)
    dequantise_loaded(model)
    tokenizer = tokenizer_of(place, of_base)
    add_ends(model.generation_config, stop_tokens(model, tokenizer))  # the base's settings name its own ends alone
    adapted = with_adapter(model.float(), tokenizer, place).eval()
    expected = logits_of_random_tokens(adapted)
    whole = _merged(adapted, adapter)
    files, folder = _files_beside(place, of_base, tokenizer), Path(of_base.name)
    settings = ExportSettings(written, int(ExportSection().max_shard_gib * GIB))
    names = FileNames(whole, names_in_files(folder), folder)
    parameters = {name for name, _ in whole.named_parameters()}
    source = ExportSource(whole, tokenizer, files, state_once(whole).items(), parameters, names)
    check = functools.partial(compare_logits, expected=expected, dtype=written)
    difference = write_export(source, to, settings, "merge it again", check)
    return Merged(of_base.name, str(written).removeprefix("torch."), difference)


def _load(base: ModelPlace) -> Any:
    """Loads a base as transformers does; one that was quantised in its files as training does.

    Raises:
        BadInputError: if it cannot be loaded, or is quantised in another way than nf4.
    """
    stored = PretrainedConfig.get_config_dict(base.name)[0].get("quantization_config")
    if stored is None:
        return load_base(base, "auto", None)
    config = AutoConfig.from_pretrained(base.name, trust_remote_code=False)
    take_quantisation(config, AdapterSection(kind="lora"), base.name)
    model = load_stored(base.name, None, config, stored, config.dtype or torch.float32)
    take_generation_settings(model, base.name)
    return model


def _merged(adapted: Any, adapter: str) -> Any:
    """Returns the model with the adapter in its weights.

    Raises:
        BadInputError: if peft cannot merge an adapter of this kind.
    """
    base = adapted.get_base_model()
    if is_parted := adapts_tied(base):
        _part_head(base)
    try:
        whole = adapted.merge_and_unload()
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        kind = adapted.active_peft_config.peft_type.value
        raise BadInputError(
            f"{adapter!r}: peft cannot merge this adapter ({kind}) into its base: {first_line(error)}; load it with "
            "peft"
        ) from error
    if is_parted:
        untie(whole.config)
    return whole


def _part_head(base: Any) -> None:
    """Gives the head of a tied model its own weight."""
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    shared = {id(parameter) for parameter in embedding.parameters()}
    for module in head.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) in shared:
                setattr(module, name, torch.nn.Parameter(parameter.clone(), requires_grad=False))


def _in_folder(place: ModelPlace) -> ModelPlace:
    """Returns the folder of a hub's model, which is downloaded if it is not here."""
    return ModelPlace(str(model_folder(ModelSection(name_or_path=place.name), "--base"))) if place.on_hub else place


def _files_beside(place: ModelPlace, base: ModelPlace, tokenizer: PreTrainedTokenizerBase) -> BaseFiles:
    """Returns the base's files, with what the adapter brings in their place.

    These are its processors, in which the limits of images may differ, and its tokenizer, if that differs by more than
    its chat template.
    """
    files = BaseFiles.read(Path(base.name))
    if (own := BaseFiles.read(Path(place.name), PROCESSORS)).contents:
        files = files.without(PROCESSORS) | own
    if not _encodes_alike(base, tokenizer):
        files = files.without(TOKENIZERS) | in_older_names(BaseFiles.read(Path(place.name), TOKENIZERS))
    return files


def _encodes_alike(base: ModelPlace, tokenizer: PreTrainedTokenizerBase) -> bool:
    try:
        before = tokenizer_of(base, base)
    except BadInputError:  # the base has none
        return False
    before.chat_template = tokenizer.chat_template
    return identity(before) == identity(tokenizer)
