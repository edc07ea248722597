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

from toolkit.data.tokens.tokenizer import added_tokens
from toolkit.errors import ExportError, first_line
from toolkit.model.adapters.targets import is_classifier
from toolkit.model.beside_weights.base_files import (
    ADDED_TOKENS,
    BESIDE_ADAPTER,
    BESIDE_WEIGHTS,
    CHAT_TEMPLATE,
    CODE,
    CONFIG,
    GENERATION,
    PROCESSOR_TEMPLATE,
    SPECIAL_TOKENS,
    TEMPLATES,
    TOKENIZER,
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


# ---- Writes the files of a tokenizer: those of its base, with what the recipe changed set in them ----
# A recipe changes the chat template (`data.chat_template`, `data.template_arguments`) and adds tokens
# (`model.add_tokens`).

Templates = dict[str, str]

OLDER_CLASS = {"TokenizersBackend": "PreTrainedTokenizerFast"}
"""Names of classes that transformers 4 knows, by that of transformers 5, which knows both."""


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path, files: BaseFiles, has_config: bool = True) -> None:
    """Writes a tokenizer.

    Args:
        tokenizer: the tokenizer.
        folder: the folder of the export.
        files: the files that it was loaded from; without any, it is written as transformers 4 and 5 read it.
        has_config: whether the folder has the config.json that these files were next to. transformers 5 finds the class
            by it, also where the files name another one.

    Raises:
        OSError: if a file cannot be written.
    """
    own = files.matching(TOKENIZERS)
    kept = own.without(_replaced_templates(tokenizer, own)).contents
    contents = _new_files(tokenizer, folder) if not own.contents else {**kept}
    if own.contents:
        contents |= _with_template(tokenizer, own)
        contents |= _with_tokens(tokenizer, BaseFiles(contents))
        if not has_config:
            contents |= _with_class(tokenizer, BaseFiles(contents))
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def _new_files(tokenizer: PreTrainedTokenizerBase, folder: Path) -> dict[str, bytes]:
    """Writes a tokenizer by transformers. Returns the file that needs older names, for transformers 4."""
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise OSError(first_line(error)) from error  # of tokenizers, which has no other kind
    return in_older_names(BaseFiles.read(folder, [TOKENIZER_CONFIG])).contents


def in_older_names(files: BaseFiles) -> BaseFiles:
    """Returns a tokenizer's files with settings that transformers 4 reads, too, if transformers 5 wrote them."""
    fields = files.fields(TOKENIZER_CONFIG)
    if fields is None:
        return files
    if (ran := fields.get("tokenizer_class")) in OLDER_CLASS:
        fields["tokenizer_class"] = OLDER_CLASS[ran]
    if isinstance(fields.get("extra_special_tokens"), list):
        fields["additional_special_tokens"] = fields.pop("extra_special_tokens")
    for name in ("is_local", "local_files_only", "backend"):
        fields.pop(name, None)
    return files | BaseFiles({TOKENIZER_CONFIG: as_written(files.contents[TOKENIZER_CONFIG], fields)})


def templates_in(files: BaseFiles) -> Templates:
    """Returns the chat templates that transformers reads from files, by name; a single one is `default`."""
    named = {Path(name).stem: str(files.text(name)) for name in files.contents if name.startswith(f"{TEMPLATES}/")}
    if (text := files.text(CHAT_TEMPLATE)) is not None:
        named["default"] = text
    if named:
        return named
    fields = files.fields(TOKENIZER_CONFIG) or {}
    return _by_name(fields.get("chat_template"))


def templates_of(tokenizer: PreTrainedTokenizerBase) -> Templates:
    """Returns the chat templates of a tokenizer, by name; a single one is `default`."""
    return _by_name(getattr(tokenizer, "chat_template", None))


def _replaced_templates(tokenizer: PreTrainedTokenizerBase, files: BaseFiles) -> list[str]:
    """Returns the files of further templates that a recipe's only one has replaced."""
    now = templates_of(tokenizer)
    return [name for name in files.contents if name.startswith(f"{TEMPLATES}/") and Path(name).stem not in now]


def _by_name(template: Any) -> Templates:
    if isinstance(template, list):
        return {each["name"]: each["template"] for each in template}
    return template if isinstance(template, dict) else {} if template is None else {"default": template}


