"""Which signals a run heeds, by who started it."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from toolkit.training.stop import StopRequests


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("under_nohup", "variables", "ends"),
    [
        (False, {}, True),
        (True, {}, False),
        (True, {"TORCHELASTIC_RUN_ID": "a"}, True),
        (True, {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGHUP"}, True),
        (True, {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT"}, False),
        (False, {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT"}, True),
    ],
)
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
