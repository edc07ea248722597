"""The pictures of docs/ are as `python docs/pictures.py` draws them, readable, and true to the strategies' formulas.

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


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it, of a colour like #2f6fd0."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_white_text_is_readable() -> None:
    for colour in DRAWN["COLOURS"].values():
        assert 1.05 / (luminance(colour) + 0.05) >= 4.5


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