def _with_template(tokenizer: PreTrainedTokenizerBase, files: BaseFiles) -> dict[str, bytes]:
    """Returns the files that change with the chat template, wherever the base has one."""
    now = templates_of(tokenizer)
    if now == templates_in(files) or not now:
        return {}
    found = {f"{TEMPLATES}/{name}.jinja": text.encode() for name, text in now.items() if name != "default"}
    found = {name: text for name, text in found.items() if name in files.contents}
    default = now.get("default")
    if CHAT_TEMPLATE in files.contents and default is not None:
        found[CHAT_TEMPLATE] = default.encode()
    if (fields := files.fields(PROCESSOR_TEMPLATE)) is not None:
        found[PROCESSOR_TEMPLATE] = as_written(files.contents[PROCESSOR_TEMPLATE], fields | {"chat_template": default})
    fields = files.fields(TOKENIZER_CONFIG) or {}
    if "chat_template" in fields or CHAT_TEMPLATE not in found:
        several = [{"name": name, "template": text} for name, text in now.items()]
        fields["chat_template"] = default if now.keys() == {"default"} else several
        found[TOKENIZER_CONFIG] = as_written(files.contents.get(TOKENIZER_CONFIG), fields)
    return found


def _with_tokens(tokenizer: PreTrainedTokenizerBase, files: BaseFiles) -> dict[str, bytes]:
    """Returns the files that change with `model.add_tokens`: each that lists added or special tokens."""
    names = added_tokens(tokenizer)
    if not names:
        return {}
    added: dict[int, dict[str, Any]] = {}
    for name in names:
        number = int(tokenizer.convert_tokens_to_ids(name))
        token = tokenizer.added_tokens_decoder[number]
        added[number] = {
            "content": token.content,
            "single_word": token.single_word,
            "lstrip": token.lstrip,
            "rstrip": token.rstrip,
            "normalized": token.normalized,
            "special": token.special,
        }
    changed: dict[str, dict[str, Any]] = {TOKENIZER_CONFIG: files.fields(TOKENIZER_CONFIG) or {}}
    for name in (TOKENIZER, SPECIAL_TOKENS, ADDED_TOKENS):
        if (fields := files.fields(name)) is not None:
            changed[name] = fields
    if TOKENIZER in changed:
        kept = [each for each in changed[TOKENIZER].get("added_tokens") or [] if each["id"] not in added]
        new = [{"id": number, **token} for number, token in added.items()]
        changed[TOKENIZER]["added_tokens"] = sorted(kept + new, key=lambda each: int(each["id"]))
    settings = changed[TOKENIZER_CONFIG]
    # transformers 5 lists added tokens in tokenizer.json alone, and adds no others where this key names some.
    inside = {str(each["id"]): each for each in changed.get(TOKENIZER, {}).get("added_tokens") or []}
    own = settings.get("added_tokens_decoder") or inside
    decoder = {**own, **{str(number): added[number] for number in added}}
    decoder = {number: {key: value for key, value in each.items() if key != "id"} for number, each in decoder.items()}
    settings["added_tokens_decoder"] = dict(sorted(decoder.items(), key=lambda item: int(item[0])))
    special = [token["content"] for token in added.values() if token["special"]]
    if special:
        _list_special(settings, special)
    if special and SPECIAL_TOKENS in changed:
        _list_special(changed[SPECIAL_TOKENS], special)
    if ADDED_TOKENS in changed:
        changed[ADDED_TOKENS] |= {token["content"]: number for number, token in added.items()}
    return {name: as_written(files.contents.get(name), fields) for name, fields in changed.items()}


def _with_class(tokenizer: PreTrainedTokenizerBase, files: BaseFiles) -> dict[str, bytes]:
    """Returns the file that names the tokenizer's class, if it does not name that of the run."""
    fields, ran = files.fields(TOKENIZER_CONFIG) or {}, type(tokenizer).__name__
    ran = OLDER_CLASS.get(ran, ran)
    if str(fields.get("tokenizer_class")).removesuffix("Fast") == ran.removesuffix("Fast"):
        return {}
    fields["tokenizer_class"] = ran
    return {TOKENIZER_CONFIG: as_written(files.contents.get(TOKENIZER_CONFIG), fields)}


def _list_special(fields: dict[str, Any], names: list[str]) -> None:
    """Adds tokens to the list of additional special tokens, which transformers 5 calls extra."""
    key = (
        "extra_special_tokens" if isinstance(fields.get("extra_special_tokens"), list) else "additional_special_tokens"
    )
    listed = fields.get(key) or []
    shown = {each["content"] if isinstance(each, dict) else each for each in listed}
    fields[key] = [*listed, *(name for name in names if name not in shown)]
