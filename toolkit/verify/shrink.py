"""Shrinks the recipe's model to its first blocks, for `--layers`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PretrainedConfig

from toolkit.data.rows.hub_refusals import download
from toolkit.errors import BadInputError, counted, first_line
from toolkit.model.structure.model_parts import writer_class
from toolkit.paths import require_folder
from toolkit.recipe.recipe import Recipe
from toolkit.recipe.schema import ModelSection


def with_layers(recipe: Recipe, layers: int | None, folder: Path) -> tuple[Recipe, str]:
    """Returns the recipe with its model shrunk to its first blocks, and says where the weights come from.

    Args:
        recipe: the recipe.
        layers: the number of blocks to keep. None keeps all.
        folder: a temporary folder, for the shrunk model.

    Raises:
        BadInputError: if the model has fewer blocks, or its configuration cannot be read.
    """
    section = recipe.model
    if layers is None:
        return recipe, f"of {section.name_or_path}" if section.name_or_path else "random, as the recipe says"
    if section.config is not None:
        fields = dict(section.config)
        shrink(fields, _build_config(fields), layers)
        origin = f"random, as the recipe says; the first {counted(layers, 'block')}"
        return recipe.changed(model={"config": fields}), origin
    source, shrunk = source_folder(section), folder / "model-cut"
    _copy_model(source, shrunk, layers, section)
    name = section.name_or_path
    origin = f"of {name}; the first {counted(layers, 'block')}"
    trust = section.trust_remote_code
    writer = writer_class(AutoConfig.from_pretrained(shrunk, trust_remote_code=trust))
    auto = AutoModelForSeq2SeqLM if recipe.objective.spec.encoder_decoder else writer
    if not _has_all_weights(auto, shrunk, section):
        _write_random_weights(auto, shrunk, section, recipe.training.seed)
        origin = f"random: {name} holds no weights that fit its first {layers} blocks"
    # The files also hold the blocks that were cut off, which have no place now.
    return recipe.changed(model={"name_or_path": str(shrunk), "revision": None, "allow_new_weights": ["*"]}), origin


def _build_config(fields: dict[str, Any]) -> PretrainedConfig:
    try:
        return AutoConfig.for_model(**fields)
    except (ValueError, KeyError, TypeError) as error:
        raise BadInputError(f"model.config: no model can be built from {fields!r}: {first_line(error)}") from error


def shrink(fields: dict[str, Any], config: PretrainedConfig, layers: int) -> None:
    """Changes the fields of a configuration in place, so that it has only the first blocks.

    Lists with an item for each block are cut too. An encoder-decoder keeps the first blocks of each half.

    Args:
        fields: the fields of the configuration, changed in place.
        config: the configuration of the whole model.
        layers: the number of blocks to keep.

    Raises:
        BadInputError: if the model has fewer blocks, or does not say how many it has.
    """
    text = config.get_text_config()
    found = getattr(text, "num_hidden_layers", None)
    if not isinstance(found, int):
        raise BadInputError(f"--layers: {type(config).__name__} has no num_hidden_layers; leave --layers out")
    # The other half of an encoder-decoder.
    others = {key: getattr(text, key, None) for key in ("decoder_layers", "num_decoder_layers")}
    depths = {key: depth for key, depth in others.items() if isinstance(depth, int)}
    deepest = max([found, *depths.values()])
    if layers > deepest:
        raise BadInputError(f"--layers: found {layers}, but the model has {counted(deepest, 'block')}; lower it")
    if text is not config and isinstance(fields.get("text_config"), dict):
        fields["text_config"] = fields = dict(fields["text_config"])
    for key, value in fields.items():
        if isinstance(value, list) and len(value) == found:
            fields[key] = value[:layers]
    fields.pop("num_hidden_layers", None)
    depths[text.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = found
    fields |= {key: min(layers, depth) for key, depth in depths.items()}


def source_folder(section: ModelSection) -> Path:
    """Returns the folder of the model, downloaded from the hub if needed.

    Raises:
        BadInputError: if `model.name_or_path` is a path and there is no such folder.
    """
    assert section.name_or_path is not None
    require_folder(section.name_or_path, "model.name_or_path")
    folder = Path(section.name_or_path).expanduser()
    if folder.is_dir():
        return folder.resolve()
    patterns = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]
    return download(section.name_or_path, "model.name_or_path", section.revision, patterns)


def _copy_model(source: Path, target: Path, layers: int, section: ModelSection) -> None:
    """Copies `source` with a shrunk configuration. Weights are symbolic links and are never written."""
    target.mkdir()
    for file in source.iterdir():
        if file.suffix == ".safetensors":
            (target / file.name).symlink_to(file.resolve())
        elif file.is_file() and file.suffix not in (".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack"):
            shutil.copyfile(file, target / file.name)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=section.trust_remote_code)
        fields = json.loads((source / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError) as error:
        raise BadInputError(f"model.name_or_path: no configuration in {str(source)!r}: {first_line(error)}") from error
    shrink(fields, config, layers)
    (target / "config.json").write_text(json.dumps(fields), encoding="utf-8")


def _has_all_weights(auto: Any, folder: Path, section: ModelSection) -> bool:
    """Returns whether the folder stores every parameter of the shrunk model, in its shape."""
    try:
        _, found = auto.from_pretrained(folder, trust_remote_code=section.trust_remote_code, output_loading_info=True)
    except (OSError, ValueError, RuntimeError):
        return False
    return not found["missing_keys"] and not found["mismatched_keys"]


def _write_random_weights(auto: Any, folder: Path, section: ModelSection, seed: int) -> None:
    for file in (*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")):
        file.unlink()
    config = AutoConfig.from_pretrained(folder, trust_remote_code=section.trust_remote_code)
    torch.manual_seed(seed)
    auto.from_config(config, trust_remote_code=section.trust_remote_code).save_pretrained(folder)
