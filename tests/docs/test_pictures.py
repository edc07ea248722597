"""The pictures of docs/ are as `python docs/pictures.py` draws them, and true to the strategies' formulas.

Those of pages and trackers, by docs/screens.py, are small, and a page shows each.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytestmark = pytest.mark.first

DOCS = Path(__file__).parents[2] / "docs"
DRAWN = runpy.run_path(str(DOCS / "pictures.py"))


def test_the_pictures_are_up_to_date() -> None:
    for name, draw in DRAWN["PICTURES"].items():
        drawn = draw()
        assert (DOCS / "pictures" / name).read_text(encoding="utf-8") == drawn, f"{name}: run python docs/pictures.py"
        assert ElementTree.fromstring(drawn).tag.endswith("svg")


def test_bytes_are_those_of_the_formulas() -> None:
    ranks, compute = 4, 2
    expected = {"ddp": 16, "zero1": 12 / ranks + compute + 4, "zero2": 16 / ranks + compute, "zero3": 16 / ranks}
    expected |= {"zero3+offload": compute / ranks, "its host": 16 / ranks}
    assert {name: sum(kinds.values()) for name, kinds in DRAWN["BYTES"].items()} == expected


def test_pictures_of_pages_are_small_and_shown() -> None:
    taken = runpy.run_path(str(DOCS / "screens.py"))
    names = {*taken["PAGES"], *(f"{tracker}.png" for tracker in taken["TRACKERS"])}
    files = {path.name: path.stat().st_size for path in (DOCS / "pictures").glob("*.png")}
    assert files.keys() == names
    assert max(files.values()) < 150_000
    pages = "".join(path.read_text(encoding="utf-8") for path in DOCS.glob("*.md"))
    assert set(re.findall(r"!\[[^]]+\]\(pictures/(\w+\.png)\)", pages)) == names
