"""Fixtures that several test folders use."""

from __future__ import annotations

import gc
import os
import platform
import signal
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path, PurePath
from unittest import mock

import pytest
from support.texts import make_texts, write_rows
from support.tiers import is_control, is_left_out, is_slow, room_of

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: xdist's workers share the cores
gc.disable()  # what the collection of tests imports is never garbage

LONGEST_FIRST = ("recipes", "traces", "faults", "multiprocess", "streams", "devices")
"""Folders of tests that run before the others: a long file that is left to the end keeps one worker alone."""
PACKAGES = ("torch", "accelerate", "transformers", "datasets", "peft")
"""Packages whose versions a report of several rooms names."""

_seconds: defaultdict[str, list[float]] = defaultdict(list)
"""File -> the seconds that each setup, test and teardown took."""


@pytest.fixture(autouse=True)
def _process_as_it_was() -> Iterator[None]:
    """Takes back what a test, or a launcher or a rank that ran in this process, has left in it."""
    before = signal.getsignal(signal.SIGUSR1)
    with mock.patch.dict(os.environ):
        yield
    signal.signal(signal.SIGUSR1, before)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A jsonl file of 60 rows with a `text` column."""
    return write_rows(tmp_path_factory.mktemp("data") / "texts.jsonl", ({"text": text} for text in make_texts(60)))


def pytest_configure(config: pytest.Config) -> None:
    """Has xdist hand out files in the order of `pytest_collection_modifyitems`, not those with the most tests first."""
    config.option.loadscopereorder = False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what is slow, leaves out the grid unless `-m` names it, and sorts the folders."""
    root = Path(__file__).parent
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.relative_to(root).parts[0], len(places)))
    for item in items:
        if is_slow(item.path.relative_to(root), marks_of(item)):
            item.add_marker("slow")
        if is_control(item.nodeid.removeprefix("tests/")) and "slow" in marks_of(item):
            item.add_marker("control")
    left_out = [item for item in items if is_left_out(marks_of(item), config.option.markexpr)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not is_left_out(marks_of(item), config.option.markexpr)]


def marks_of(item: pytest.Item) -> set[str]:
    """The names of a test's marks and of those of its file."""
    return {mark.name for mark in item.iter_markers()}


def pytest_collection_finish() -> None:
    """No test looks through what all of them have imported."""
    gc.freeze()
    gc.enable()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Notes a test's seconds."""
    _seconds[report.nodeid.partition("::")[0]].append(report.duration)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says what each room took, summed over the workers, and on which versions, where several rooms ran."""
    rooms: defaultdict[str, float] = defaultdict(float)
    for file, seconds in _seconds.items():
        rooms[room_of(PurePath(file))] += sum(seconds)
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    if len(rooms) > 1:
        terminalreporter.section("seconds of each room")
        for room, sum_of_seconds in sorted(rooms.items(), key=lambda one: -one[1]):
            terminalreporter.line(f"{sum_of_seconds:8.0f} {room}")
        terminalreporter.line(f"Python {platform.python_version()}, {versions}")
