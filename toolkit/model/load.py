"""Loads a model from the hub, a folder, or a configuration with random weights.

A model is built on the meta device, without memory for its parameters. The sharding backend calls `load_weights` of a
`LoadedModel` once every parameter has its shard.
"""

from __future__ import annotations

import copy
import functools
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from toolkit import ranks
from toolkit.data.rows.hub_refusals import hub_error
from toolkit.data.tokens.hub_code import require_no_hub_code, require_no_stored_hub_code
from toolkit.data.tokens.tokenizer import pad_id
from toolkit.errors import BadInputError, ToolkitError, did_you_mean, first_line, in_words
from toolkit.model.adapters.adapters import AdapterWeights, add_adapter, quantise
from toolkit.model.adapters.started_adapter import StartedAdapter, continued_adapter
from toolkit.model.adapters.targets import classifier_of, is_classifier
from toolkit.model.beside_weights.base_files import base_files, model_folder
from toolkit.model.new_rows import with_new_rows
from toolkit.model.possible_configs import require_lasting_rows, require_possible
from toolkit.model.quantised.quantised import QuantisedWeights
from toolkit.model.quantised.stored_quantised import StoredNF4, quantise_as_stored, take_quantisation
from toolkit.model.structure.model_parts import LANGUAGE, WHOLE, freeze_untrained, require_text, writer_class, writer_of
from toolkit.model.structure.on_meta import build_on_meta
from toolkit.model.weights.weight_values import Values
from toolkit.model.weights.weights import (
    Fit,
    RankZeroWeights,
    SafetensorsWeights,
    Weights,
    materialize,
    readable,
    require_fitting,
    require_safetensors,
    require_values,
    stored_names,
    unused_names,
    without_load_report,
)
from toolkit.paths import fingerprint_of, folder_on_this_machine, require_folder
from toolkit.recipe.objectives.registry import SPECS
from toolkit.recipe.schema import AdapterSection, ModelSection
from toolkit.recipe.yaml_values import yaml_text
from toolkit.sharding.apply import KeepsMasters, LoadsWeights
from toolkit.terminal import LongAction, Terminal


class SpecialTokens(Protocol):
    """The part of a tokenizer that a configuration needs."""

    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None

    def __len__(self) -> int: ...


class NoTokens:
    """Special tokens for a pretrained model, whose configuration already has them."""

    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    def __len__(self) -> int:
        return 0


@dataclass(frozen=True)
class LoadedModel:
    """A recipe's model, and what is known of it that transformers' model has no place for.

    Attributes:
        model: transformers' or peft's model, on the meta device until its weights are loaded.
        fit: how the files fit it.
        trained: the trained parts of a model that reads more than text, in words of `model.train`.
        started: the adapter that training continues, or None.
        load_weights: gives every parameter its values, once it is sharded.
    """

    model: Any
    fit: Fit
    trained: tuple[str, ...]
    started: StartedAdapter | None
    load_weights: LoadsWeights


def load(
    model: ModelSection,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    label_names: list[str] | None = None,
    adapter: AdapterSection | None = None,
    objective: str = "causal_lm",
    parts: Sequence[str] = (LANGUAGE,),
) -> LoadedModel:
    """Returns the recipe's model, on the meta device.

    Args:
        tokenizer: gives a model with random weights its vocabulary size and special tokens.
        seed: seed of random weights.
        label_names: names of the classes of a classifier; None for a model that writes text.
        adapter: settings of the adapters; None without adapters.
        objective: `objective.kind` of the recipe.
        parts: the trained parts of a model that reads more than text, in words of `model.train`.

    Raises:
        BadInputError: if there is no such model.
    """
    auto, config, settings, rows, others = _model_settings(model, tokenizer, label_names, objective)
    stored = take_quantisation(config, adapter, model.name_or_path or "it")
    built = _without_weights(auto, config, settings, rows, _model_field(model), parts)
    fit, values = Fit(settings["dtype"], model.name_or_path is None), Values(model.name_or_path or "", built)
    weights: Weights
    if stored is not None:
        quantise_as_stored(built, stored)
        weights = StoredNF4(str(model.name_or_path), model_folder(model), built, values.look)
    else:
        make_whole = functools.partial(_whole_model, auto, model, config, settings, seed, rows, others, fit, values)
        weights = RankZeroWeights(make_whole) if others else _weights(model, built, make_whole, fit, values)
        if quantise(built, adapter):
            weights = QuantisedWeights(weights, built, settings["dtype"])
    weights = with_new_rows(weights, built, model, config, tokenizer, seed)
    if model.name_or_path is not None:
        fit.take_names(model_folder(model), built, config.dtype)
        take_generation_settings(built, model.name_or_path, model.revision)
    fit.files, started = base_files(model), None
    if adapter is not None and adapter.kind == "lora":
        built = add_adapter(built, adapter, model.name_or_path, model.revision, parts)
        fit.fingerprint = fingerprint(model)
        started = continued_adapter(built, adapter)
        if started is not None:
            started.require_usable(model, model_folder(model), fit.fingerprint)
            fit.adapter = started.fingerprint()
        weights = AdapterWeights(weights, built, seed, started)

    def load_weights(keep_master: KeepsMasters | None = None) -> None:
        with LongAction(Terminal(quiet=ranks.rank() != 0), "giving the model its weights"):
            materialize(built, weights, keep_master)
        fit.zero = values.zero()
        fit.origin = fit.fingerprint or fingerprint(model)

    return LoadedModel(built, fit, tuple(parts), started, load_weights)


