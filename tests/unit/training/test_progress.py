"""Progress: a line says count and time left first, and nothing is cut in a terminal of 80 columns."""

from __future__ import annotations

import io
import re
import threading
import time

import pytest
from rich.console import Console

from toolkit import terminal
from toolkit.terminal import LongAction, Terminal, clock
from toolkit.training.metrics import Progress, _step_figures, fitting

RECORD = {
    "loss": 12.34567,
    "accuracy": 0.987,
    "learning_rate": 1.25e-5,
    "tokens_per_second": 123456.7,
    "targets_per_second": 0.31,
    "peak_device_bytes": None,
    "peak_host_bytes": 3 * 2**30,
    "mfu": 0.4321,
}


def test_a_clock() -> None:
    assert [clock(seconds) for seconds in (7, 65.2, 3600, 100000)] == ["0:07", "1:05", "1:00:00", "27:46:40"]


def test_lines_begin_with_count_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    told = io.StringIO()
    monkeypatch.setattr(time, "monotonic", iter([0.0, 0.0, 60.0, 90.0, 120.0]).__next__)
    shown = Progress(Console(file=told, soft_wrap=True), 30, 10)
    shown.resume(4)
    shown.start()
    shown.show(10, ["loss 3.1"])  # 6 steps in 60 s
    shown.show(11, ["loss 3.0"])
    shown.line(11, "held-out loss 3.2")
    assert told.getvalue().splitlines() == ["step 10/30  3:20 left  loss 3.1", "step 11/30  held-out loss 3.2"]


def test_figures_that_do_not_fit_are_left_out_whole() -> None:
    figures = _step_figures(RECORD, "targets", "loss")
    assert fitting(figures, 14) == "loss 12.3457"
    assert fitting(figures, 33) == "loss 12.3457  accuracy 98.7%"
    assert fitting(figures, 200).endswith("0.31 targets/s  peak 3.00 GiB host  mfu 43.2%")


def test_what_others_print_stands_above_the_bar() -> None:
    """An evaluation has a console of its own; its line began after the bar's last word."""
    told = io.StringIO()
    shown = Progress(Console(file=told, force_terminal=True, width=60, color_system=None), 20, 10)
    shown.start()
    shown.show(3, ["loss 1.0"])
    Terminal().print("evaluating: under way")
    shown.stop()
    Terminal(quiet=True).print("nothing")
    assert "\x1b[2Kevaluating: under way\n" in told.getvalue()
    assert Terminal.with_bar is None


@pytest.mark.parametrize("width", [40, 80])
def test_a_bar_fits_into_the_terminal(width: int) -> None:
    told = io.StringIO()
    console = Console(file=told, force_terminal=True, width=width, color_system=None)
    shown = Progress(console, 123456, 10)
    shown.start()
    shown.show(2345, _step_figures(RECORD, "targets", "loss"))
    shown.stop()
    last = [line for line in told.getvalue().replace("\r", "\n").splitlines() if "/123456" in line][-1]
    assert "2345/123456" in last
    assert "\N{HORIZONTAL ELLIPSIS}" not in last
    assert ("loss 12.3457" in last) == (width == 80)


def test_a_long_pass_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    told, now = io.StringIO(), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    tell = LongAction(Console(file=told, soft_wrap=True), "reading")
    for done in range(1, 41):
        now[0] = float(done)
        tell(done, 40)
    assert told.getvalue().splitlines() == [
        "reading: 5/40  0:35 left",
        "reading: 10/40  0:30 left",
        "reading: 20/40  0:20 left",
    ]


@pytest.mark.parametrize("quiet", [False, True])
def test_a_single_call_that_takes_long_says_what_it_is(quiet: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "PASS_SECONDS", 0.05)
    told = io.StringIO()
    tell = LongAction(Console(file=told, soft_wrap=True, quiet=quiet), "loading")
    with tell:
        pass
    assert told.getvalue() == "", "what is quick says nothing"

    def fail_later() -> None:
        with tell:
            deadline = time.monotonic() + 20
            while not told.getvalue() and not quiet and time.monotonic() < deadline:
                time.sleep(0.01)
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail_later()
    before = told.getvalue()
    assert before.splitlines()[:1] == [] if quiet else ["loading: under way for 0:00"]
    time.sleep(0.2)
    assert told.getvalue() == before, "and it is over when the call is"
    assert [thread for thread in threading.enumerate() if thread.name == "pass"] == []


def test_steps_that_something_else_shows_are_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    told = ["step 20/40  loss 1.0", "step 40/40  loss 1.0", "step 40/40  held-out loss 2.0"]
    for every, lines in ((None, []), (20, told)):
        shown = Progress(Terminal(stderr=False), 40, every)
        shown.start()
        for step in range(1, 41):
            shown.show(step, ["loss 1.0"])
        shown.line(40, "held-out loss 2.0")
        shown.stop()
        shown_lines = capsys.readouterr().out.splitlines()
        assert [re.sub(r"  \d+:\d\d left", "", line) for line in shown_lines] == lines
