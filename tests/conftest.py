"""Fixtures that several test folders use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

STORY = """the king and queen of hearts walked by the river at night while the moon was high and all the
world lay still except a fox who sang of bread and wine"""
WORDS = STORY.split()


LAUNCHED = ("two_nodes", "other_loops", "bad_input", "verify", "benchmarks")
"""Files of tests/multiprocess that start launchers, as tests/faults and tests/recipes do."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Two workers share the tests by file; what starts launchers, which choose ports, runs one after the other."""
    for item in items:
        folder, file = item.path.parent.name, item.path.stem
        launched = folder in ("faults", "recipes") or file.removeprefix("test_") in LAUNCHED
        item.add_marker(pytest.mark.xdist_group("launchers" if launched else f"{folder}/{file}"))


def make_texts(num_rows: int, seed: int = 0) -> list[str]:
    """Deterministic rows of 5 to 60 words."""
    texts = []
    state = seed * 7919 + 13
    for _ in range(num_rows):
        state = (state * 1103515245 + 12345) % 2**31
        words = []
        for _ in range(5 + state % 56):
            state = (state * 1103515245 + 12345) % 2**31
            words.append(WORDS[(state >> 8) % len(WORDS)])
        texts.append(" ".join(words))
    return texts


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A jsonl file of 60 rows with a `text` column."""
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in make_texts(60)), encoding="utf-8")
    return path
