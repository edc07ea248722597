"""Pages of docs/ that are made from the code are as `python docs/generate.py` writes them."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"
PAGES = runpy.run_path(str(DOCS / "generate.py"))["PAGES"]


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "run python docs/generate.py"


def test_every_field_is_described() -> None:
    assert "|  |" not in PAGES["recipes.md"]()
