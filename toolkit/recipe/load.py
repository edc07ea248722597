"""Finds a recipe's file, reads it and applies overrides, before anything is checked."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from toolkit.errors import BadInputError, RecipeError, did_you_mean
from toolkit.paths import DATA_SUFFIXES, is_store, shipped_files
from toolkit.recipe.objectives.section import HOWS, TEMPLATE_NAMES
from toolkit.recipe.schema import RIVALS
from toolkit.recipe.yaml_values import NOT_YAML, override_value, yaml_problem, yaml_value

OVERRIDE = "override"
"""Origin of a value that an override has set."""


def shipped_recipes() -> dict[str, Path]:
    """Returns a dictionary from the name of every shipped recipe to its path."""
    return shipped_files("recipes")


def find_recipe(name_or_path: str | Path) -> Path:
    """Returns the file of a recipe.

    Raises:
        BadInputError: if there is none; it lists the shipped recipes.
    """
    text = str(name_or_path)
    path = Path(text).expanduser()
    if path.is_file():
        return path.resolve()
    shipped = shipped_recipes()
    if text in shipped:
        return shipped[text]
    names = ", ".join(shipped) or "none"
    if path.suffix in (".yaml", ".yml") or "/" in text:
        raise BadInputError(f"recipe {text!r}: there is no such file. Shipped recipes: {names}")
    hint = did_you_mean(text, shipped)
    raise BadInputError(f"recipe {text!r}: there is no recipe of that name{hint}. Shipped recipes: {names}")


def read_yaml(path: Path) -> dict[str, Any]:
    """Returns the sections of a recipe's file. Raises RecipeError if it is not a YAML mapping."""
    return sections_of(text_of(path), str(path))


def text_of(path: Path) -> str:
    """Returns the text of a recipe's file. Raises RecipeError if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(str(path), [yaml_problem(error)]) from None


def sections_of(text: str, origin: str) -> dict[str, Any]:
    """Returns the sections of a recipe's text. Raises RecipeError, which names `origin`, if it is not a mapping."""
    try:
        values = yaml_value(text)
    except NOT_YAML as error:
        raise RecipeError(origin, [yaml_problem(error)]) from None
    if not isinstance(values, dict):
        found = "nothing" if values is None else type(values).__name__
        raise RecipeError(
            origin,
            [
                f"a recipe is a mapping of sections (model, data, ...), found {found}; "
                "run `toolkit recipes copy quickstart mine.yaml` for one to edit"
            ],
        )
    return values


FOREIGN = {
    "axolotl": {"base_model", "datasets", "sequence_len", "micro_batch_size", "val_set_size"},
    "llama_factory": {"finetuning_type", "stage", "cutoff_len", "dataset", "template"},
    "trl": {"model_name_or_path", "dataset_name", "output_dir", "learning_rate"},
}
"""Tool -> keys at the top of its configurations, which a recipe does not have."""


def foreign_hint(values: Mapping[str, Any]) -> list[str]:
    """Returns a line about docs/coming_from if these are another tool's settings: two of its keys or more."""
    counts = {tool: len(keys & values.keys()) for tool, keys in FOREIGN.items()}
    tool = max(counts, key=lambda name: counts[name])
    told = (
        f"it looks like a configuration of {tool}; `toolkit help coming_from/{tool}` says what its keys are called here"
    )
    return [told] if counts[tool] >= 2 else []


NO_FILES = ("dpo", "ipo", "simpo", "orpo", *TEMPLATE_NAMES)
"""Values of `objective.loss` and `data.chat_template` that name no file, though a folder may have such a name."""


NAMES_OF_FILES = (
    ("data", ("train", "validation", "map", "image_root", "chat_template")),
    ("model", ("name_or_path", "tokenizer")),
    ("adapter", ("start_from",)),
    ("objective", ("teacher", "loss", "rewards")),
    ("answers", ("file", "compare")),
    ("training", ("extensions",)),
)
"""Section -> keys that may name files."""


def anchor_paths(values: dict[str, Any], folder: Path) -> None:
    """Makes relative files of a recipe relative to the recipe's folder, wherever the run is started from."""
    for section, keys in NAMES_OF_FILES:
        fields = values.get(section)
        if not isinstance(fields, dict):
            continue
        for key in fields.keys() & set(keys):  # not others: to mention one may be an error
            source = fields[key]
            if isinstance(source, str) and (source in NO_FILES or compares(key, source)):
                continue
            if isinstance(source, list):
                fields[key] = [_absolute_source(item, folder) for item in source]
            else:
                fields[key] = _absolute_source(source, folder)


