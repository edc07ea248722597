"""The schema of a recipe, which says what a run does, and its loading. Imports neither torch nor transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.recipe.recipe import Recipe

__all__ = ["Recipe"]


def __getattr__(name: str) -> Any:
    if name == "Recipe":
        from toolkit.recipe.recipe import Recipe

        return Recipe
    raise AttributeError(f"module 'toolkit.recipe' has no attribute {name!r}")
