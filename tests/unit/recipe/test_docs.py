"""docs/recipes.md lists every field of a recipe as the schema has it.

`python tests/unit/recipe/test_docs.py` writes it anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolkit.recipe.recipe import Recipe, Section, _choices, _section_of

PAGE = Path(__file__).parents[3] / "docs/recipes.md"
HEAD = """# Recipe fields

A recipe is a YAML mapping of these sections. Files that it names are relative to the recipe itself. `required` fields
have no default; `null` means unset. Written from `toolkit/recipe/recipe.py`, which also checks it.
"""


def render() -> str:
    parts = [HEAD]
    for name, field in Recipe.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            parts += _sections(name, field.annotation)
    return "\n".join(parts)


def _sections(name: str, section: type[Section]) -> list[str]:
    """The section's table, and one for each kind of section in it."""
    inner = {key: _section_of(field.annotation) for key, field in section.model_fields.items()}
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
    lines += ["| field | default | what it is |", "|---|---|---|"]
    for key, field in section.model_fields.items():
        choices = _choices(field.annotation)
        text = field.description or ""
        if choices:
            text += " One of " + ", ".join(f"`{_plain(choice)}`" for choice in choices) + "."
        lines.append(f"| `{name}.{key}` | {_default(field)} | {text} |")
    return "\n".join(lines) + "\n"


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    return "none set" if isinstance(default, Section) else f"`{_plain(default)}`"


def _plain(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run python tests/unit/recipe/test_docs.py"


def test_every_field_is_described() -> None:
    assert "|  |" not in render()


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
