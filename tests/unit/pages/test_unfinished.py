"""The report of a run that is not finished: what it says of itself, and what others say of it once it is gone."""

from __future__ import annotations

import base64
import hashlib
import re
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.html_page import HOSTILE, Page

from toolkit.errors import StoppedError
from toolkit.pages.parts.side_by_side import SideBySide
from toolkit.pages.run_page import RunSummary, render_report, write_report
from toolkit.pages.status import Status, mark_ended, state_of, status_in
from toolkit.run.shown import live_report as live
from toolkit.run.shown.live_report import LiveReport, ended_in

RUNNING = Status("running", 3, 10, 7.0, 1_700_000_000.5, 30)


def report(path: Path, status: Status | None) -> str:
    metrics = [{"split": "train", "step": step, "loss": 1 / step} for step in (1, 2, 3)]
    write_report(path, RunSummary("run", "a: 1", metrics, {}, [], {}, {}, status=status))
    return path.read_text()


def test_who_saw_the_end_says_so_in_the_report(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    before = report(path, RUNNING)
    assert state_of(path) == "running"
    mark_ended(path, "stalled", f"Rank 1 {HOSTILE}")
    text = path.read_text()
    page = Page(text)
    assert state_of(path) == "stalled"
    told = f"Stalled after step 3 of 10. Rank 1 {HOSTILE} Written 2023-11-14 22:13:20 UTC."
    assert page.text_of["status"] == told, "in UTC, as every time"
    assert page.elements["script"] == 1, "that of the curves"
    assert "refresh" not in text
    assert text.partition("</section>")[2] == before.partition("</section>")[2], "what else the page shows stays"
    mark_ended(path, "killed", "later")
    assert path.read_text() == text, "the first account stays"
    assert status_in(text) == replace(RUNNING, state="stalled", seconds_left=None, problem=f"Rank 1 {HOSTILE}")
    older = re.sub('content="{[^"]*"', 'content="running"', before)
    assert (status_in(before), status_in(older)) == (RUNNING, None)


@pytest.mark.parametrize("status", [None, Status("failed", 1, 2, None, 0.0, 30, "x")])
def test_a_report_that_does_not_say_running_stays(status: Status | None, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    text = report(path, status)
    mark_ended(path, "killed", "now")
    assert path.read_text() == text
    assert (state_of(path) == "") == (status is None)
    mark_ended(tmp_path / "none.html", "killed", "now")
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


def allowed_scripts(text: str) -> list[str]:
    """The scripts of a page, which its policy allows, and no other."""
    scripts: list[str] = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    policy = re.findall(r"script-src ([^\"]*)\"", text)
    assert [set(each.split()) for each in policy] == [{f"'sha256-{digest}'" for digest in digests}]
    return scripts


def test_the_browser_runs_the_script_that_tells_of_a_page_too_old(tmp_path: Path) -> None:
    text = report(tmp_path / "report.html", RUNNING)
    scripts = allowed_scripts(text)
    assert len(scripts) == 2
    found = {name: value for _, name, value in Page(text).attributes if name.startswith("data-")}
    found.pop("data-curves")
    assert found == {"data-step": "3", "data-written": "1700000000.5", "data-late": "180"}
    assert set(re.findall(r"dataset\.(\w+)", scripts[0])) <= {name.removeprefix("data-") for name in found}
    assert len(allowed_scripts(report(tmp_path / "report.html", None))) == 1, "that of the curves"
    write_report(tmp_path / "report.html", RunSummary("run", "", [], {}, [], {}, {}))
    assert "script" not in (tmp_path / "report.html").read_text(), "without curves none"


class Run:
    """A live report, as a rank writes it."""

    def __init__(self, folder: Path, rank: int, world_size: int, patch: pytest.MonkeyPatch) -> None:
        self.path = folder / "report.html"
        patch.setattr("toolkit.ranks.rank", lambda: rank)
        patch.setattr("toolkit.ranks.world_size", lambda: world_size)
        self.report = LiveReport(self.path, self.summary, 10)

    def summary(self, records: list[dict[str, Any]]) -> RunSummary:
        return RunSummary("run", "", records, {}, [], {}, {})

    def told(self) -> str:
        return Page(self.path.read_text()).text_of["status"]


LOST = RuntimeError("[gloo] Connection closed by peer")


@pytest.mark.parametrize(
    ("rank", "error", "told"),
    [
        (0, ValueError("no"), "Failed after step 0 of 10. ValueError: no"),
        (1, ValueError("no"), "Failed after step 3 of 10. Rank 1: ValueError: no"),
        (0, LOST, "Failed after step 0 of 10. Another rank is gone (RuntimeError: [gloo]"),
        (1, LOST, "Failed after step 3 of 10. Another rank is gone (RuntimeError: [gloo]"),
    ],
)
def test_whichever_rank_fails_the_report_says_so(
    rank: int, error: Exception, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, rank, 2, monkeypatch)
    report(run.path, RUNNING)
    run.report.failed(error)
    assert run.told().startswith(told)
    before = run.told()
    if rank == 0 and error is not LOST:
        run.report.failed(LOST)
        assert run.told() == before, "who lost a rank does not write over why that one failed"


def test_slow_steps_do_not_make_the_page_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: clock[0])
    run = Run(tmp_path, 0, 1, monkeypatch)
    lates = []
    for now in (400.0, 900.0, 905.0, 1500.0):
        clock[0] = now
        run.report.record([], None)
        lates += re.findall(r'data-late="(\d+)"', run.path.read_text())
    assert lates == ["1660", "2060", "2060", "2440"], "4 of the longest pause between two records, and a minute"


@pytest.mark.slow
def test_the_page_is_written_again_when_it_says_and_after_the_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first writing takes 1.6 s for imports, of which came 160 s without another, under a page that said 30."""
    clock, cost = [0.0], [1.6]
    monkeypatch.setattr(live.time, "monotonic", lambda: clock[0])
    run = Run(tmp_path, 0, 1, monkeypatch)
    written: list[tuple[float, int, int]] = []
    summary = run.summary

    def slow_summary(records: list[dict[str, Any]]) -> RunSummary:
        clock[0] += cost[0]
        return summary(records)

    run.report._summary_of = slow_summary
    for second in range(400):
        clock[0] = max(clock[0], float(second))
        cost[0] = 1.6 if not written else 0.5
        began, step = clock[0], min(10, 1 + second // 36)
        before = run.path.stat().st_mtime_ns if run.path.exists() else 0
        run.report.record([{"split": "train", "step": step, "loss": 1.0}], None)
        if run.path.exists() and run.path.stat().st_mtime_ns != before and step < 10:
            seconds = re.search(r"at most every (\d+) s", run.path.read_text())
            assert seconds is not None
            written.append((began, int(seconds[1]), step))
    pauses = [later[0] - one[0] for one, later in pairwise(written)]
    promised = [every for _, every, _ in written[:-1]]
    assert promised == [30, 30, *[50] * (len(promised) - 2)], "0.5 s of writing are 1 % of 50 s"
    assert all(0 <= pause - every <= 2 for pause, every in zip(pauses, promised, strict=True)), pauses
    assert "Running: step 10 of 10." in run.told(), "an export may take long"


def test_a_stopped_run_says_what_is_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, 0, 1, monkeypatch)
    ends = {
        "Stopped after step 0 of 10. Ctrl-C ended it at once; nothing was saved then. Written": KeyboardInterrupt(),
        "Stopped after step 0 of 10. SIGTERM; its state is saved. Written": StoppedError(
            "stopped after step 0: SIGTERM; its state is saved; the same command goes on", "SIGTERM; its state is saved"
        ),
        "Failed after step 0 of 10. ValueError: no. Written": ValueError("no"),
    }
    for told, error in ends.items():
        with suppress(BaseException), ended_in(run.report):
            raise error
        assert run.told().startswith(told)
    data = {"validation": {"rows": 4}}
    prompt = SideBySide("Who?", "Me.")
    status = Status("stopped", 0, 10, None, 0.0, 30, "Ctrl-C.")
    run_of = {"data_report": data, "side_by_side": [prompt], "command": "toolkit train x", "status": status}
    text = render_report(RunSummary(**{**vars(run.summary([])), **run_of}))
    assert "no evaluation yet" in text, "there are held-out rows"
    assert "no held-out data" not in text
    assert "or begins anew if there is none" in text, "no checkpoint is there"
    assert not {"Before training", "After training"} & set(re.findall(r'class="label">([^<]*)<', text))
