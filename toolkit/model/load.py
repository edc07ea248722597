"""The model: from the hub, a folder, or a configuration with random weights.

A model is built on the meta device, without memory for its parameters. It carries
`materialize_weights()`, which the sharding backend calls once every parameter has its shard.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from toolkit import ranks
from toolkit.data.tokenizer import pad_id
from toolkit.errors import BadInputError, first_line
from toolkit.model.adapters import AdapterWeights, add_adapter
from toolkit.model.weights import (
    RankZeroWeights,
    SafetensorsWeights,
    Weights,
    materialize,
    readable,
    require_fitting,
    stored_names,
    unused_names,
)
from toolkit.places import require_folder
from toolkit.recipe.schema import AdapterSection, ModelSection


class SpecialTokens(Protocol):
    """What of a tokenizer a configuration needs."""

    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None

    def __len__(self) -> int: ...


def load(
    model: ModelSection,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    label_names: list[str] | None = None,
    adapter: AdapterSection | None = None,
) -> PreTrainedModel:
    """The recipe's model, on the meta device, with `materialize_weights`.

    Args:
        tokenizer: gives a model with random weights its vocabulary size and special tokens.
        seed: of random weights.
        label_names: of the classes that it tells apart; None: a causal language model.
        adapter: of its adapters; None: none.

    Raises:
        BadInputError: where there is no such model.
    """
    auto, config, settings, rows = _settings(model, tokenizer, label_names)
    built = _without_weights(auto, config, settings, rows)
    weights: Weights = _weights(model, built, lambda: _whole_model(auto, model, config, settings, seed, rows))
    if adapter is not None and adapter.kind == "lora":
        built = add_adapter(built, adapter, model.name_or_path, model.revision)
        weights = AdapterWeights(weights, built, seed)
    built.materialize_weights = lambda keep_master=None: materialize(built, weights, keep_master)
    return built


def load_without_weights(
    model: ModelSection,
    tokenizer: SpecialTokens,
    label_names: list[str] | None = None,
    adapter: AdapterSection | None = None,
) -> PreTrainedModel:
    """As `load`, of the configuration alone, for who wants to know sizes; it cannot be given weights.

    Raises:
        BadInputError: where there is no such model.
    """
    built = _without_weights(*_settings(model, tokenizer, label_names))
    if adapter is not None and adapter.kind == "lora":
        return add_adapter(built, adapter, model.name_or_path, model.revision)
    return built


def _settings(
    model: ModelSection, tokenizer: SpecialTokens, label_names: list[str] | None
) -> tuple[Any, PretrainedConfig, dict[str, Any], int]:
    """Auto class, configuration, settings of its constructor, and the rows that its embeddings need."""
    if model.name_or_path is not None:
        require_folder(model.name_or_path, "model.name_or_path")
    config = _configuration(model, tokenizer)
    if label_names is not None:
        _name_labels(config, label_names, tokenizer)
    auto = AutoModelForCausalLM if label_names is None else AutoModelForSequenceClassification
    attention = {} if model.attention == "auto" else {"attn_implementation": model.attention}
    dtype = getattr(torch, model.dtype)
    settings = {"dtype": dtype, "trust_remote_code": model.trust_remote_code, **attention}
    return auto, config, settings, len(tokenizer) if model.add_tokens is not None else 0


def _without_weights(auto: Any, config: PretrainedConfig, settings: dict[str, Any], rows: int) -> PreTrainedModel:
    """The model on the meta device."""
    # Computed buffers, such as rotary frequencies, are in no file: they need their values now.
    with init_empty_weights(include_buffers=False):
        built = _of_kind(auto, copy.deepcopy(config), settings)  # resizing changes the configuration
        _make_rows(built, rows, mean_resizing=False)
    # `init_empty_weights` puts a new parameter in each place, which parts those that were tied.
    built.tie_weights()
    built.config.architectures = [type(built).__name__]
    return built


def _of_kind(auto: Any, config: PretrainedConfig, settings: dict[str, Any]) -> PreTrainedModel:
    try:
        model: PreTrainedModel = auto.from_config(config, **settings)
        return model
    except ImportError as error:  # of the attention
        raise BadInputError(
            f"model.attention: {settings.get('attn_implementation')} cannot be used: {first_line(error)}; install it, "
            "or set model.attention=auto"
        ) from error
    except ValueError as error:
        what = "generate text" if auto is AutoModelForCausalLM else "classify texts"
        raise BadInputError(
            f"model: a model of type {config.model_type} cannot be made to {what}: {first_line(error)}"
        ) from error


def _name_labels(config: PretrainedConfig, names: list[str], tokenizer: SpecialTokens) -> None:
    config.num_labels = len(names)
    config.id2label = dict(enumerate(names))
    config.label2id = {name: number for number, name in enumerate(names)}
    config.problem_type = "single_label_classification"
    if config.pad_token_id is None:  # decoders look for the last token that is no padding
        config.pad_token_id = pad_id(tokenizer)


def auto_class(config: PretrainedConfig) -> Any:
    """The class of transformers that loads a model like that of the configuration."""
    architecture = (config.architectures or [""])[0]
    is_classifier = architecture.endswith("ForSequenceClassification")
    return AutoModelForSequenceClassification if is_classifier else AutoModelForCausalLM


def _weights(model: ModelSection, built: PreTrainedModel, make_whole: Callable[[], nn.Module]) -> Weights:
    if model.name_or_path is not None:
        folder = _model_folder(model)
        with readable(model.name_or_path):
            files = stored_names(folder, built)
            unused = unused_names(folder, built)
        if files is not None:
            require_fitting(model.name_or_path, [], unused, model.allow_new_weights or [], _below_new_head(built))
            return SafetensorsWeights(files)
    return RankZeroWeights(make_whole)


def _below_new_head(model: nn.Module) -> str | None:
    """The prefix of what a classifier has from a language model; its head is new, and the other one is left out."""
    is_classifier = type(model).__name__.endswith("ForSequenceClassification")
    return str(model.base_model_prefix) if is_classifier else None


def _whole_model(
    auto: Any, model: ModelSection, config: PretrainedConfig, settings: dict[str, Any], seed: int, rows: int
) -> nn.Module:
    """The model with its weights, on the host of this rank."""
    # The seed is for the weights: the run's own random state must not depend on who made them.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if model.name_or_path is None:
            whole: nn.Module = auto.from_config(config, **settings)
        else:
            name, revision = model.name_or_path, model.revision
            with readable(name):
                whole, found = auto.from_pretrained(
                    name, config=config, revision=revision, output_loading_info=True, **settings
                )
            missing, unused = found["missing_keys"], found["unexpected_keys"]
            require_fitting(name, missing, unused, model.allow_new_weights or [], _below_new_head(whole))
        _make_rows(whole, rows, mean_resizing=True)
        return whole


def _make_rows(model: PreTrainedModel, rows: int, mean_resizing: bool) -> None:
    """Embeddings, and a head of its own, of at least so many rows; new ones are drawn around the mean of the old.

    Reference: Hewitt, "Initializing new word embeddings for pretrained language models", 2021.
    """
    if rows > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(rows, mean_resizing=mean_resizing)


def _model_folder(model: ModelSection) -> Path:
    """The folder of a pretrained model; from the hub, downloaded once for each host."""
    assert model.name_or_path is not None
    folder = Path(model.name_or_path).expanduser()
    if folder.is_dir():
        return folder
    name = model.name_or_path
    # No pickles: those of a stranger could run anything.
    patterns = ["*.safetensors", "*.json"]
    return ranks.on_each_host(lambda: Path(snapshot_download(name, revision=model.revision, allow_patterns=patterns)))


def _configuration(model: ModelSection, tokenizer: SpecialTokens) -> PretrainedConfig:
    try:
        if model.name_or_path is not None:
            return AutoConfig.from_pretrained(
                model.name_or_path, revision=model.revision, trust_remote_code=model.trust_remote_code
            )
        return _random_configuration(dict(model.config or {}), tokenizer)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        field = "model.name_or_path" if model.name_or_path is not None else "model.config"
        found = model.name_or_path or model.config
        raise BadInputError(f"{field}: no model can be made of {found!r}: {first_line(error)}") from error


def _random_configuration(fields: dict[str, Any], tokenizer: SpecialTokens) -> PretrainedConfig:
    """A configuration whose vocabulary and special tokens are the tokenizer's, unless it says otherwise."""
    fields.setdefault("vocab_size", len(tokenizer))
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        fields.setdefault(token, getattr(tokenizer, token))
    if fields["vocab_size"] < len(tokenizer):
        raise BadInputError(
            f"model.config.vocab_size: {fields['vocab_size']} is less than the tokenizer's {len(tokenizer)} tokens; "
            "leave it out or raise it"
        )
    default = AutoConfig.for_model(fields["model_type"])
    known = {*default.to_dict(), *default.attribute_map}
    unknown = [key for key in fields if key not in known]
    if unknown:
        raise BadInputError(
            f"model.config: {', '.join(unknown)}: unknown to the model type {fields['model_type']}; "
            f"known: {', '.join(sorted(known))}"
        )
    return AutoConfig.for_model(**fields)
