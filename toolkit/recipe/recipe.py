"""The typed recipe: what to train, on what, and how. Imports neither torch nor transformers.

A recipe is a YAML mapping of sections. `Recipe.load` reads it, applies `key.sub=value` overrides,
checks everything and reports every wrong field together. A loaded recipe is frozen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import PrivateAttr, ValidationError, model_validator

from toolkit.errors import RecipeError
from toolkit.recipe.adapter_file import CONFIG, fill_from_file
from toolkit.recipe.combinations import refusals
from toolkit.recipe.gone import drop_idle
from toolkit.recipe.load import (
    OVERRIDE,
    anchor_paths,
    apply_overrides,
    dotted,
    find_recipe,
    foreign_hint,
    replace_rivals,
    sections_of,
    text_of,
)
from toolkit.recipe.objectives.section import Comparison, Section, contradiction
from toolkit.recipe.problems import problems_of
from toolkit.recipe.schema import (
    AdapterSection,
    AnswersSection,
    ExportSection,
    Sections,
    SourceSection,
)
from toolkit.recipe.yaml_values import lines_of_keys, yaml_text

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
