"""A draft of a recipe: values by key, each with its reason, and their YAML text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Any

from toolkit.errors import RecipeError
from toolkit.recipe.recipe import Recipe, apply_overrides, dotted
from toolkit.recipe.schema import RIVALS
from toolkit.recipe.yaml_values import yaml_text
from toolkit.terminal import one_line

GIVEN = "Given on the command line."

COLUMNS = 100
"""The most characters of a comment line."""


class Draft:
    """Values and reasons, in the order in which they are set.

    Given values stay: they are not replaced, and settings that they exclude are not set (`schema.RIVALS`).
    """

    def __init__(self, overrides: Iterable[str] = ()) -> None:
        """Parses the overrides.

        Raises:
            RecipeError: if they cannot be read.
        """
        given: dict[str, Any] = {}
        if problems := apply_overrides(given, overrides, {}):
            raise RecipeError("init", problems)
        self.given = dotted(given)
        self.values: dict[str, Any] = {}
        self.reasons: dict[str, str] = {}

    def set(self, key: str, value: Any, reason: str = "") -> None:
        """Sets a value, unless it or its rival is given."""
        if key in self.given or any(rival in self.given for rival in _rivals(key)):
            return
        self.values[key] = value
        self.reasons[key] = reason

    def drop(self, key: str) -> None:
        """Removes a value that was set before; a given one stays."""
        self.values.pop(key, None)
        self.reasons.pop(key, None)

    def get(self, key: str, default: Any = None) -> Any:
        return self.given.get(key, self.values.get(key, default))

    def nested(self) -> dict[str, Any]:
        """Returns the recipe as nested mappings, its sections in the order of the schema."""
        found: dict[str, Any] = {name: {} for name in Recipe.model_fields}
        for key, value in {**self.values, **self.given}.items():
            *parents, last = key.split(".")
            node = found
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = value
        return {name: value for name, value in found.items() if value != {}}

    def section(self, name: str) -> dict[str, Any]:
        """Returns the values set so far in a section."""
        found: dict[str, Any] = self.nested().get(name, {})
        return found

    def recipe(self) -> Recipe:
        """Returns the checked recipe.

        Raises:
            RecipeError: if a given value is wrong.
        """
        return Recipe.from_mapping(self.nested())

    def all_reasons(self) -> dict[str, str]:
        """Returns the reason for each key's value."""
        return {**self.reasons, **dict.fromkeys(self.given, GIVEN)}

    def text(self, head: Iterable[str]) -> str:
        """Returns the recipe as YAML with the reasons as comments; `head` are comment lines at the top."""
        lines = [f"# {line}" for line in head]
        reasons = self.all_reasons()
        for name, value in self.nested().items():
            lines += ["", *_lines(name, value, "", reasons)]
        return "\n".join(lines) + "\n"


def _rivals(key: str) -> set[str]:
    """Returns the settings that a setting excludes."""
    groups = [group for group in RIVALS if any(key in member for member in group)]
    return {rival for group in groups for member in group if key not in member for rival in member}


def _lines(path: str, value: Any, indent: str, reasons: dict[str, str]) -> list[str]:
    """Returns the lines of a value, or of all values in it, each below its reason."""
    name = path.rpartition(".")[2]
    if isinstance(value, dict) and value:
        inner = [line for key in value for line in _lines(f"{path}.{key}", value[key], f"{indent}  ", reasons)]
        return [f"{indent}{name}:", *inner]
    why = textwrap.wrap(
        one_line(reasons.get(path, "")), COLUMNS, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "
    )
    text = yaml_text(value, default_flow_style=True, width=10_000)
    # A bare scalar is a document of its own, which YAML may close with dots.
    return [*why, f"{indent}{name}: {text.strip().removesuffix('...').strip()}"]
