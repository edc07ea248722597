"""An output folder that a run claims, and what is left of a run that ended before it began."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny import recipe_values

from toolkit.checkpoint.resume import Resumption
from toolkit.errors import BadInputError
from toolkit.recipe.recipe import Recipe
from toolkit.run.folder.folder import claimed


@pytest.mark.parametrize("is_taken", [True, False])
def test_a_run_takes_back_its_own_recipe_and_leaves_that_of_another(is_taken: bool, tmp_path: Path) -> None:
    recipe = Recipe.from_mapping(recipe_values(tmp_path / "model", tmp_path / "rows.jsonl", tmp_path, tmp_path))
    written = tmp_path / "recipe.yaml"
    if is_taken:
        written.write_text("another: run\n")
    told = "already holds a run" if is_taken else "no room"
    with pytest.raises(BadInputError, match=told), claimed(tmp_path, recipe, Resumption(None)):
        raise BadInputError("no room")
    assert written.exists() is is_taken
    assert not is_taken or written.read_text() == "another: run\n"
