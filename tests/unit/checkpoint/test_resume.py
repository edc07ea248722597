"""A run goes on from the newest good checkpoint, says what it passed over, and sets it aside."""

from __future__ import annotations

import errno
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_manifest import COMPLETE, DAMAGE, PLAIN, forge, written

from toolkit.checkpoint import list_checkpoints, read_checkpoint, writer
from toolkit.checkpoint.resume import find, set_aside
from toolkit.checkpoint.writer import Checkpointer, Save, clear_unfinished, remove
from toolkit.errors import BadInputError
from toolkit.recipe.schema import CheckpointSection


def flip(folder: Path) -> None:
    """Changes a byte, and no size."""
    content = bytearray((folder / "shard.safetensors").read_bytes())
    content[3] ^= 1
    (folder / "shard.safetensors").write_bytes(content)


EVERY_DAMAGE = {kind: damage for kind, (damage, _) in DAMAGE.items()}
EVERY_DAMAGE |= {"flipped": flip, "unfinished": lambda folder: (folder / COMPLETE).unlink()}


@pytest.mark.parametrize("kind", EVERY_DAMAGE)
def test_whatever_the_damage_the_one_before_is_taken(kind: str, tmp_path: Path) -> None:
    good = written(tmp_path, 5)
    EVERY_DAMAGE[kind](written(tmp_path, 7))
    found = find(tmp_path, "auto", PLAIN.recipe)
    assert found.start is not None
    assert found.start[0] == good
    (told,) = set_aside(found.passed_over, tmp_path)
    assert told.startswith("passed over step_00000007: ")
    assert told.endswith("; it is now step_00000007.set_aside")
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [5]
    assert find(tmp_path, "auto", PLAIN.recipe).passed_over == ()


def test_what_was_set_aside_before_stays(tmp_path: Path) -> None:
    written(tmp_path, 5)
    for name in ("step_00000007.set_aside", "step_00000007.set_aside-2"):
        flip(written(tmp_path, 7))
        (told,) = set_aside(find(tmp_path, "auto", PLAIN.recipe).passed_over, tmp_path)
        assert told.endswith(name)


def test_of_what_was_set_aside_an_interrupted_save_goes_when_a_later_one_is_whole(tmp_path: Path) -> None:
    written(tmp_path, 5)
    for step, spoil in ((7, flip), (8, EVERY_DAMAGE["unfinished"]), (9, EVERY_DAMAGE["unfinished"])):
        spoil(written(tmp_path, step))
    set_aside(find(tmp_path, "auto", PLAIN.recipe).passed_over, tmp_path)
    kept = ["step_00000005", "step_00000007.set_aside", "step_00000008.set_aside", "step_00000009.set_aside"]
    (tmp_path / "checkpoints/step_mine.set_aside").mkdir()
    clear_unfinished(tmp_path)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [*kept, "step_mine.set_aside"]
    written(tmp_path, 8)
    clear_unfinished(tmp_path)
    kept[2] = "step_00000008"
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [*kept, "step_mine.set_aside"]


def test_a_run_of_which_nothing_is_good_is_not_begun_anew(tmp_path: Path) -> None:
    for step in (5, 7):
        flip(written(tmp_path, step))
    with pytest.raises(BadInputError, match="no checkpoint of") as error:
        find(tmp_path, "auto", PLAIN.recipe)
    assert "  - step_00000007: shard.safetensors is not what was written" in str(error.value)
    assert "  - step_00000005: " in str(error.value)


def test_what_was_never_finished_is_no_loss(tmp_path: Path) -> None:
    (written(tmp_path, 5) / COMPLETE).unlink()
    found = find(tmp_path, "auto", PLAIN.recipe)
    assert found.start is None
    assert [checkpoint.step for checkpoint in found.passed_over] == [5]


def test_a_save_whose_marker_finds_no_room_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    told: list[str] = []
    checkpointer = Checkpointer(tmp_path, CheckpointSection(), told.append)
    job = Save(replace(PLAIN, step=3, world_size=1), {"model.a": torch.ones(4)}, ["a"], {}, [])
    monkeypatch.setattr(writer, "atomic_write", full)
    assert not checkpointer.save(job, wait=True)
    assert list((tmp_path / "checkpoints").iterdir()) == []
    monkeypatch.undo()
    assert checkpointer.save(job, wait=True)
    assert [checkpoint.problem for checkpoint in list_checkpoints(tmp_path)] == [None]
    assert len(told) == 1
    assert "No space left on device" in told[0]


