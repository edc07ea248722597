"""Writes the files next to the weights: configuration, generation settings, tokenizer, processors, licence.

A base's files stay as they are, byte for byte, and only the fields that training changed are set in them, in their own
names and places: what reads the base reads the export. transformers 5 would write its own names (`rope_parameters`,
`dtype`, the tokenizer class TokenizersBackend), and transformers 4 takes no notice of those that it does not know.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from toolkit.checkpoint.beside_weights.tokenizer_files import save_tokenizer
from toolkit.errors import ExportError
from toolkit.model.adapters.targets import is_classifier
from toolkit.model.beside_weights.base_files import (
    BESIDE_ADAPTER,
    BESIDE_WEIGHTS,
    CODE,
    CONFIG,
    GENERATION,
    TOKENIZER_CONFIG,
    TOKENIZERS,
    BaseFiles,
    as_written,
)

CHANGED = ("vocab_size", "tie_word_embeddings", "pad_token_id", "id2label", "label2id", "problem_type")
"""Fields of a configuration that training may change. The others keep what the base has.

`model.add_tokens` enlarges the vocabulary, a trained head parts from the embeddings, and a classifier has labels and a
token of padding. See also `architectures`, the dtype and `quantization_config` in `_set_kind`.
"""

DTYPES = ("torch_dtype", "dtype")


def write_model_files(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    dtype: torch.dtype,
    files: BaseFiles,
    config: PretrainedConfig | None = None,
) -> None:
    """Writes everything next to the weights of a whole model.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        folder: the folder of the export.
        dtype: the dtype of the exported weights, for the configuration.
        files: the files of the base; without a configuration it is written in transformers' names and in older ones.
        config: the configuration to write. None takes that of the model.

    Raises:
        ExportError: if transformers reads another configuration from the base's names than was trained.
        OSError: if a file cannot be written.
    """
    config = copy.deepcopy(config or model.config)  # the live model is still verified in its own dtype
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder, CONFIG, files, configuration(files, config, model, dtype))
    if model.can_generate():
        settings = generation_settings(files, model)
        if settings is not None:
            _write(folder, GENERATION, files, settings)
    save_tokenizer(tokenizer, folder, files, has_config=files.same_folder(CONFIG, TOKENIZER_CONFIG))
    carry_over(files.matching((*BESIDE_WEIGHTS, *CODE)), folder)


def write_adapter_files(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, files: BaseFiles, own_settings: str | None
) -> None:
    """Writes what an exported adapter has of its base: tokenizer and processors.

    And the generation settings, if they are not the base's, as training taught other ends of an answer.

    Args:
        model: the base.
        own_settings: SHA-256 of the base's own generation_config.json, or None without one.

    Raises:
        OSError: if a file cannot be written.
    """
    settings = generation_settings(files, model) if model.can_generate() else None
    if settings is not None:
        content = as_written(files.contents.get(GENERATION), settings)
        if hashlib.sha256(content).hexdigest() != own_settings:
            (folder / GENERATION).write_bytes(content)
    save_tokenizer(tokenizer, folder, files, has_config=False)
    has_code = "auto_map" in (files.fields(TOKENIZER_CONFIG) or {})
    carry_over(files.matching((*BESIDE_ADAPTER, *(CODE if has_code else ()))), folder)


def carry_over(files: BaseFiles, folder: Path) -> None:
    """Copies files of the base to its export, except its configuration and its tokenizer."""
    for name, content in files.without((CONFIG, GENERATION, *TOKENIZERS)).contents.items():
        (folder / name).write_bytes(content)


def _write(folder: Path, name: str, files: BaseFiles, fields: dict[str, Any]) -> None:
    (folder / name).write_bytes(as_written(files.contents.get(name), fields))


def configuration(
    files: BaseFiles, config: PretrainedConfig, model: PreTrainedModel, dtype: torch.dtype
) -> dict[str, Any]:
    """Returns what config.json says of a trained model.

    Args:
        files: the files of the base.
        config: the configuration of the model, as transformers has it.
        model: the model.
        dtype: the dtype of the exported weights.

    Raises:
        ExportError: see `write_model_files`.
    """
    own = _own_fields(files, config)
    if own is None:
        config.dtype = dtype
        return with_older_names(json.loads(config.to_json_string()), config)
    before, found = _read(config, own), copy.deepcopy(own)
    for field in CHANGED:
        for path, was, now in _changes(field, before, config):
            _set(found, path, before, field, was, now)
    _set_kind(found, config, model, dtype)
    _require_read(found, config)
    return found


def _read(like: PretrainedConfig, fields: dict[str, Any]) -> PretrainedConfig:
    """Returns a configuration as transformers reads it from a file, where infinite numbers are objects."""
    with TemporaryDirectory() as folder:
        (Path(folder) / CONFIG).write_text(json.dumps(fields), encoding="utf-8")
        return type(like).from_dict(like.get_config_dict(folder)[0])


def _own_fields(files: BaseFiles, config: PretrainedConfig) -> dict[str, Any] | None:
    """Returns the base's configuration: all of it, or that of the language model if it was trained alone."""
    fields = files.fields(CONFIG) or {}
    candidates = [fields, *(value for value in fields.values() if isinstance(value, dict))]
    return next((one for one in candidates if one.get("model_type") == config.model_type), None)


