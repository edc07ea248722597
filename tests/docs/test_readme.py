"""The README stays short, and so do its sentences."""

from __future__ import annotations

import re
import statistics
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.first

README = Path(__file__).parents[2] / "README.md"
NOT_PROSE = re.compile(r"```.*?```|<!--.*?-->|^(?:    |\||#|!\[).*?$", re.MULTILINE | re.DOTALL)


def sentences(page: str) -> Iterator[int]:
    """The number of words of each sentence of the prose; code in a line is one word."""
    prose = NOT_PROSE.sub("", page)
    prose = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", re.sub(r"`[^`]+`", "code", prose))
    for paragraph in re.split(r"\n\s*\n|\n- ", prose):
        for sentence in re.split(r"(?<=[.!?])\s+", paragraph.replace("*", "").strip()):
            if words := sentence.split():
                yield len(words)


def test_the_readme_is_short() -> None:
    page = README.read_text(encoding="utf-8")
    lengths = sorted(sentences(page))
    assert len(re.findall(r"\S*\w\S*", page)) <= 1150, "words; the bars of tables are none"
    assert len(lengths) > 30
    assert statistics.median(lengths) <= 14
    assert statistics.quantiles(lengths, n=10)[-1] <= 25


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
    assert "You need Linux (macOS and Windows are untested)" in page
    assert [words for words in told if words not in page] == []


def test_words_of_sentences_are_counted() -> None:
    page = "# Head\n\nOne `a b c` two. [Three four](x.md) five?\n\n| a | b |\n\n    code\n\n- six\n  seven\n"
    assert list(sentences(page)) == [3, 3, 3]
