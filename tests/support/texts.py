"""Rows of words, the same each time."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

STORY = """the king and queen of hearts walked by the river at night while the moon was high and all the
world lay still except a fox who sang of bread and wine"""
WORDS = STORY.split()


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


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
