"""Tables in pipes and narrow terminals: no key and no number is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rich.console import Console

from toolkit.cli.commands.checkpoints import _cell_text
from toolkit.cli.ranks.finetune import as_rank
from toolkit.cli.shared import console as consoles
from toolkit.cli.shared.console import print_failure, print_table
from toolkit.errors import BadInputError, StoppedError

COLUMNS = ["key", "value", "from"]
ROWS = [
    ["training.gradient_accumulation_steps", "16", "/a/long/folder/of/somebody/with/recipes/of/their/own/recipe.yaml"],
    ["optimizer.learning_rate", "0.00000123456789", "default"],
]


def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int) -> list[str]:
    monkeypatch.setattr(consoles, "Terminal", lambda **_: Console(force_terminal=True, width=width, color_system=None))
    print_table(COLUMNS, ROWS)
    return capsys.readouterr().out.splitlines()


def test_in_a_pipe_a_row_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(COLUMNS, ROWS)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [COLUMNS, *ROWS]


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_in_a_terminal_keys_and_numbers_stay_whole(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(monkeypatch, capsys, width)
    words = {word for line in lines for word in line.split()}
    assert {row[0] for row in ROWS} | {row[1] for row in ROWS} <= words
    assert max(map(len, lines)) <= width


def test_checkpoints_have_sizes_for_people() -> None:
    assert _cell_text("bytes", 3 * 2**30) == "3.00 GiB"
    assert _cell_text("date", "2026-11-22T19:00:01+0000") == "2026-11-22 19:00"
    assert (_cell_text("step", 4000), _cell_text("problem", None), _cell_text("eval_loss", None)) == (
        "4,000",
        "whole",
        "",
    )


def test_a_rank_that_lost_another_names_that_one(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(consoles.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    error = RuntimeError("Read error [127.0.0.1]:9385: Connection reset by peer.")
    error.add_note("rank 0 (process 88) has ended without an error of its own")
    assert print_failure(error) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert "lost its connection: rank 0 (process 88) has ended without an error of its own; look at" in told
    assert "Traceback" not in told


def test_no_exit_in_a_rank_counts_as_done(capsys: pytest.CaptureFixture[str]) -> None:
    ends = [(SystemExit(0), 1), (SystemExit(), 1), (GeneratorExit(), 1), (BadInputError("a: b"), 2)]
    for error, code in [*ends, (StoppedError("stopped"), 3), (KeyboardInterrupt(), 130)]:
        assert as_rank(lambda error=error: raises(error)) == code, error
        assert capsys.readouterr().err != "", error
    assert as_rank(lambda: None) == 0


def raises(error: BaseException) -> None:
    raise error


def test_a_model_that_does_not_compute_in_16_bits_is_told_what_to_set(capsys: pytest.CaptureFixture[str]) -> None:
    failures: list[Exception] = []
    for kind in (torch.bfloat16, torch.float64):
        try:
            torch.einsum("ab,bc->ac", torch.ones(2, 2, dtype=kind), torch.ones(2, 2))
        except RuntimeError as error:
            failures.append(error)
    try:
        torch.nn.Linear(2, 2)(torch.ones(1, 2, dtype=torch.bfloat16))
    except RuntimeError as error:
        failures.append(error)
    for failure in failures:
        assert print_failure(failure) == 1
        assert "set training.mixed_precision=no" in " ".join(capsys.readouterr().err.split()), failure
    assert len(failures) == 3
    print_failure(RuntimeError("anything else"))
    assert "mixed_precision" not in capsys.readouterr().err
