"""The site: every page has its place in it, and what a page names is there. `mkdocs build --strict` checks links."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import toolkit

pytestmark = pytest.mark.first

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"\]\(([^)\s]+)\)")


def pages_of(nav: Any) -> Iterator[str]:
    """The files of mkdocs' nav, in order."""
    if isinstance(nav, str):
        yield nav
    else:
        for item in nav.values() if isinstance(nav, dict) else nav:
            yield from pages_of(item)


def test_every_page_is_in_the_site_once() -> None:
    config = yaml.safe_load((DOCS / "site/mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(pages_of(config["nav"])) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_links_lead_to_files() -> None:
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        links = [link.partition("#")[0] for link in LINK.findall(page.read_text(encoding="utf-8"))]
        missing = [link for link in links if link and "://" not in link and not (page.parent / link).exists()]
        assert not missing, f"{page}: {missing}"


def test_a_page_of_the_log_is_short() -> None:
    sizes = {page.name: len(page.read_text(encoding="utf-8").split()) for page in (DOCS / "log").glob("*.md")}
    assert {name: size for name, size in sizes.items() if size > 700} == {}


def test_the_version_is_that_of_the_changelog() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    unreleased, newest = re.findall(r"^## (.*)$", changelog, re.MULTILINE)[:2]
    package = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert unreleased == "Unreleased"
    assert newest.partition(" ")[0] == package["version"] == toolkit.__version__


def test_the_open_points_are_thirty_at_most_and_each_says_how_it_closes() -> None:
    points, findings = (DOCS / "open_points.md").read_text(encoding="utf-8").split("## Findings without an explanation")
    rows = [line for line in points.splitlines() if line.startswith("| ") and not line.startswith("| point")]
    assert len(rows) <= 30
    assert all(cell.strip() for row in [*rows, *re.findall(r"(?m)^\| .*$", findings)] for cell in row.split("|")[1:3])