def take_generation_settings(model: PreTrainedModel, source: str, revision: str | None = None) -> None:
    """Gives a model that writes text the generation settings of `source`, whose files must be on this host."""
    if not model.can_generate():
        return
    # Often missing or invalid. Not used for training, so fall back to the model's configuration.
    with suppress(Exception):
        model.generation_config = GenerationConfig.from_pretrained(source, revision=revision, local_files_only=True)


def load_without_weights(
    model: ModelSection,
    tokenizer: SpecialTokens,
    label_names: list[str] | None = None,
    adapter: AdapterSection | None = None,
    objective: str = "causal_lm",
    parts: Sequence[str] = (LANGUAGE,),
) -> PreTrainedModel:
    """Returns the same as `load` from the configuration alone, for sizes; it cannot get weights. Raises as `load`."""
    auto, config, settings, rows, _ = _model_settings(model, tokenizer, label_names, objective)
    stored = take_quantisation(config, adapter, model.name_or_path or "it")
    built = _without_weights(auto, config, settings, rows, _model_field(model), parts)
    if stored is not None:
        quantise_as_stored(built, stored)
    else:
        quantise(built, adapter)
    if adapter is not None and adapter.kind == "lora":
        built = add_adapter(built, adapter, model.name_or_path, model.revision, parts)
        continued_adapter(built, adapter)
    return built


def is_encoder_decoder(model: ModelSection) -> bool:
    """Tells whether a model is an encoder-decoder. Raises BadInputError if there is no such model."""
    assert model.name_or_path is not None
    require_folder(model.name_or_path, "model.name_or_path")
    return bool(_configuration(model, NoTokens()).is_encoder_decoder)


def load_stored(
    name: str, revision: str | None, config: PretrainedConfig, stored: dict[str, Any], dtype: torch.dtype
) -> PreTrainedModel:
    """Loads a model that was quantised before it was saved, with its weights, on the host. Not collective.

    Args:
        config: the configuration without its section about quantisation.
        stored: that section.
    """
    folder = folder_on_this_machine(name, revision)
    built = _without_weights(auto_class(config), config, {"dtype": dtype}, 0, "model.name_or_path")
    quantise_as_stored(built, stored)
    materialize(built, StoredNF4(name, folder, built, Values(name, built).look))
    return built


def _model_settings(
    model: ModelSection, tokenizer: SpecialTokens, label_names: list[str] | None, objective: str
) -> tuple[Any, PretrainedConfig, dict[str, Any], int, list[str]]:
    """Returns auto class, configuration, settings of the constructor, and the rows that the embeddings need.

    The last one are the classes of a head in the files that is for others than the data's.
    """
    if model.name_or_path is not None:
        require_folder(model.name_or_path, "model.name_or_path")
        _require_no_adapter(model.name_or_path)
        if model.revision is not None and Path(model.name_or_path).expanduser().is_dir():
            raise BadInputError(
                f"model.revision: {model.revision!r} has no effect on the folder {model.name_or_path!r}; remove it"
            )
    config = _configuration(model, tokenizer)
    name = SPECS[objective].auto_class
    others = [] if label_names is None else _name_labels(config, label_names, tokenizer, str(name))
    auto = writer_of(config, _model_field(model)) if name is None else getattr(transformers, name)
    attention = {} if model.attention == "auto" else {"attn_implementation": model.attention}
    dtype = getattr(torch, model.dtype)
    settings = {"dtype": dtype, "trust_remote_code": model.trust_remote_code, **attention}
    return auto, config, settings, len(tokenizer) if model.add_tokens is not None else 0, others


