"""`toolkit status`: the table of a run that is under way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.launches import clean_environment
from support.texts import write_rows
from typer.testing import CliRunner, Result

from toolkit.cli.app import app
from toolkit.errors import ToolkitError
from toolkit.pages.card import CARD
from toolkit.pages.parts.story import Start, Story
from toolkit.pages.run_page import RunSummary, write_report
from toolkit.pages.status import Status, state_of
from toolkit.supervise.rank_status import FOLDER, RankStatus, to_text

RECIPE = "model: {name_or_path: org/small}\ntraining: {max_steps: 10}\n"
LINES = [
    {"split": "eval", "step": 0, "loss": 3.5},
    *({"split": "train", "step": step, "loss": 4.0 - 0.25 * step} for step in range(1, 6)),
    {"split": "eval", "step": 5, "loss": 3.25},
]
"""Five of ten steps, of loss 3.75 to 2.75."""

GOES = RankStatus(0, "one", 10, "S", "forward", 7, 41, 0.5, 1.0)


def shown(run: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["status", str(run), *options])


def write(run: Path, *ranks: RankStatus, ago: float = 0.0) -> None:
    (run / FOLDER).mkdir(exist_ok=True)
    (run / FOLDER / "host_00000.json").write_text(to_text(list(ranks), 1, time.time() - ago))


def test_a_row_for_each_rank(tmp_path: Path) -> None:
    write(tmp_path, GOES, replace(GOES, rank=1, pid=11))
    lines = shown(tmp_path).stdout.splitlines()
    assert lines[0] == "running: before the first step"
    assert [line.split()[:5] for line in lines[2:]] == [
        ["0", "one", "10", "forward", "7"],
        ["1", "one", "11", "forward", "7"],
    ], "and no word of who waits, as all go on"


def test_who_waits_for_whom_once_a_rank_stands_still(tmp_path: Path) -> None:
    write(tmp_path, replace(GOES, seconds=40.0), replace(GOES, rank=1, state="T", seconds=40.0, silent_seconds=40.0))
    assert "Rank 0 waits for it." in shown(tmp_path).output
    found = json.loads(shown(tmp_path, "--json").output)
    assert found["late"] == [0, 1]
    assert "Rank 1 on one" in found["verdict"]
    assert [rank["state"] for rank in found["ranks"]] == ["S", "T"]


def test_nothing_is_under_way(tmp_path: Path) -> None:
    (tmp_path / "stall.txt").touch()
    result = shown(tmp_path)
    assert isinstance(result.exception, ToolkitError)
    assert result.exception.exit_code == 1
    assert "no run is under way" in str(result.exception)
    assert f"see where it stalled in {tmp_path / 'stall.txt'}" in str(result.exception)
    assert shown(tmp_path, "--json").exit_code == 1


def test_a_run_that_was_killed_is_gone_and_its_report_says_so(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    status = Status("running", 3, 10, None, time.time() - 500, 30)
    write_report(page, RunSummary("run", "", [], {}, [], {}, {}, status=status))
    write(tmp_path, GOES, replace(GOES, rank=1, silent_seconds=20.0), ago=30.0)
    assert shown(tmp_path).exit_code == 0, "a slow disk is no end"
    assert state_of(page) == "running"
    write(tmp_path, GOES, replace(GOES, rank=1, silent_seconds=20.0), ago=90.0)
    since = time.strftime("%Y-%m-%d %H:%M", time.gmtime(time.time() - 91))
    assert f"nothing was heard from any rank since {since}" in str(shown(tmp_path).exception)
    assert "it left no checkpoint, so the same command begins at step 0" in str(shown(tmp_path).exception)
    assert state_of(page) == "killed"
    assert shown(tmp_path, "--json").exit_code == 1


def test_the_next_command_of_a_finished_run_can_be_pasted(tmp_path: Path) -> None:
    run = tmp_path / "my run"
    (run / "export").mkdir(parents=True)
    (run / "finished.json").write_text('{"export": null}')
    (run / "metrics.jsonl").write_text('{"split": "train", "step": 3, "loss": 1.5}\n')
    told = shown(run)
    assert (told.exit_code, told.stdout.splitlines()) == (
        0,
        [
            "finished: 3 steps",
            f"report: {run / 'report.html'}",
            f"model: {run / 'export'}",
            f"next: toolkit generate '{run}' --prompt TEXT",
        ],
    )


def test_a_run_that_was_killed_behind_its_report_is_done(tmp_path: Path) -> None:
    write_report(tmp_path / "report.html", RunSummary("run", "", [], {}, [], {}, {}))
    (tmp_path / "finished.json").write_text('{"export": null}')
    write(tmp_path, GOES, ago=30.0)
    assert shown(tmp_path).exit_code == 0, "it may still push its export"
    write(tmp_path, GOES, ago=90.0)
    assert shown(tmp_path).stdout.splitlines()[0] == "finished: 0 steps"
    (tmp_path / "metrics.jsonl").write_text('{"split": "eval", "step": 7, "loss": 2.5}\n')
    story = Story(outcome="held-out loss 3.2500 -> 2.5000 (-23.1%)", limits=["4 of 12 held-out rows are also in train"])
    story.best, story.last = {"step": 3, "by": "loss", "value": 1.5}, {"step": 7, "value": 2.5}
    story.doubts, story.starts = ["a doubt"], [Start(0, 2, "zero3", {}, seconds=3.0)]
    story.write(tmp_path)
    told = shown(tmp_path)
    assert told.exit_code == 0
    lines = told.stdout.splitlines()
    limited = "(but 4 of 12 held-out rows are also in train)"
    assert lines[0] == f"finished: 7 steps, held-out loss 3.2500 -> 2.5000 (-23.1%) {limited}"
    assert lines[1].startswith("duration: ")
    assert lines[2:4] == [
        f"best: step 3 of 7, whose held-out loss is 1.5; the last is 2.5 {limited}",
        "beware: a doubt",
    ]
    assert lines[-1] == f"report: {tmp_path / 'report.html'}", "it has neither export nor checkpoint"
    (tmp_path / "recipe.yaml").write_text("checkpoint: {to: 's3://bucket/first'}")
    assert shown(tmp_path).stdout.splitlines()[-1] == "next: toolkit export s3://bucket/first --to FOLDER"
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / CARD).touch()
    (tmp_path / "recipe.yaml").write_text("objective: {kind: sequence_classification}")
    assert shown(tmp_path).stdout.splitlines()[-1] == f"model: {tmp_path / 'export'}", "it generates nothing"
    assert json.loads(shown(tmp_path, "--json").output)["verdict"] is None


def begun(run: Path, status: Status | None) -> Path:
    run.mkdir()
    (run / "recipe.yaml").write_text(RECIPE)
    write_rows(run / "metrics.jsonl", LINES)
    if status is not None:
        write_report(run / "report.html", RunSummary("run", "", LINES, {}, [], {}, {}, status=status))
    return run


def test_how_far_a_run_is_that_is_under_way(tmp_path: Path) -> None:
    # At the report's third step 7 s were left for seven steps; five are done now.
    run = begun(tmp_path / "run", Status("running", 3, 10, 7.0, time.time(), 30))
    write(run, GOES)
    told = shown(run)
    assert told.stdout.splitlines()[0] == "running: step 5 of 10, loss 2.7500, held-out loss 3.2500, 0:05 left"
    assert told.stderr == ""
    found = json.loads(shown(run, "--json").stdout)
    assert [found[name] for name in ("state", "step", "num_steps", "loss", "held_out_loss", "seconds_left")] == [
        *("running", 5, 10, 2.75, 3.25),
        5.0,
    ]
    (run / "report.html").unlink()
    assert shown(run).stdout.splitlines()[0] == "running: step 5 of 10, loss 2.7500, held-out loss 3.2500"


def test_how_a_run_ended_and_where_the_same_command_goes_on(tmp_path: Path) -> None:
    wrong = {}
    for state, told in (
        ("stopped", "was stopped after step 5 of 10: Ctrl-C; "),
        ("failed", "failed after step 5 of 10: Ctrl-C; "),
        ("killed", "was killed after step 5 of 10: Ctrl-C; "),
        ("stalled", "stalled after step 5 of 10: Ctrl-C; "),
        ("running", "was killed after step 5 of 10; "),
        (None, "was not finished after step 5 of 10; "),
    ):
        status = None if state is None else Status(state, 5, 10, None, 0.0, 30, "" if state == "running" else "Ctrl-C.")
        result = shown(begun(tmp_path / f"{state}", status))
        expected = f"the last one {told}it left no checkpoint, so the same command begins at step 0"
        if result.exit_code != 1 or not str(result.exception).endswith(expected):
            wrong[state] = str(result.exception)
    assert not wrong
    recipe = tmp_path / "stopped/recipe.yaml"
    recipe.write_text(RECIPE + "checkpoint: {to: 's3://bucket/run'}\n")
    assert str(shown(recipe.parent).exception).endswith("the last checkpoint here or in s3://bucket/run")


@pytest.mark.slow
def test_what_somebody_else_has_put_into_the_folder_is_no_traceback_and_no_wait(tmp_path: Path) -> None:
    """Every file that `status` reads x what may stand there."""
    deep = b"[" * 200_000 + b"]" * 200_000
    files = ("metrics.jsonl", "recipe.yaml", "report.html", "finished.json", "run.json", "stall.txt")
    files += (f"{FOLDER}/host_00000.json", "checkpoints/step_00000005/COMPLETE")
    wrong = []
    for number, name in enumerate(files):
        contents = [b"", b"\0\xff", b"{", b"[]", b'{"split": "eval", "step": 1}', deep, b"9" * 5000, None]
        for kind, content in enumerate(contents):
            run = begun(tmp_path / f"{number}_{kind}", Status("running", 3, 10, 7.0, time.time(), 30))
            path = run / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            os.mkfifo(path) if content is None else path.write_bytes(content)
            for command in (["status", str(run)], ["status", str(run), "--json"]):
                signal.alarm(30)
                ended = CliRunner().invoke(app, command).exception
                signal.alarm(0)
                if not isinstance(ended, ToolkitError | SystemExit | None):
                    wrong.append((name, kind, command[0], repr(ended)))
    assert not wrong
    damaged = begun(tmp_path / "damaged", None)
    (damaged / "finished.json").write_text('{"export": null}')
    with (damaged / "metrics.jsonl").open("a") as file:
        file.write("{\n")
    (damaged / "recipe.yaml").write_bytes(b"\xff model: [")
    result = shown(damaged)
    assert result.stdout.splitlines()[0] == "finished: 5 steps"
    assert result.stderr.splitlines() == [
        "warning: recipe.yaml is damaged: it is not readable as YAML",
        "warning: metrics.jsonl is damaged: line 8 cannot be read and is left out",
    ]


def test_a_look_at_a_run_takes_no_import_of_torch(tmp_path: Path) -> None:
    """They took 4 to 12 s of CPU and up to 1 GB."""
    runs = [begun(tmp_path / name, None) for name in ("done", "live", "ended")]
    (runs[0] / "finished.json").write_text('{"export": null}')
    write(runs[1], GOES)
    commands = [["status", str(run)] for run in (*runs, tmp_path / "none")]
    commands += [["checkpoints", str(runs[0])], ["sample", str(tmp_path / "none.yaml")]]
    commands += [["export", str(tmp_path / "none"), "--to", "x"]]
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom toolkit.cli.app import app\n"
        f"for command in {commands!r}:\n"
        "    CliRunner().invoke(app, command)\n"
        "    if 'torch' in sys.modules or 'transformers' in sys.modules: sys.exit(f'{command} imports torch')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, env=clean_environment())
    assert ended.returncode == 0, ended.stderr
