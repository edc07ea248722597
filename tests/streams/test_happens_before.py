"""The checker itself: small programs whose order is plain to see."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import pytest
import torch
from streams.happens_before import Checker
from streams.simulated import watched_by

pytestmark = pytest.mark.first

DEVICE = torch.device("cpu")  # not the word: what is made there counts as the device's memory
SIZE = 8


def kinds_of(program: Callable[[], object]) -> list[str]:
    checker = Checker()
    with watched_by(checker):
        program()
    return sorted(race.kind for race in checker.races)


def on_device() -> torch.Tensor:
    return torch.zeros(SIZE, device=DEVICE)


def test_a_read_on_another_stream_waits_for_the_write_or_races() -> None:
    def read(order: Callable[[torch.cpu.Stream], object]) -> None:
        tensor, stream = on_device(), torch.cpu.Stream()
        order(stream)
        with torch.cpu.stream(stream):
            tensor.sum()

    assert kinds_of(lambda: read(lambda stream: None)) == ["written, then read"]
    assert kinds_of(lambda: read(lambda stream: stream.wait_stream(torch.cpu.current_stream()))) == []
    assert kinds_of(lambda: read(lambda stream: stream.wait_event(torch.cpu.current_stream().record_event()))) == []
    assert kinds_of(lambda: read(lambda stream: torch.cpu.current_stream().record_event().synchronize())) == []


def test_an_event_knows_what_came_before_it_alone() -> None:
    def program() -> None:
        stream, event = torch.cpu.Stream(), torch.cpu.current_stream().record_event()
        tensor = on_device()
        stream.wait_event(event)
        with torch.cpu.stream(stream):
            tensor.add_(1)

    assert kinds_of(program) == ["written, then write"]


def test_two_streams_read_the_same_and_write_apart() -> None:
    def program() -> None:
        tensor, stream = on_device(), torch.cpu.Stream()
        stream.wait_stream(torch.cpu.current_stream())
        tensor.sum()
        tensor[: SIZE // 2].add_(1)
        with torch.cpu.stream(stream):
            tensor[SIZE // 2 :].add_(1)

    assert kinds_of(program) == ["read, then write"]  # of the sum alone


@pytest.mark.parametrize("waits", [False, True])
def test_freed_memory_goes_to_the_stream_that_allocated_it(waits: bool) -> None:
    def program() -> None:
        tensor, stream = on_device(), torch.cpu.Stream()
        stream.wait_stream(torch.cpu.current_stream())
        with torch.cpu.stream(stream):
            tensor.sum()
        del tensor
        if waits:
            torch.cpu.current_stream().wait_stream(stream)
        on_device()

    assert kinds_of(program) == ([] if waits else ["freed, then allocated"])


@pytest.mark.parametrize("waits", [False, True])
def test_memory_that_the_freeing_thread_has_waited_for_may_be_used_again(waits: bool) -> None:
    def program() -> None:
        tensor, stream = on_device(), torch.cpu.Stream()
        stream.wait_stream(torch.cpu.current_stream())
        with torch.cpu.stream(stream):
            tensor.sum()
        if waits:
            stream.synchronize()
        del tensor
        on_device()

    assert kinds_of(program) == ([] if waits else ["freed, then allocated"])


def test_a_storage_that_shrinks_to_nothing_is_freed() -> None:
    def program() -> None:
        tensor, stream = on_device(), torch.cpu.Stream()
        stream.wait_stream(torch.cpu.current_stream())
        with torch.cpu.stream(stream):
            tensor.sum()
        tensor.untyped_storage().resize_(0)
        on_device()

    assert kinds_of(program) == ["freed, then allocated"]


@pytest.mark.parametrize("non_blocking", [False, True])
def test_a_copy_to_the_host_makes_the_thread_wait_unless_it_is_told_not_to(non_blocking: bool) -> None:
    def program() -> None:
        torch.zeros(SIZE).copy_(on_device(), non_blocking=non_blocking).tolist()

    assert kinds_of(program) == (["written, then read"] if non_blocking else [])


HAND_OVERS = ("none", "queue", "event", "join")


@pytest.mark.parametrize("by", HAND_OVERS)
def test_threads_follow_what_is_handed_over(by: str) -> None:
    def program() -> None:
        tensor, done = torch.zeros(SIZE), threading.Event()
        through: queue.SimpleQueue[int] = queue.SimpleQueue()

        def work() -> None:
            tensor.add_(1)
            through.put(1)
            done.set()

        thread = threading.Thread(target=work)
        thread.start()
        while thread.is_alive():  # which hands nothing over
            time.sleep(0.001)
        {"none": lambda: None, "queue": through.get, "event": done.wait, "join": thread.join}[by]()
        tensor.add_(1)

    assert kinds_of(program) == (["written, then write"] if by == "none" else [])


def test_a_race_tells_what_where_and_on_which_stream() -> None:
    def program() -> None:
        tensor = on_device()
        reader = torch.cpu.Stream()
        with torch.cpu.stream(reader):
            tensor.sum()

    checker = Checker()
    with watched_by(checker):
        program()
    (race,) = checker.races
    assert race.first == "zeros the loop on the default stream"
    assert race.then == "sum the loop on reader"
