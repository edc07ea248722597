"""The typed recipe: what to train, on what, and how. Imports neither torch nor transformers.

A recipe is a YAML mapping of sections. `Recipe.load` reads it, applies `key.sub=value` overrides,
checks everything and reports every wrong field together. A loaded recipe is frozen.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import PrivateAttr, ValidationError, model_validator

from toolkit.errors import BadInputError, RecipeError, did_you_mean
from toolkit.paths import DATA_SUFFIXES, is_store, shipped_files
from toolkit.recipe.adapter_file import CONFIG, fill_from_file
from toolkit.recipe.combinations import refusals
from toolkit.recipe.gone import drop_idle
from toolkit.recipe.objectives.section import HOWS, TEMPLATE_NAMES, Comparison, Section, contradiction
from toolkit.recipe.problems import problems_of
from toolkit.recipe.schema import RIVALS, AdapterSection, AnswersSection, ExportSection, Sections, SourceSection
from toolkit.recipe.yaml_values import NOT_YAML, lines_of_keys, override_value, yaml_problem, yaml_text, yaml_value

EXTENSIONS = "training.extensions"


class Recipe(Sections):
    """The settings of a whole run, for example `Recipe.load("quickstart", ["training.max_steps=50"])`."""

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _notes: list[str] = PrivateAttr(default_factory=list)

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        if found := refusals(self):
            raise contradiction("\n".join(map(str, found)))
        return self

    @classmethod
    def load(cls, name_or_path: str | Path, overrides: Iterable[str] | Mapping[str, Any] = ()) -> Recipe:
        """Reads a recipe by the name of a shipped one or by path.

        Args:
            name_or_path: `quickstart`, or the path of a YAML file.
            overrides: `section.key=value` texts, whose values are YAML, or a mapping of `section.key` to values. One
                that sets `model.name_or_path` replaces the `model.config` of the file, and so on for settings that
                exclude each other (`schema.RIVALS`).

        Raises:
            RecipeError: names every wrong field, or says that the file is not a mapping.
            BadInputError: if there is no such recipe.
        """
        path = find_recipe(name_or_path)
        return cls.from_yaml(text_of(path), path.parent, str(path), overrides)

    @classmethod
    def from_yaml(
        cls, text: str, folder: Path, origin: str, overrides: Iterable[str] | Mapping[str, Any] = ()
    ) -> Recipe:
        """Reads a recipe from text.

        Args:
            folder: the folder that relative files in it start from.
            origin: the name of the text in errors.
            overrides: as in `load`.

        Raises:
            RecipeError: names every wrong field, or says that the text is not a mapping.
        """
        values = sections_of(text, origin)
        drop_idle(values)
        origins = dict.fromkeys(dotted(values), origin)
        anchor_paths(values, folder)
        problems = apply_overrides(values, overrides, origins)
        notes = replace_rivals(values, origins)
        given = set(values.get("adapter") or {})
        try:
            recipe = cls._checked(values, origin, problems)
        except RecipeError as error:
            lines = {key: line for key, line in lines_of_keys(text).items() if origins.get(key) != OVERRIDE}
            raise RecipeError(origin, foreign_hint(values) + error.problems, lines) from None
        if recipe.sharding.accumulate == "by_block" and values["sharding"].get("activation_checkpointing") != 1:
            origins["sharding.activation_checkpointing"] = "implied by sharding.accumulate"
        by_file = set(values.get("adapter") or {}) - given
        origins.update({f"adapter.{key}": f"{recipe.adapter.start_from}/{CONFIG}" for key in by_file})
        recipe._origins.update(origins)
        recipe._notes.extend(notes)
        return recipe

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Recipe:
        """Makes a recipe from nested mappings, and checks it as `load` does.

        Raises:
            RecipeError: names every wrong field.
        """
        return cls._checked(dict(values), "recipe", [])

    @classmethod
    def _checked(cls, values: dict[str, Any], origin: str, problems: list[str]) -> Recipe:
        """Fills in the settings that `adapter.start_from` decides, and checks every field."""
        if isinstance(values.get("adapter"), Mapping):
            values["adapter"], contradictions = fill_from_file(values["adapter"])
            problems = problems + contradictions
        try:
            recipe = cls.model_validate(values)
        except ValidationError as error:
            raise RecipeError(origin, problems + problems_of(cls, error.errors())) from None
        if problems:
            raise RecipeError(origin, problems)
        return recipe

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines that name each setting of the file that an override has replaced by its rival."""
        return tuple(self._notes)

    def origins(self) -> dict[str, tuple[Any, str]]:
        """Returns dotted path -> (value, origin); the origin is a file, `override` or `default`."""
        flat = dotted(self.model_dump(mode="json"))
        return {key: (value, self._origin(key)) for key, value in flat.items()}

    def _origin(self, key: str) -> str:
        while key:
            if key in self._origins:
                return self._origins[key]
            key = key.rpartition(".")[0]
        return "default"

    def own_code(self) -> dict[str, str]:
        """Returns the name of each function that a run imports from the user's own files, by its field."""
        own_loss = self.objective.own_loss
        named = {"data.map": self.data.map, "objective.loss": own_loss}
        named |= {"answers.compare": Comparison.of(self.answers.compare).score}
        named |= {f"objective.rewards.{reward.name}": reward.score for reward in self.objective.rewards or []}
        named |= {f"{EXTENSIONS}.{name.rpartition(':')[2]}": name for name in self.training.extensions}
        return {field: name for field, name in named.items() if name is not None}

    def changed(self, **sections: Mapping[str, Any]) -> Recipe:
        """Returns this recipe with other values of fields, `sharding={"tensor": 2}`. Nothing is checked."""
        changed = {name: getattr(self, name).model_copy(update=fields) for name, fields in sections.items()}
        return self.model_copy(update=changed)

    def to_yaml(self) -> str:
        """Returns the resolved recipe as text; loading it gives an equal recipe."""
        return yaml_text(_section_values(self), width=100)


def _section_values(section: Section) -> dict[str, Any]:
    """Returns every field with its value, except fields that may not be mentioned with these settings."""
    written: dict[str, Any] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            written[name] = _section_values(value)
        elif isinstance(value, list) and value and isinstance(value[0], SourceSection):
            written[name] = [_source_value(source) for source in value]
        elif isinstance(value, list) and value and isinstance(value[0], Section):
            written[name] = [item.model_dump(exclude_defaults=True) for item in value]
        elif not _is_conditional(section, name):
            written[name] = value
    return written


def _source_value(source: SourceSection) -> str | dict[str, Any]:
    fields = source.model_dump(exclude_none=True)
    return source.path if list(fields) == ["path"] else fields


def _is_conditional(section: Section, name: str) -> bool:
    if isinstance(section, AdapterSection):
        return name != "kind" and section.kind == "none"
    if isinstance(section, AnswersSection):
        return name != "file" and section.file is None
    return isinstance(section, ExportSection) and name != "enabled" and not section.enabled


# ---- Finds a recipe's file, reads it and applies overrides, before anything is checked ----

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
    ("kept", ("file",)),
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
