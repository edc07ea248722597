"""Which checkpoints are deleted, and what makes a run another run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cases import cases
from test_manifest import PLAIN

from toolkit.checkpoint.manifest import Checkpoint, superseded
from toolkit.checkpoint.state import _first_mismatch, require_same_run
from toolkit.errors import BadInputError
from toolkit.recipe.schema import CheckpointSection

TABLES = cases(__file__)

LOSSES = {10: 3.0, 20: 1.0, 30: None, 40: 2.0, 50: 2.5}


def saved() -> list[Checkpoint]:
    whole = [Checkpoint(Path(str(s)), s, replace(PLAIN, step=s, eval_loss=x), None) for s, x in LOSSES.items()]
    damaged = Checkpoint(Path("5"), 5, replace(PLAIN, step=5, eval_loss=0.5), "damaged")
    return [damaged, *whole, Checkpoint(Path("60"), 60, None, "COMPLETE is missing: it was not finished")]


@pytest.mark.parametrize(("settings", "gone"), TABLES["KEPT"])
def test_what_is_kept(settings: dict[str, Any], gone: list[int]) -> None:
    """What does not count is neither among the last nor deleted: it may be being written, or be looked at."""
    section = CheckpointSection(every_steps=10, **settings)
    assert [checkpoint.step for checkpoint in superseded(saved(), section)] == gone


def test_the_best_is_the_one_of_the_largest_merit() -> None:
    """Of the share of right answers here: the lowest loss is at step 20. A checkpoint of before has its loss alone."""
    merits = {10: 0.4, 20: 0.1, 30: None, 40: 0.2, 50: 0.3}
    found = [Checkpoint(c.folder, c.step, replace(c.manifest, merit=merits.get(c.step)), c.problem) for c in whole()]
    section = CheckpointSection(every_steps=10, keep_last=1, keep_best=True)
    assert [checkpoint.step for checkpoint in superseded(found, section)] == [20, 30, 40]


def whole() -> list[Any]:
    return [checkpoint for checkpoint in saved() if checkpoint.manifest is not None and checkpoint.problem is None]


@pytest.mark.parametrize(("settings", "gone"), TABLES["UNASKED"])
def test_of_checkpoints_that_nobody_asked_for_one_is_kept(settings: dict[str, Any], gone: list[int]) -> None:
    assert [checkpoint.step for checkpoint in superseded(saved(), CheckpointSection(**settings))] == gone


@pytest.mark.parametrize(("settings", "minutes"), TABLES["MINUTES"])
def test_minutes_between_saves(settings: dict[str, Any], minutes: float | None) -> None:
    assert CheckpointSection(**settings).minutes == minutes
    assert CheckpointSection(**{**settings, "every_minutes": "never"}).minutes is None


def test_a_broken_model_takes_no_good_ones_place() -> None:
    """Of what is not finite the last stays, to be looked at; the good ones stay however much comes after them."""
    broken = [
        Checkpoint(Path(str(s)), s, replace(PLAIN, step=s, non_finite="lm_head"), "lm_head") for s in (60, 70, 80)
    ]
    section = CheckpointSection(every_steps=10, keep_last=1)
    found = [*saved()[1:-1], *broken]
    assert [checkpoint.step for checkpoint in superseded(found, section)] == [10, 20, 30, 40, 60, 70]


def test_without_a_loss_there_is_no_best() -> None:
    found = [replace(checkpoint, manifest=replace(PLAIN, eval_loss=None)) for checkpoint in saved()[1:4]]
    section = CheckpointSection(every_steps=10, keep_last=1, keep_best=True)
    assert [checkpoint.step for checkpoint in superseded(found, section)] == [10, 20]


def test_every_difference_that_matters_is_listed() -> None:
    then = {"training": {"seed": 1, "output_dir": "a"}, "optimizer": {"kind": "adamw", "learning_rate": 1e-3}}
    harmless = {"training": {"seed": 1, "output_dir": "b"}, "optimizer": {"kind": "adamw", "learning_rate": 2e-3}}
    require_same_run(then, harmless, "here")
    older, newer = ({"data": {"train": [{"path": "a", "weight": None, **new}]}} for new in ({}, {"columns": None}))
    require_same_run(older, newer, "here")  # a field that came later, and is not set
    with pytest.raises(BadInputError, match="here is of another run") as found:
        require_same_run(then, {"training": {"seed": 2}, "optimizer": {}}, "here")
    assert "  - training.seed: 1 there, 2 now" in str(found.value)
    assert '  - optimizer.kind: "adamw" there, unset now' in str(found.value)


def test_tensors_that_do_not_fit_are_named() -> None:
    there = {"a": ["float32", [2]], "b": ["float32", [3]]}
    assert _first_mismatch(there, dict(there)) is None
    assert _first_mismatch(there, {"a": there["a"]}) == "it holds b, which is not there now"
    assert _first_mismatch({"a": there["a"]}, there) == "it lacks b"
    assert _first_mismatch(there, there | {"b": ["bfloat16", [3]]}) == "b is float32 [3] there, bfloat16 [3] now"
