"""An output folder that a run claims, and what is left of a run that ended before it began."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from support.refusals import toolkit
from support.tiny import recipe_values

from toolkit.checkpoint.resume import Resumption
from toolkit.errors import BadInputError
from toolkit.recipe.recipe import Recipe
from toolkit.run.folder import finished
from toolkit.run.folder.finished import changed_export, write_finished
from toolkit.run.folder.folder import claimed, require_unfinished


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


def test_how_an_export_that_is_gone_can_be_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "export").mkdir()
    write_finished(tmp_path, tmp_path / "export")
    assert changed_export(tmp_path) is None
    (tmp_path / "export").rmdir()
    assert "it has no checkpoint to make it from" in str(changed_export(tmp_path))
    monkeypatch.setattr(finished, "latest", lambda _: "a checkpoint")
    told = str(changed_export(tmp_path)).split("`")[1]
    assert shlex.split(told) == ["toolkit", "export", str(tmp_path), "--to", "FOLDER"]
    assert "no complete checkpoint" in toolkit(*shlex.split(told)[1:-1], str(tmp_path / "new")).told, (
        "its options are right"
    )


def test_a_link_to_another_disk_is_not_a_run(tmp_path: Path) -> None:
    recipe = Recipe.from_mapping(recipe_values(tmp_path / "model", tmp_path / "rows.jsonl", tmp_path, tmp_path))
    for name in ("disk", "run"):
        (tmp_path / name).mkdir()
    (tmp_path / "run/checkpoints").symlink_to(tmp_path / "disk")
    assert require_unfinished(tmp_path / "run", recipe, False) is False
    (tmp_path / "disk/step_00000005").mkdir()
    with pytest.raises(BadInputError, match="already holds a run"):
        require_unfinished(tmp_path / "run", recipe, False)


@pytest.mark.parametrize("resume", ["auto", "never", "outputs/first"])
def test_a_run_that_ended_before_its_first_checkpoint_begins_again(resume: str, tmp_path: Path) -> None:
    """Also one that began from another run's checkpoint."""
    values = recipe_values(tmp_path / "model", tmp_path / "rows.jsonl", tmp_path / "run", tmp_path)
    recipe = Recipe.from_mapping({**values, "checkpoint": {"resume": resume}})
    (tmp_path / "run").mkdir()
    (tmp_path / "run/recipe.yaml").write_text(recipe.to_yaml())
    (tmp_path / "run/metrics.jsonl").touch()
    assert require_unfinished(tmp_path / "run", recipe, False) is True
    other = Recipe.from_mapping({**values, "checkpoint": {"resume": "outputs/second"}})
    with pytest.raises(BadInputError, match="already holds a run"):
        require_unfinished(tmp_path / "run", other, False)
