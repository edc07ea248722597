"""Writes the pages of docs/ that are made from the code: recipes.md, the fields of a recipe.

python docs/generate.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolkit.recipe.problems import allowed_values, section_of
from toolkit.recipe.recipe import Recipe
from toolkit.recipe.schema import Section

DOCS = Path(__file__).parent
HEAD = """# Recipe fields

A recipe is a YAML mapping of these sections. Files that it names are relative to the recipe itself. `required` fields
have no default; `null` means unset. Written from `toolkit/recipe/schema.py`, which also checks it.
"""


def recipe_fields() -> str:
    parts = [HEAD]
    for name, field in Recipe.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            parts += _sections(name, field.annotation)
    return "\n".join(parts)


def _sections(name: str, section: type[Section]) -> list[str]:
    """The section's table, and one for each kind of section in it."""
    inner = {key: section_of(field.annotation) for key, field in section.model_fields.items()}
    parts = [_section(name, section)]
    kinds: list[Any] = []
    for key, kind in inner.items():
        if kind is not None and kind not in kinds:
            kinds.append(kind)
            is_list = isinstance(kind, list)
            parts.append(_section(f"{name}.{key}.N" if is_list else f"{name}.{key}", kind[0] if is_list else kind))
    return parts


def _section(name: str, section: type[Section]) -> str:
    about = " ".join((section.__doc__ or "").split("\n\n")[0].split())
    lines = [f"{'#' * (2 + min(1, name.count('.')))} {name}\n", about + "\n"]
    lines += ["| field | default | values | what it does |", "|---|---|---|---|"]
    for key, field in section.model_fields.items():
        values = ", ".join(allowed_values(field.annotation, field.metadata)).replace("|", "or")
        lines.append(f"| `{name}.{key}` | {_default(field)} | {values} | {field.description} |")
    return "\n".join(lines) + "\n"


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    return "none set" if isinstance(default, Section) else f"`{_plain(default)}`"


def _plain(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


PAGES = {"recipes.md": recipe_fields}
"""File in docs/ -> what renders it."""

if __name__ == "__main__":
    for name, render in PAGES.items():
        (DOCS / name).write_text(render(), encoding="utf-8")
