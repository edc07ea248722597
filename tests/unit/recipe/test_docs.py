"""Pages of docs/ that are made from the code are as `python docs/generate.py` writes them."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"
PAGES = (MADE := runpy.run_path(str(DOCS / "generate.py")))["PAGES"]


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "run python docs/generate.py"


def test_every_field_is_described() -> None:
    assert "|  |" not in PAGES["recipes.md"]()


def test_the_grid_of_models_has_each_result_in_its_column() -> None:
    results = json.loads((DOCS.parent / "tests/zoo/results.json").read_text(encoding="utf-8"))
    page = (DOCS / "models_grid.md").read_text(encoding="utf-8").replace("core", ", ".join(MADE["CORE"]))
    rows = [row.split("|") for row in page.splitlines() if row.startswith("| `")]
    cells = {row[1].strip(" `"): [cell.strip() for cell in row[2:4]] for row in rows}
    for feature, outcomes in results.items():
        name = feature.replace("_", " ")
        for kind, text in outcomes.items():
            right, refused = cells.get(kind, ["", ""])
            assert (name in right.split(", ")) == (text == "right"), (kind, feature)
            is_refused = any(name in part.partition(" (")[0].split(", ") for part in refused.split("; "))
            assert is_refused == text.startswith(("refused", "wrong", "crashed")), (kind, feature)
