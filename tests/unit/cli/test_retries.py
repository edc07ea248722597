"""`toolkit train --retries`: what is started again, after which pause, and when that ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from toolkit.cli.app import app
from toolkit.cli.commands import train
from toolkit.cli.ranks import launcher
from toolkit.cli.ranks.retries import with_retries
from toolkit.errors import BadInputError, RankLostError

LOST = "lost"


def tried(outcomes: list[Any], steps: list[int], retries: int) -> tuple[Any, list[float]]:
    """The exit code, or LOST, after launches with these outcomes, and the pauses; `steps` are those saved."""
    pauses: list[float] = []
    left: Iterator[Any] = iter(outcomes)
    saved = iter(steps)

    def launch() -> int:
        outcome = next(left)
        if outcome == LOST:
            raise RankLostError("rank 1 was ended by SIGKILL")
        return int(outcome)

    try:
        code: Any = with_retries(launch, retries, lambda: next(saved), pauses.append)
    except RankLostError:
        code = LOST
    assert next(left, None) is None, "not all of them were launched"
    return code, pauses


@pytest.mark.parametrize("code", [0, 1, 2, 3, 143])
def test_other_ends_are_final(code: int) -> None:
    assert tried([code], [-1], retries=3) == (code, [])


def test_a_lost_rank_and_a_stall_are_tried_again() -> None:
    assert tried([LOST, 4, 0], [-1, 2, 4], retries=3) == (0, [5.0, 5.0])


def test_no_more_than_asked_for() -> None:
    assert tried([4, 4], [0, 2, 4], retries=1) == (4, [5.0])
    assert tried([LOST], [0, 2], retries=0) == (LOST, [])


def test_two_fruitless_restarts_in_a_row_are_enough(capsys: pytest.CaptureFixture[str]) -> None:
    assert tried([LOST, LOST, LOST], [2, 2, 2, 2], retries=9) == (LOST, [5.0, 10.0])
    assert "no more restarts: 2 in a row ended without a new checkpoint" in capsys.readouterr().err
    steps = [-1, -1, -1, 2, 2, 2]
    assert tried([4] * 5, steps, retries=9) == (4, [5.0, 10.0, 5.0, 10.0]), "one with a checkpoint starts anew"


def test_the_command_starts_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    codes = [4, 0]
    (tmp_path / "finished.json").write_text('{"export": null}')
    monkeypatch.setattr(launcher, "run_launcher", lambda words, folder, recipe: codes.pop(0))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setenv(train.ON_CPU, "")
    words = ["checkpoint.every_steps=5", f"training.output_dir={tmp_path}"]
    done = CliRunner().invoke(app, ["train", "quickstart", "--cpu", "2", "--retries", "2", *words])
    assert (done.exit_code, codes) == (0, []), done.output
    assert "a rank stalled; restart 1 of 2 in 5 s begins at the first step" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["checkpoint.every_minutes=never"], "checkpoint.every_minutes is never"),
        (["checkpoint.every_steps=5", "--dry-run"], "no effect with --dry-run"),
        (["checkpoint.every_steps=5", "checkpoint.resume=never"], "needs checkpoint.resume=auto"),
    ],
)
def test_retries_without_effect_are_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["train", "quickstart", "--cpu", "2", "--retries", "2", *arguments])
    assert isinstance(result.exception, BadInputError)
    assert message in str(result.exception)
