"""Which signals a run heeds, by who started it."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from support.cases import cases

from toolkit.training.stop import StopRequests

TABLES = cases(__file__)


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("under_nohup", "variables", "ends"), TABLES["CLOSED"])
def test_a_closed_terminal_ends_a_run_unless_nohup_and_its_launcher_go_on(
    under_nohup: bool, variables: dict[str, str], ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.delenv("TORCHELASTIC_SIGNALS_TO_HANDLE", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    signal.signal(signal.SIGHUP, signal.SIG_IGN if under_nohup else signal.SIG_DFL)
    # The test's own output must not go nowhere.
    monkeypatch.setattr("toolkit.training.stop.leave_terminal", lambda: None)
    with StopRequests(None) as stop:
        signal.raise_signal(signal.SIGHUP)
        assert stop.reason_to_stop() == ("SIGHUP" if ends else None)


def test_a_signal_that_comes_again(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """At once, it is the launcher's echo; SIGINT some seconds later is a person who does not want to wait."""
    before = signal.getsignal(signal.SIGINT)
    with StopRequests(None) as stop:
        assert stop.reason_to_stop() is None
        stop.before_step(1)
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
            signal.raise_signal(number)
            assert stop.reason_to_stop() == stop.leaves_evaluation() == "SIGINT"
        told = "SIGINT: saving a checkpoint, then stopping; Ctrl-C once more, some seconds later, stops "
        assert capfd.readouterr().err == f"\n{told}at once without one\n", "once, and at once"
        monkeypatch.setattr("toolkit.training.stop.SAME_REQUEST_SECONDS", -1.0)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    monkeypatch.setenv("RANK", "1")
    with StopRequests(None) as stop:
        stop.before_step(1)
        signal.raise_signal(signal.SIGTERM)
    assert capfd.readouterr().err == ""


def test_ctrl_c_before_the_first_step_ends_the_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out prompts and the first evaluation took 113 s, after which there was a step to save."""
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(KeyboardInterrupt), StopRequests(None):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # the launcher's echo, while the report is written
        monkeypatch.setattr("toolkit.training.stop.SAME_REQUEST_SECONDS", -1.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.signal(signal.SIGINT, before)
        monkeypatch.setattr("toolkit.training.stop.in_notebook", lambda: True)
        with pytest.raises(KeyboardInterrupt), StopRequests(None):
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is before, "the next interrupt is the notebook's"
        with StopRequests(None) as stop:
            signal.raise_signal(signal.SIGTERM)
            assert stop.reason_to_stop() == "SIGTERM", "of a batch system, which saves what the first step makes"
    finally:
        signal.signal(signal.SIGINT, before)