def test_a_checkpoint_that_was_named_is_taken_or_refused(tmp_path: Path) -> None:
    written(tmp_path, 5)
    forge(non_finite="lm_head.weight holds values that are not finite")(written(tmp_path, 7))
    with pytest.raises(BadInputError, match="holds values that are not finite"):
        find(tmp_path / "new", str(tmp_path / "checkpoints/step_00000007"), PLAIN.recipe)
    found = find(tmp_path / "new", str(tmp_path), PLAIN.recipe)
    assert found.start is not None
    assert found.start[1].step == 5
    set_aside(found.passed_over, tmp_path / "new")
    assert len(list_checkpoints(tmp_path)) == 2, "another run's folder stays as it is"
    with pytest.raises(BadInputError, match="is of another run"):
        find(tmp_path / "new", str(tmp_path), {"training": {"seed": 2}, "optimizer": {}})
    newest = written(tmp_path, 9)
    own = find(tmp_path, str(newest), PLAIN.recipe)
    assert (own.start is not None, own.is_own) == (True, True), "the run goes on from its own newest"
    (tmp_path / "link").mkdir()
    (tmp_path / "link/checkpoints").symlink_to(tmp_path / "checkpoints")
    assert find(tmp_path / "link", str(tmp_path / "link/checkpoints" / newest.name), PLAIN.recipe).is_own
    older = str(tmp_path / "checkpoints/step_00000005")
    with pytest.raises(BadInputError, match=r"which has later checkpoints \(step_00000009\)"):
        find(tmp_path, older, {**PLAIN.recipe, "checkpoint": {"resume": older}})


def test_the_same_command_goes_on_from_what_it_saved_itself(tmp_path: Path) -> None:
    """It began from another run's checkpoint, and was interrupted behind its first own one."""
    first, run = tmp_path / "first", tmp_path / "second"
    written(first, 5)
    recipe = {**PLAIN.recipe, "checkpoint": {"resume": str(first)}, "data": {"template_date": None}}
    begun = find(run, str(first), recipe)
    assert (begun.start is not None and begun.start[1].step, begun.is_own) == (5, False)
    forge(recipe={**recipe, "data": {"template_date": "2026-11-28"}})(written(run, 7))  # settled by the first start
    again = find(run, str(first), recipe)
    assert (again.start is not None and again.start[1].step, again.is_own) == (7, True)
    with pytest.raises(BadInputError, match=r"which has later checkpoints \(step_00000007\)"):
        find(run, str(first), {**recipe, "schedule": {"kind": "constant"}})


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_checkpoint_says_that_its_weights_are_not_finite(tmp_path: Path, asynchronous: bool) -> None:
    """A mask may hold infinities; weights may not. Rotation keeps the last good one all the same."""
    told: list[str] = []
    settings = CheckpointSection(every_steps=1, keep_last=1, asynchronous=asynchronous)
    checkpointer = Checkpointer(tmp_path, settings, told.append)
    weights = {"model.a": torch.ones(4), "model.mask": torch.tensor([0.0, -math.inf]), "optimizer.a": torch.ones(4)}
    for step, value in enumerate((1.0, 2.0, math.nan, math.inf, -math.inf), start=1):
        weights["model.a"][2] = value
        manifest = replace(PLAIN, step=step, world_size=1)
        checkpointer.save(Save(manifest, weights, ["a"], {}, []))
        checkpointer.wait()
    assert [line.partition("; ")[0] for line in told] == [
        f"the checkpoint of step {step} does not count: a holds values that are not finite" for step in (3, 4, 5)
    ]
    found = list_checkpoints(tmp_path)
    assert [(checkpoint.step, checkpoint.problem is None) for checkpoint in found] == [(2, True), (5, False)]
    assert find(tmp_path, "auto", PLAIN.recipe).start == (found[0].folder, read_checkpoint(found[0].folder))


def test_half_of_a_deleted_checkpoint_is_cleared_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (7, 9):
        written(tmp_path, step)
    monkeypatch.setattr("toolkit.checkpoint.writer.shutil.rmtree", lambda *_, **__: None)  # killed in the midst
    remove(tmp_path / "checkpoints/step_00000007")
    monkeypatch.undo()
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [9]
    clear_unfinished(tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000009"]
