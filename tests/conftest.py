"""Fixtures that several test folders use."""

from __future__ import annotations

import gc
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from support.texts import make_texts

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: xdist's workers share the cores
gc.disable()  # what the collection of tests imports is never garbage

QUICK = ("bad_inputs", "checkpoint", "data", "objectives", "optim", "recipe", "training")
"""The folders of tests/unit that `pytest -m quick` runs."""
LONGEST_FIRST = ("recipes", "traces", "faults", "multiprocess", "streams", "devices")
"""Folders of tests that run before the others: a long file that is left to the end keeps one worker alone."""


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
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in make_texts(60)), encoding="utf-8")
    return path


def pytest_configure(config: pytest.Config) -> None:
    """Has xdist hand out files in the order of `pytest_collection_modifyitems`, not those with the most tests first."""
    config.option.loadscopereorder = False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what a developer runs before each commit, and sorts the folders."""
    root = Path(__file__).parent
    folders = tuple(root / "unit" / name for name in QUICK)
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.relative_to(root).parts[0], len(places)))
    for item in items:
        if any(folder in item.path.parents for folder in folders) and not item.get_closest_marker("slow"):
            item.add_marker("quick")


def pytest_collection_finish() -> None:
    """No test looks through what all of them have imported."""
    gc.freeze()
    gc.enable()
