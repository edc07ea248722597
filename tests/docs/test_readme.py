"""The README stays short, and so do its sentences."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from pathlib import Path

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
    assert len(page.split()) <= 1200
    assert len(lengths) > 30
    assert statistics.median(lengths) <= 14
    assert statistics.quantiles(lengths, n=10)[-1] <= 25


def test_words_of_sentences_are_counted() -> None:
    page = "# Head\n\nOne `a b c` two. [Three four](x.md) five?\n\n| a | b |\n\n    code\n\n- six\n  seven\n"
    assert list(sentences(page)) == [3, 3, 3]
