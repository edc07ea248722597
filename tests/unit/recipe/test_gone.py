"""Each name that is gone ends in one error, which says since when and what to do instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from toolkit.cli.app import app
from toolkit.errors import BadInputError, RecipeError
from toolkit.recipe.gone import GONE_COMMANDS, GONE_KEYS, GONE_OPTIONS
from toolkit.recipe.recipe import Recipe

ITEMS = ("data.train", "data.validation", "objective.rewards")
"""Lists of mappings."""

WITHOUT_ARGUMENTS: Any = {"prog_name": "toolkit", "standalone_mode": False}


def with_key(name: str, value: object) -> dict[str, Any]:
    """Returns the sections of a recipe with a key that is gone."""
    recipe = yaml.safe_load(Recipe.load("quickstart").to_yaml())
    *parents, key = name.split(".")
    node = recipe
    for end, parent in enumerate(parents, 1):
        if ".".join(parents[:end]) in ITEMS:
            node[parent] = [{}]
            node = node[parent][0]
        else:
            node = node.setdefault(parent, {})
    node[key] = value
    return recipe


@pytest.mark.parametrize("name", GONE_KEYS)
def test_a_key_that_is_gone(tmp_path: Path, name: str) -> None:
    row = GONE_KEYS[name]
    key, equals, value = name.partition("=")
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(with_key(key, yaml.safe_load(value) if equals else {"not": "idle"})))
    with pytest.raises(RecipeError, match="problem") as error:
        Recipe.load(path)
    (problem,) = (line for line in error.value.problems if "gone since" in line)  # an item of a list lacks others
    assert f"gone since {row.since}; {row.instead}" in problem
    assert error.value.exit_code == 2
    if not equals:
        for idle in row.idle:
            path.write_text(yaml.safe_dump(with_key(key, idle)))
            assert Recipe.load(path).model_dump() == Recipe.load("quickstart").model_dump(), (
                "the recipe of an earlier run still starts it"
            )


@pytest.mark.parametrize("name", [*GONE_COMMANDS, *GONE_OPTIONS])
def test_a_command_or_option_that_is_gone(name: str) -> None:
    row = (GONE_COMMANDS | GONE_OPTIONS)[name]
    with pytest.raises(BadInputError, match=f"toolkit {name}: gone since") as error:
        app(name.split(), **WITHOUT_ARGUMENTS)
    assert str(error.value).endswith(row.instead)
    assert error.value.exit_code == 2
