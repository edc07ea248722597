"""The pages that are made of plans: tables of docs/choose.md and docs/out_of_memory.md."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def rows_of(page: str) -> list[str]:
    """The lines of the table that sizes.py writes into a page."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return text.split("<!-- sizes.py -->\n\n")[1].split("\n\n<!-- end -->")[0].splitlines()


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(DOCS))
    yield importlib.import_module("sizes")
    del sys.modules["sizes"]


def test_the_levers_are_those_of_the_plan(sizes: Any) -> None:
    assert list(sizes.levers()) == rows_of("out_of_memory.md")


@pytest.mark.parametrize("size", ["1B", pytest.param("70B", marks=pytest.mark.grid)])
def test_the_cards_are_those_of_the_plan(size: str, sizes: Any) -> None:
    made = list(sizes.choice([size]))
    written = rows_of("choose.md")
    assert written[:2] == made[:2]
    assert [row for row in written if row.startswith(f"| {size} |")] == made[2:]


@pytest.mark.first
def test_every_lever_and_size_has_a_row(sizes: Any) -> None:
    assert [row.split(" | ")[0][2:] for row in rows_of("out_of_memory.md")[2:]] == [words for words, _ in sizes.LEVERS]
    assert [row.split(" | ")[0][2:] for row in rows_of("choose.md")[2:]] == list(sizes.SIZES)
