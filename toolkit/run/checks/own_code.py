"""The user's own code that a run imports: shown at the start, recorded in checkpoints, the same when a run resumes."""

from __future__ import annotations

from toolkit import ranks
from toolkit.checkpoint.manifest import Manifest
from toolkit.paths import file_name
from toolkit.recipe.recipe import Recipe
from toolkit.user_function import load_function, require_same_source


def identify_code(recipe: Recipe) -> dict[str, str]:
    """Returns a fingerprint of the source of each function that the recipe names, by its field. Collective.

    Raises:
        BadInputError: if one cannot be imported.
    """
    named = recipe.own_code()
    return ranks.on_first_rank(lambda: {field: load_function(name, field).fingerprint for field, name in named.items()})


def require_same_code(code: dict[str, str], resumed: Manifest | None) -> None:
    """Checks that a resumed run goes on with the sources that it began with.

    Raises:
        BadInputError: if one has changed; it names the field.
    """
    for field, fingerprint in code.items() if resumed is not None else ():
        assert resumed is not None
        before = resumed.named.get(field, fingerprint)
        require_same_source(before, fingerprint, field, f"ran up to step {resumed.step}")


def code_fact(recipe: Recipe, code: dict[str, str]) -> str | None:
    """Describes the user's own code for the summary and the model card, or returns None if the run imports none."""
    named = recipe.own_code()
    told = [f"{field} {file_name(named[field])} (SHA-256 of its source {code[field][:16]})" for field in code]
    return "; ".join(told) or None
