"""The README stays short, and names the versions of the package."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.first

README = Path(__file__).parents[2] / "README.md"


def test_the_readme_is_short() -> None:
    words = re.findall(r"\S*\w\S*", README.read_text(encoding="utf-8"))
    assert len(words) <= 1150, "the bars of tables are none"


def test_the_supported_systems_and_versions_are_those_of_the_package() -> None:
    package = tomllib.loads((README.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "Operating System :: POSIX :: Linux" in package["classifiers"]
    ranges = {"Python": package["requires-python"]}
    for requirement in package["dependencies"]:
        name, _, allowed = requirement.partition(">=")
        ranges[name] = f">={allowed}"
    told = [f"Python {ranges['Python'].removeprefix('>=')} or newer"]
    for name, shown in (("torch", "torch"), ("accelerate", "Accelerate"), ("transformers", "transformers")):
        first, last = ranges[name].removeprefix(">=").split(",<")
        major, minor = last.split(".")
        newest = f"{major}.{int(minor) - 1}"
        told.append(f"{shown} {first}" if first == newest else f"{shown} {first} to {newest}")
    page = README.read_text(encoding="utf-8")
    assert "You need Linux: WSL 2 on Windows" in page
    assert [words for words in told if words not in page] == []