def _require_no_adapter(name: str) -> None:
    """Raises BadInputError for an adapter's folder: transformers puts the adapter on its base, if that is there."""
    if (Path(name).expanduser() / "adapter_config.json").is_file():
        merge = shlex.join(["toolkit", "merge", name, "--to", "FOLDER"])
        raise BadInputError(
            f"model.name_or_path: {name!r} holds an adapter (adapter_config.json); name its base, and the adapter in "
            f"adapter.start_from to train it further, or merge it by `{merge}`, and name that folder"
        )


def _without_weights(
    auto: Any,
    config: PretrainedConfig,
    settings: dict[str, Any],
    rows: int,
    field: str,
    parts: Sequence[str] = (LANGUAGE,),
) -> PreTrainedModel:
    """Returns the model on the meta device. `field` is the recipe's, for errors."""

    def build() -> PreTrainedModel:
        built = _build(auto, copy.deepcopy(config), settings, field)  # resizing changes the configuration
        _enlarge_embeddings(built, rows, mean_resizing=False)
        return built

    # Computed buffers, such as rotary frequencies, are in no file: they need their values now.
    built = build_on_meta(build)
    # `init_empty_weights` puts a new parameter in each place, which unties tied weights.
    built.tie_weights()
    built.config.architectures = [type(built).__name__]
    if auto in WHOLE:
        require_text(built, field)
    require_lasting_rows(built, field, _config_place(field))
    freeze_untrained(built, parts)
    return built


def _build(auto: Any, config: PretrainedConfig, settings: dict[str, Any], field: str) -> PreTrainedModel:
    writers = dict.fromkeys((AutoModelForCausalLM, *WHOLE), "generate text")
    writers[AutoModelForSeq2SeqLM] = "write a target for a source"
    what = writers.get(auto, "classify texts")
    try:
        return auto.from_config(config, **settings)
    except MemoryError:
        raise
    except Exception as error:  # whatever a model's code makes of sizes and names that do not fit each other
        is_missing, attention = isinstance(error, ImportError), settings.get("attn_implementation")
        if attention and "attention" in str(error).lower():
            install = "install it, or " if is_missing else ""
            raise BadInputError(
                f"model.attention: {attention} cannot be used: {first_line(error)}; {install}set model.attention=auto"
            ) from error
        if is_missing:  # of a tower, as timm
            raise BadInputError(
                f"{field}: a model of type {config.model_type} needs what is not installed: {first_line(error)}; "
                "install it, or name another model"
            ) from error
        reads_sources = auto is AutoModelForCausalLM and config.is_encoder_decoder
        mend = (
            "Set objective.kind=seq2seq for an encoder-decoder" if reads_sources else f"Correct {_config_place(field)}"
        )
        raise BadInputError(
            f"{field}: there is no model of type {config.model_type} that can {what}: {in_words(error)}. {mend}, or "
            "name another model"
        ) from error


def _model_field(model: ModelSection) -> str:
    """Returns the field of the recipe that names the model."""
    return "model.config" if model.name_or_path is None else "model.name_or_path"


def _config_place(field: str) -> str:
    """Returns the place of the configuration, for errors."""
    return "model.config" if field == "model.config" else "its config.json"