def _parts(config: PretrainedConfig, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], PretrainedConfig]]:
    """Yields a configuration and those inside it, as of the language model, with their paths."""
    yield path, config
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if isinstance(inner, PretrainedConfig):
            yield from _parts(inner, (*path, name))


def _changes(
    field: str, before: PretrainedConfig, after: PretrainedConfig
) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Yields where a field differs: the path of the configuration that has it, its old value and its new one."""
    olds = dict(_parts(before))
    for path, part in _parts(after):
        was, now = getattr(olds.get(path), field, None), getattr(part, field, None)
        if was != now:
            yield path, was, now


def _set(
    fields: dict[str, Any], path: tuple[str, ...], before: PretrainedConfig, field: str, was: Any, now: Any
) -> None:
    """Sets a field by the name and in the place that the file has for it."""
    place, part = fields, before
    for name in path:
        if not isinstance(place.get(name), dict):
            break  # older files of Qwen's VL types have the language model's fields at the top
        place, part = place[name], getattr(part, name)
    own_name = part.attribute_map.get(field, field)
    name = next((each for each in (field, own_name) if each in place), own_name)
    place[name] = json.loads(json.dumps(now))
    if field == "id2label" and "num_labels" in place:
        place["num_labels"] = len(now)
    if place is not fields and fields.get(field) == was and was is not None:
        fields[field] = now  # many files say it at the top, too


def _set_kind(fields: dict[str, Any], config: PretrainedConfig, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Sets the class, the dtype of the weights, and that they are not quantised."""
    # Not the class's own name: a sharded model is of a class that torch has made of it.
    named, trained = ((one or [None])[0] for one in (fields.get("architectures"), config.architectures))
    # An old name of the same class (LLaMAForCausalLM) is one that transformers does not have.
    if trained != named and (is_classifier(model) or hasattr(transformers, str(named))):
        fields["architectures"] = [trained]
    if not list(_set_dtype(fields, str(dtype).removeprefix("torch."))) and dtype != torch.float32:
        fields["torch_dtype"] = str(dtype).removeprefix("torch.")
    for _, part in _parts(config):
        if getattr(part, "quantization_config", None) is not None:
            return
    for place in (fields, *(value for value in fields.values() if isinstance(value, dict))):
        place.pop("quantization_config", None)


def _set_dtype(fields: dict[str, Any], dtype: str) -> Iterator[str]:
    """Sets the dtype wherever a configuration names one. Yields the names."""
    for name, value in fields.items():
        if isinstance(value, dict) and name != "quantization_config":
            yield from _set_dtype(value, dtype)
        elif name in DTYPES and isinstance(value, str):
            fields[name] = dtype
            yield name


