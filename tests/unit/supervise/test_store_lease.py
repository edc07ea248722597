"""Two runs do not write to one store: the second is refused and told who holds it, or takes over what is over."""

from __future__ import annotations

import threading
import uuid
from dataclasses import replace

import pytest

from toolkit.checkpoint.store import StorePath
from toolkit.errors import BadInputError
from toolkit.supervise import store_lease
from toolkit.supervise.lease import LEASE, Lease
from toolkit.supervise.store_lease import owned_store

ELSEWHERE = Lease(host="node9", pid=17, boot="another boot", born="1")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> StorePath:
    monkeypatch.setattr(store_lease, "STALE_SECONDS", 0.2)
    monkeypatch.setattr(store_lease, "SETTLE_SECONDS", 0.02)
    monkeypatch.setattr(store_lease, "BEAT_SECONDS", 0.02)
    return StorePath(f"memory://{uuid.uuid4().hex}/run")


def test_a_second_run_is_refused_and_told_who_holds_the_store(store: StorePath) -> None:
    with owned_store(store):
        with pytest.raises(BadInputError, match=r"another run is writing to .*: process \d+ on ") as found:
            store_lease.acquire(store / LEASE)
        assert found.value.exit_code == 2
    with owned_store(store):
        pass
    assert not (store / LEASE).exists()


def test_one_that_beats_elsewhere_is_alive(store: StorePath) -> None:
    done = threading.Event()

    def beat() -> None:
        beats = 0
        while not done.wait(0.01):
            store_lease._write_object(store / LEASE, ELSEWHERE, beats := beats + 1)

    store_lease._write_object(store / LEASE, ELSEWHERE, 0)
    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(BadInputError, match="process 17 on node9"):
            store_lease.acquire(store / LEASE)
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("left", ["silent", "gone", "garbage"])
def test_one_that_is_over_is_taken_over(left: str, store: StorePath) -> None:
    if left == "garbage":
        (store / LEASE).write_bytes(b"[" * 9)
    else:
        store_lease._write_object(store / LEASE, ELSEWHERE if left == "silent" else replace(Lease(), born="0"), 3)
    assert store_lease.acquire(store / LEASE).host == Lease().host


def test_of_two_that_write_at_the_same_time_the_last_one_stays(
    store: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_lease.time, "sleep", lambda _: store_lease._write_object(store / LEASE, ELSEWHERE, 0))
    with pytest.raises(BadInputError, match="process 17 on node9"):
        store_lease.acquire(store / LEASE)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_run_whose_store_was_taken_over_ends(store: StorePath, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def leave(code: int) -> None:
        ended.set()
        raise SystemExit(code)

    monkeypatch.setattr(store_lease.os, "_exit", leave)
    with owned_store(store):
        store_lease._write_object(store / LEASE, ELSEWHERE, 0)
        assert ended.wait(100)
    assert (store / LEASE).exists(), "it is another's"