def compares(key: str, value: str) -> bool:
    """Tells whether a value of `compare` is no function, which may be in a file."""
    return key == "compare" and value.partition("=")[0] in HOWS


FILES_OF_ITEMS = ("path", "compare", "model")
"""Keys of sources and rewards that name files."""


def _absolute_source(source: Any, folder: Path) -> Any:
    if isinstance(source, dict):
        named = {key: source[key] for key in FILES_OF_ITEMS if isinstance(source.get(key), str)}
        paths = {key: _absolute_path(value, folder) for key, value in named.items() if not compares(key, value)}
        return {**source, **paths}
    return _absolute_path(source, folder) if isinstance(source, str) else source


def _absolute_path(source: str, folder: Path) -> str:
    if is_store(source):
        return source
    candidate = folder / os.path.expanduser(source)
    named_as_file = source.endswith((*DATA_SUFFIXES, ".jinja")) or source.startswith(("./", "../")) or ".py:" in source
    return str(candidate.resolve()) if named_as_file or candidate.exists() else source


def apply_overrides(
    values: dict[str, Any], overrides: Iterable[str] | Mapping[str, Any], origins: dict[str, str]
) -> list[str]:
    """Puts overrides into a recipe's values. Returns a line for each override that is wrong."""
    pairs, problems = (list(overrides.items()), []) if isinstance(overrides, Mapping) else _parse_overrides(overrides)
    for key, value in pairs:
        problems += _set_value(values, key, value)
        for stale in [known for known in origins if known == key or known.startswith(f"{key}.")]:
            del origins[stale]
        origins[key] = OVERRIDE
    return problems


def _parse_overrides(texts: Iterable[str]) -> tuple[list[tuple[str, Any]], list[str]]:
    """Returns the key and value of each `section.key=value`, and a line for each text of another form."""
    pairs, problems = [], []
    for text in [texts] if isinstance(texts, str) else texts:
        key, equals, raw = text.partition("=")
        key = key.strip()
        if not equals or not key:
            problems.append(f"override {text!r}: expected key.sub=value, for example training.max_steps=50")
            continue
        try:
            # A glob. YAML would read an alias, and a single value has none.
            pairs.append((key, raw if raw.startswith("*") else override_value(raw)))
        except NOT_YAML as error:
            problems.append(f"override {text!r}: {yaml_problem(error)}")
    return pairs, problems


def _set_value(values: dict[str, Any], key: str, value: Any) -> list[str]:
    *parents, last = key.split(".")
    node: Any = values
    for parent in parents:
        if node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            return [f"override {key}: {parent} is not a section and has no key {last}; remove .{last}"]
    node[last] = value
    return []


def replace_rivals(values: dict[str, Any], origins: dict[str, str]) -> list[str]:
    """Removes settings of the file if an override sets their rival (`schema.RIVALS`). Returns a line for each.

    Two rivals that are set in the same place stay: they are an error.
    """
    notes = []
    for group in RIVALS:
        chosen = [member for member in group if _is_overridden(values, origins, member[0])]
        if len(chosen) != 1:
            continue
        replaced = [
            key for member in group if member not in chosen for key in member if _remove_setting(values, origins, key)
        ]
        for key in replaced:
            origins[key] = f"replaced by {chosen[0][0]}"
        if replaced:
            verb = "are" if len(replaced) > 1 else "is"
            notes.append(f"{' and '.join(replaced)} of the recipe {verb} replaced by {chosen[0][0]}")
    return notes


def _is_overridden(values: dict[str, Any], origins: dict[str, str], key: str) -> bool:
    told = any(origin == OVERRIDE and (known + ".").startswith(key + ".") for known, origin in origins.items())
    return told and _value_at(values, key) is not None


def _value_at(values: dict[str, Any], key: str) -> Any:
    node: Any = values
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def _remove_setting(values: dict[str, Any], origins: dict[str, str], key: str) -> bool:
    """Removes a setting of the file. Returns False if it is not set, or an override has set it."""
    if _value_at(values, key) is None or _is_overridden(values, origins, key):
        return False
    section, name = key.split(".")
    del values[section][name]
    for known in [known for known in origins if (known + ".").startswith(key + ".")]:
        del origins[known]
    return True


def dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(dotted(value, f"{path}."))
        else:
            flat[path] = value
    return flat