def _require_read(fields: dict[str, Any], config: PretrainedConfig) -> None:
    """Checks that transformers reads the trained configuration from the base's names."""
    again = _read(config, fields)
    wrong = [field for field in CHANGED for _ in _changes(field, again, config)]
    if wrong:
        raise ExportError(
            f"config.json of the base has no place that is known here for {', '.join(dict.fromkeys(wrong))}, which "
            "training changed; report the base's name and its config.json"
        )


def generation_settings(files: BaseFiles, model: PreTrainedModel) -> dict[str, Any] | None:
    """Returns what generation_config.json says: the base's settings with the ends of an answer that were taught.

    Returns:
        None if the base has no such file and nothing was taught: config.json has its ends.
    """
    # Not by `save_pretrained`, which refuses settings that many bases have, such as a temperature without sampling.
    settings: Any = model.generation_config
    now = settings.eos_token_id
    fields = files.fields(GENERATION)
    if fields is None:
        if CONFIG in files.contents and GENERATION not in files.contents and now == model.config.eos_token_id:
            return None
        fields = json.loads(settings.to_json_string())
    elif now == fields.get("eos_token_id", now if now == getattr(model.config, "eos_token_id", None) else None):
        return fields
    # With this mark transformers may make the settings anew of config.json, without the ends.
    fields = {name: value for name, value in fields.items() if name != "_from_model_config"}
    return fields | {"eos_token_id": now} if now is not None else fields


# ---- Adds the names that transformers 4 reads to a configuration that transformers 5 wrote ----
# Only a model that the recipe describes itself (`model.config`) needs them: others have their base's names.

KNOWN = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
"""Kinds of rotary positions that transformers 4 has. Models with other ones are newer."""

THETA, SHARE = "rope_theta", "partial_rotary_factor"
OF_TYPE = {
    "gpt_neox": ("rotary_emb_base", "rotary_pct"),
    "modernbert": ("global_rope_theta", SHARE),
}
"""Names that a type has of its own for the base of the positions, and for the share of a head that is rotated."""

SLIDING = {
    "gemma3_text": "rope_local_base_freq",
    "gemma3n_text": "rope_local_base_freq",
    "modernbert": "local_rope_theta",
}
"""Names for the base of the positions in layers with a sliding window."""


def with_older_names(fields: dict[str, Any], config: PretrainedConfig) -> dict[str, Any]:
    """Returns the fields with `torch_dtype`, `rope_theta` and `rope_scaling` next to the new names.

    Args:
        fields: what config.json says.
        config: the configuration that they were written from. Names that would change it are left out.
    """
    found = _beside(copy.deepcopy(fields))
    again, before = type(config).from_dict(copy.deepcopy(found)).to_dict(), config.to_dict()
    return found if all(again.get(name) == value for name, value in before.items()) else fields


def _beside(fields: dict[str, Any]) -> dict[str, Any]:
    for value in list(fields.values()):
        if isinstance(value, dict) and "model_type" in value:
            _beside(value)
    if isinstance(fields.get("dtype"), str):
        fields.setdefault("torch_dtype", fields["dtype"])
    rope, kind = fields.get("rope_parameters"), str(fields.get("model_type"))
    if not isinstance(rope, dict):
        return fields
    of_layers = rope.get("full_attention", rope)
    if isinstance(of_layers, dict) and of_layers.get("rope_type") in KNOWN and of_layers.get(THETA) is not None:
        theta, share = OF_TYPE.get(kind, (THETA, SHARE))
        fields.setdefault(theta, of_layers[THETA])
        if SHARE in of_layers:
            fields.setdefault(share, of_layers[SHARE])
        scaling = {name: value for name, value in of_layers.items() if name not in (THETA, SHARE)}
        fields.setdefault("rope_scaling", None if scaling == {"rope_type": "default"} else scaling)
        if kind in SLIDING:
            fields.setdefault(SLIDING[kind], rope["sliding_attention"][THETA])
    return fields