def _name_labels(
    config: PretrainedConfig,
    names: list[str],
    tokenizer: SpecialTokens,
    auto: str = "AutoModelForSequenceClassification",
) -> list[str]:
    """Gives a classifier its classes, and returns those that its head has for others or of another task; else none."""
    own = [config.id2label[number] for number in sorted(config.id2label or {})]
    theirs, ours = ([name.casefold() for name in each] for each in (own, names))
    if theirs != ours and sorted(theirs) == sorted(ours):
        # The head's rows are loaded in its own order: each class would begin as another one.
        order = yaml_text([names[ours.index(name)] for name in theirs], default_flow_style=True, width=10_000).strip()
        raise BadInputError(
            f"objective.labels: the model's classes stand in the order {', '.join(own)}, those of the data in the "
            f"order {', '.join(names)}; set objective.labels={order}"
        )
    numbers = range(len(names))
    unnamed = theirs == [f"label_{number}" for number in numbers] or names == [str(number) for number in numbers]
    # A head for texts has the name and, without its bias, the shape of one for tokens.
    tasks = [each for each in config.architectures or [] if each.endswith("Classification")]
    is_meant = all(each.endswith(auto.removeprefix("AutoModel")) for each in tasks) and (theirs == ours or unnamed)
    others = own if len(own) == len(names) > 1 and not is_meant else []
    config.num_labels = len(names)
    config.id2label = dict(enumerate(names))
    config.label2id = {name: number for number, name in enumerate(names)}
    # With "regression" a pipeline gives a single score as it is, without a logistic function.
    config.problem_type = "single_label_classification" if len(names) > 1 else "regression"
    # Decoders look for the last token that is not padding, so padding has to be the token that rows are padded with.
    # Encoders have a mask, and RoBERTa's family counts positions from its own padding token.
    text = config.get_text_config()
    is_unset = getattr(text, "pad_token_id", None) is None
    if is_unset or (not config.is_encoder_decoder and getattr(config, "is_decoder", True)):
        text.pad_token_id = pad_id(tokenizer)
    return others


def auto_class(config: PretrainedConfig) -> Any:
    """Returns the class of transformers that loads a model with this configuration."""
    spec = classifier_of((config.architectures or [""])[0])
    if spec is not None and spec.auto_class is not None:
        return getattr(transformers, spec.auto_class)
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else writer_class(config)


def _weights(
    model: ModelSection, built: PreTrainedModel, make_whole: Callable[[], nn.Module], fit: Fit, values: Values
) -> Weights:
    if model.name_or_path is not None:
        folder = model_folder(model)
        require_safetensors(model.name_or_path, folder)
        with readable(model.name_or_path):
            files = stored_names(folder, built)
            unused = unused_names(folder, built)
        if files is not None:
            name, allowed = model.name_or_path, model.allow_new_weights or []
            require_fitting(name, [], unused, {}, allowed, _below_new_head(built))
            with LongAction(Terminal(quiet=ranks.rank() != 0), f"checking the weights of {name}"):
                ranks.on_first_rank(lambda: require_values(name, folder, built, files, allowed))
            fit.unused += sorted(unused)
            return SafetensorsWeights(files, values.look)
    return RankZeroWeights(make_whole)


def _below_new_head(model: nn.Module) -> str | None:
    """Returns the key prefix of the backbone that a classifier takes from a language model's files."""
    return str(model.base_model_prefix) if is_classifier(model) else None


def _whole_model(
    auto: Any,
    model: ModelSection,
    config: PretrainedConfig,
    settings: dict[str, Any],
    seed: int,
    rows: int,
    others: list[str],
    fit: Fit,
    values: Values,
) -> nn.Module:
    """Returns the model with its weights, on this rank's host, and notes in `fit` which of them are new."""
    # The seed is for the weights: the run's own random state must not depend on who made them.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if model.name_or_path is None:
            whole: nn.Module = auto.from_config(config, **settings)
        else:
            name, revision = model.name_or_path, model.revision
            with readable(name), without_load_report():
                whole, found = auto.from_pretrained(
                    name,
                    config=config,
                    revision=revision,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,
                    use_safetensors=True,
                    **settings,
                )
            missing, unused = found["missing_keys"], found["unexpected_keys"]
            reshaped = {key: (stored, needed) for key, stored, needed in found["mismatched_keys"]}
            prefix = _below_new_head(whole)
            head = _drawn_anew(whole, missing) if others else []
            require_fitting(name, missing, unused, reshaped, model.allow_new_weights or [], prefix, (others, head))
            fit.drawn += sorted({*missing, *reshaped, *head})
            fit.unused += sorted(unused)
            for key, tensor in whole.state_dict().items():
                if key not in fit.drawn:
                    values.look(key, tensor)
        _enlarge_embeddings(whole, rows, mean_resizing=True)
        return whole


def _drawn_anew(model: PreTrainedModel, missing: Sequence[str]) -> list[str]:
    """Draws the weights of a classifier's head, but those that are drawn already, and returns their names."""
    names = []
    for name, parameter in model.named_parameters():
        if name not in missing and not name.startswith(f"{model.base_model_prefix}."):
            names.append(name)
            parameter._is_hf_initialized = False
            model._init_weights(model.get_submodule(name.rpartition(".")[0]))
    return names


