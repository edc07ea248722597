"""Reads and checks the adapter_config.json of the adapter that a run continues (`adapter.start_from`).

It reads only JSON. `toolkit.model.adapters.started_adapter` reads the weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from toolkit.errors import BadInputError, first_line
from toolkit.paths import parse_json, read_foreign
from toolkit.recipe.problems import problems_of
from toolkit.recipe.schema import AdapterSection

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

PER_EXPERT = "per_expert"
"""The folder in an adapter's, with the same adapter by expert, for servers."""

_FIELDS_AS_SETTINGS = ("r", "lora_alpha", "target_modules", "modules_to_save", "use_rslora", "use_dora")
"""Fields of peft's file that become settings of the recipe."""

_IGNORED_FIELDS = (
    "auto_mapping",
    "base_model_name_or_path",  # compared with the recipe's, once the model is known
    "exclude_modules",  # what is adapted, the names of the tensors say
    "fan_in_fan_out",  # peft sets it by the kind of layer
    "inference_mode",
    "lora_dropout",
    "peft_type",
    "peft_version",
    "qalora_group_size",  # of use_qalora
    "revision",
    "target_parameters",  # as exclude_modules
    "task_type",
)
"""Fields that do not change what the tensors of an adapter mean, or are compared elsewhere."""

_HARMLESS_VALUES: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),  # others change the base's own weights
    "megatron_core": ("megatron.core",),
    "runtime_config": ({"ephemeral_gpu_offload": False},),
}
"""Fields that every file has, and their values that change nothing."""

_OFF_VALUES: tuple[Any, ...] = (None, False, [], {})
"""Values that turn a field off, including fields of a later peft."""

_CLASSIFIER_HEADS = ("classifier", "score")
"""Modules that peft adds to `modules_to_save` of every classifier, whether or not it has them."""


def read_config(folder: Path, place: str) -> dict[str, Any]:
    """Reads the adapter_config.json of a folder that holds an adapter's weights as safetensors.

    Args:
        place: names the folder in errors.

    Raises:
        BadInputError: if the weights are missing or pickled, or the file is not a JSON object.
    """
    if not (folder / WEIGHTS).is_file():
        pickled = (
            " (adapter_model.bin is a pickle, which can run code)" if (folder / "adapter_model.bin").is_file() else ""
        )
        raise BadInputError(f"{place}: {CONFIG} without {WEIGHTS}{pickled}; save it again")
    try:
        config = parse_json(read_foreign(folder / CONFIG))
    except ValueError as error:
        raise BadInputError(f"{place}: {CONFIG} is not JSON: {first_line(error)}; save the adapter again") from error
    except OSError as error:
        raise BadInputError(f"{place}: {CONFIG} cannot be read: {first_line(error)}; save it again") from error
    if not isinstance(config, dict):
        raise BadInputError(f"{place}: {CONFIG} is not an object; save the adapter again")
    return config


def started_config(start_from: str) -> dict[str, Any]:
    """Returns the configuration of the adapter to continue.

    Raises:
        BadInputError: if the folder holds no adapter, or one that cannot be trained here.
    """
    place, folder = f"adapter.start_from: {start_from!r}", Path(start_from).expanduser()
    if not folder.is_dir():
        raise BadInputError(
            f"{place} {'is a file' if folder.is_file() else 'does not exist'}; name the folder of an adapter "
            f"({CONFIG} and {WEIGHTS}). One of the hub is downloaded by `hf download`, which prints its folder"
        )
    if not (folder / CONFIG).is_file():
        mend = "name the export of a run of adapter.kind=lora (with export.merge=true it is a whole model)"
        if (folder / "export" / CONFIG).is_file():
            mend = f"name {str(folder / 'export')!r}"
        raise BadInputError(f"{place} holds no adapter ({CONFIG}); {mend}")
    config = read_config(folder, place)
    if config.get("peft_type") != "LORA":
        raise BadInputError(f"{place} is of peft_type {config.get('peft_type')!r} in its {CONFIG}; allowed: LORA")
    known = (*_FIELDS_AS_SETTINGS, *_IGNORED_FIELDS)
    for field, value in config.items():
        usual = _HARMLESS_VALUES.get(field, ())
        # By type, too: in Python 0 is False and 1 is True.
        if field not in known and not any(type(value) is type(one) and value == one for one in (*_OFF_VALUES, *usual)):
            allowed = " or ".join(json.dumps(one) for one in usual) or "none"
            raise BadInputError(
                f"{place}: {field} is {json.dumps(value)} in its {CONFIG}, which is not supported; allowed: {allowed}. "
                "Merge that adapter into its base with peft (merge_and_unload), and name the result in "
                "model.name_or_path"
            )
    return config


def started_settings(start_from: str) -> dict[str, Any]:
    """Returns the settings of the recipe's section `adapter` that the file decides.

    Raises:
        BadInputError: as `started_config`, or if a field of the file has a wrong type.
    """
    config = started_config(start_from)
    # What an old peft did not write was off. The dropout is of training, so it is the recipe's.
    found = {name: config.get(name, False) for name in ("use_rslora", "use_dora")}
    # Null would be the recipe's default.
    found |= {"r": config.get("r"), "alpha": config.get("lora_alpha") or 0, "modules_to_save": _modules_to_save(config)}
    # With parameters of experts among them the file has no words of ours: the recipe's are compared with the tensors.
    if (targets := config.get("target_modules")) and not config.get("target_parameters"):
        found["target_modules"] = sorted(targets) if _is_list_of_names(targets) else targets
    try:
        checked = AdapterSection.model_validate({"kind": "lora", **found})
    except ValidationError as error:
        problems = "; ".join(problems_of(AdapterSection, error.errors()))
        raise BadInputError(f"adapter.start_from: {start_from!r}: its {CONFIG} cannot be used: {problems}") from None
    return {**found, "alpha": checked.alpha}


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _modules_to_save(config: dict[str, Any]) -> Any:
    names: Any = config.get("modules_to_save") or None
    if _is_list_of_names(names):
        heads = _CLASSIFIER_HEADS if config.get("task_type") in ("SEQ_CLS", "TOKEN_CLS") else ()
        names = sorted(set(names).difference(heads)) or None
    return names


def fill_from_file(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Fills in the section `adapter` from the file; returns it, and a line for each setting that contradicts the file.

    Without `start_from`, or if its folder does not exist, the section is unchanged: training reports the missing
    folder, and reading the recipe of a finished run does not need it.
    """
    section = dict(values)
    place = section.get("start_from")
    is_adapted = section.get("kind") == "lora"
    if not is_adapted or not isinstance(place, str) or not Path(place).expanduser().is_dir():
        return section, []
    try:
        decided = started_settings(place)
    except BadInputError as error:
        return section, [str(error)]
    problems = []
    for name, value in decided.items():
        given = section.setdefault(name, value)
        if name == "alpha" and given is None:
            given = 2 * decided["r"]
        # Names in other words may mean the same modules: those are compared with the tensors.
        if name != "target_modules" and (sorted(given) if _is_list_of_names(given) else given) != value:
            mend = f"remove adapter.{name}, or set it to {json.dumps(value)}"
            problems.append(
                f"adapter.{name}: {json.dumps(given, default=str)}, but the adapter of adapter.start_from ({place!r}) "
                f"has {json.dumps(value)}; {mend}"
            )
    return section, problems
