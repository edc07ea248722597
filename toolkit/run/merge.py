"""Merges an adapter that exists into its base, and writes a folder that needs no peft (`toolkit merge`)."""

from __future__ import annotations

import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint.beside_weights.model_files import write_model_files
from toolkit.checkpoint.export import (
    TOLERANCE,
    ExportSettings,
    explained,
    let_others_read,
    relative_difference,
    reload,
    require_close,
    write_weights,
)
from toolkit.data.templates.stops import add_ends
from toolkit.errors import BadInputError
from toolkit.generation.text.load import (
    adapter_base,
    adapter_quantisation,
    find_model,
    load_base,
    stop_tokens,
    tokenizer_of,
    with_adapter,
)
from toolkit.model.beside_weights.base_files import BaseFiles
from toolkit.model.quantised.quantised import dequantise_loaded, quantise_loaded
from toolkit.model.structure.tying import config_of_export
from toolkit.model.weights.file_names import FileNames
from toolkit.model.weights.weights import names_in_files
from toolkit.paths import GIB
from toolkit.recipe.schema import ExportSection
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
        raise BadInputError(f"{adapter!r} is a whole model; name the folder of an adapter (adapter_config.json)")
    of_base = adapter_base(place) if base is None else find_model(base)
    quantisation = adapter_quantisation(place, of_base)
    model = load_base(of_base, "auto", None)
    folder = Path(model.config._name_or_path if of_base.on_hub else of_base.name)
    written = getattr(torch, dtype) if dtype is not None else model.dtype
    quantise_loaded(model, quantisation)
    dequantise_loaded(model)
    tokenizer = tokenizer_of(place, of_base)
    add_ends(model.generation_config, stop_tokens(model, tokenizer))  # the base's settings name its own ends alone
    adapted = with_adapter(model.float(), tokenizer, place).eval()
    expected = _logits(adapted)
    whole = adapted.merge_and_unload()
    _write(whole, tokenizer, folder, to, ExportSettings(written, int(ExportSection().max_shard_gib * GIB)))
    difference = relative_difference(_logits(reload(to, torch.device("cpu"), written)), expected)
    try:
        require_close(difference, TOLERANCE[written])
    except BaseException:
        shutil.rmtree(to)
        raise
    return Merged(of_base.name, str(written).removeprefix("torch."), difference)


def _write(model: Any, tokenizer: Any, base: Path, to: Path, settings: ExportSettings) -> None:
    """Writes the folder, whole or not at all."""
    unfinished = to.with_name(f".{to.name}.{uuid.uuid4().hex}.unfinished")
    names = FileNames(model, names_in_files(base), base)
    parameters = {name for name, _ in model.named_parameters()}
    try:
        with explained(to.parent, "merge it again"):
            unfinished.mkdir(parents=True)
            write_weights(iter(state_once(model).items()), parameters, unfinished, settings, names)
            files = BaseFiles.read(base)
            write_model_files(model, tokenizer, unfinished, settings.dtype, files, config_of_export(model))
            let_others_read(unfinished)
            os.rename(unfinished, to)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    """Returns the logits of 32 random tokens: (1, 32, vocabulary), in float32."""
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    tokens = torch.randint(0, vocabulary, (1, 32), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": tokens, **({"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {})}
    logits: torch.Tensor = model(**inputs).logits.float()
    return logits
