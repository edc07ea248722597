"""`toolkit status`: the table of a run that is under way."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

from typer.testing import CliRunner, Result

from toolkit.cli.app import app
from toolkit.errors import ToolkitError
from toolkit.pages.run_page import RunSummary, write_report
from toolkit.pages.status import Status, state_of
from toolkit.supervise.rank_status import FOLDER, RankStatus, to_text

GOES = RankStatus(0, "one", 10, "S", "forward", 7, 41, 0.5, 1.0)


def shown(run: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["status", str(run), *options])


def write(run: Path, *ranks: RankStatus, ago: float = 0.0) -> None:
    (run / FOLDER).mkdir(exist_ok=True)
    (run / FOLDER / "host_00000.json").write_text(to_text(list(ranks), 1, time.time() - ago))


def test_a_row_for_each_rank(tmp_path: Path) -> None:
    write(tmp_path, GOES, replace(GOES, rank=1, pid=11))
    lines = shown(tmp_path).output.splitlines()
    assert [line.split()[:5] for line in lines[1:]] == [
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
    assert "no run is under way; the last one stalled" in str(result.exception)
    assert shown(tmp_path, "--json").exit_code == 1


def test_a_run_that_was_killed_is_gone_and_its_report_says_so(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    status = Status("running", 3, 10, None, time.time() - 500, 30)
    write_report(page, RunSummary("run", "", [], {}, [], {}, {}, None, status=status))
    write(tmp_path, GOES, replace(GOES, rank=1, silent_seconds=20.0), ago=30.0)
    assert shown(tmp_path).exit_code == 0, "a slow disk is no end"
    assert state_of(page) == "running"
    write(tmp_path, GOES, replace(GOES, rank=1, silent_seconds=20.0), ago=90.0)
    since = time.strftime("%Y-%m-%d %H:%M", time.gmtime(time.time() - 91))
    assert f"nothing was heard from any rank since {since}" in str(shown(tmp_path).exception)
    assert "the same command resumes" in str(shown(tmp_path).exception)
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
    write_report(tmp_path / "report.html", RunSummary("run", "", [], {}, [], {}, {}, None))
    write(tmp_path, GOES, ago=30.0)
    assert shown(tmp_path).exit_code == 0, "it may still push its export"
    write(tmp_path, GOES, ago=90.0)
    assert str(shown(tmp_path).exception).endswith("no run is under way")
    losses = [{"split": "eval", "step": step, "loss": loss} for step, loss in ((0, 3.25), (7, 2.5))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in losses))
    told = shown(tmp_path)
    assert told.exit_code == 0
    lines = told.output.splitlines()
    assert lines[0] == "finished: 7 steps, held-out loss 3.2500 -> 2.5000"
    assert lines[-2:] == [f"report: {tmp_path / 'report.html'}", f"next: toolkit export {tmp_path} --to FOLDER"]
    assert json.loads(shown(tmp_path, "--json").output)["verdict"] is None