def _enlarge_embeddings(model: PreTrainedModel, rows: int, mean_resizing: bool) -> None:
    """Enlarges embeddings, and an untied head, to at least `rows` rows; new ones are drawn around the old ones' mean.

    Reference: Hewitt, "Initializing new word embeddings for pretrained language models", 2021.
    """
    if rows and rows > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(rows, mean_resizing=mean_resizing)


def fingerprint(model: ModelSection) -> str | None:
    """Returns the fingerprint of the model's files; None if its weights are drawn."""
    if model.name_or_path is None:
        return None
    folder = model_folder(model)
    with readable(model.name_or_path):
        return ranks.on_first_rank(lambda: fingerprint_of(folder))


def _configuration(model: ModelSection, tokenizer: SpecialTokens) -> PretrainedConfig:
    field, fields = _model_field(model), copy.deepcopy(model.config or {})
    name = model.name_or_path or str(fields.get("model_type"))
    try:
        if model.name_or_path is not None:
            require_no_stored_hub_code(model.name_or_path, model.revision, field)
            config = AutoConfig.from_pretrained(
                model.name_or_path, revision=model.revision, trust_remote_code=model.trust_remote_code
            )
        else:
            config = _random_configuration(fields, tokenizer)
    except ToolkitError:
        raise
    except Exception as error:  # transformers checks a configuration with exceptions of a great many kinds
        mend = f"Correct {_config_place(field)}"
        if not model.trust_remote_code and "custom code" in str(error):
            mend = "Read its code, and set model.trust_remote_code=true to run it"
        raise hub_error(error, field, name, revision=model.revision) or BadInputError(
            f"{field}: no model can be built from {name!r}: {in_words(error)}. {mend}, or name another model"
        ) from error
    require_possible(config, field, name)
    return config


def _random_configuration(fields: dict[str, Any], tokenizer: SpecialTokens) -> PretrainedConfig:
    """Returns a configuration with the tokenizer's vocabulary and special tokens, unless `fields` sets them."""
    require_no_hub_code(fields, "model.config", "the recipe")
    default = AutoConfig.for_model(fields["model_type"])
    # A model that reads more than text has them in a configuration of its own for its language model.
    of_text = fields.setdefault("text_config", {}) if "text_config" in default.sub_configs else fields
    of_text.setdefault("vocab_size", len(tokenizer))
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        of_text.setdefault(token, getattr(tokenizer, token))
    if of_text["vocab_size"] < len(tokenizer):
        raise BadInputError(
            f"model.config.vocab_size: {of_text['vocab_size']} is less than the tokenizer's {len(tokenizer)} tokens; "
            "leave it out or raise it"
        )
    if default.is_encoder_decoder:
        # As T5's, a target begins after a padding token. A type's own defaults are numbers in a vocabulary of its own.
        fields.setdefault("decoder_start_token_id", fields["pad_token_id"])
        if "forced_eos_token_id" in _known_fields(default):
            fields.setdefault("forced_eos_token_id", None)
    _require_known(fields, default, "model.config")
    return AutoConfig.for_model(**fields)


def _known_fields(default: PretrainedConfig) -> set[str]:
    known = {*default.to_dict(), *default.attribute_map}
    # T5's configuration takes them, and does not list them.
    return known | {"bos_token_id", "decoder_start_token_id"} if default.is_encoder_decoder else known


def _require_known(fields: dict[str, Any], default: PretrainedConfig, where: str) -> None:
    """Raises BadInputError for a field that the model type does not know, also in the configuration of a part."""
    known = _known_fields(default)
    if unknown := [key for key in fields if key not in known]:
        raise BadInputError(
            f"{where}: {', '.join(unknown)}: unknown to the model type {default.model_type}"
            f"{did_you_mean(unknown[0], known)}; allowed: {', '.join(sorted(known))}"
        )
    for name in default.sub_configs:
        part, given = getattr(default, name, None), fields.get(name)
        if isinstance(given, dict) and isinstance(part, PretrainedConfig):
            kind = given.get("model_type", part.model_type)
            _require_known(given, part if kind == part.model_type else AutoConfig.for_model(kind), f"{where}.{name}")
