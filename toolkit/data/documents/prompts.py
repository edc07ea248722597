"""Takes a row apart into a prompt and the answer that is learned behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

PLAIN_PROMPT = 16
"""Tokens of a row that are its prompt if all of it is learned, as in plain text."""


@dataclass(frozen=True)
class RowPrompt:
    """Tokens of a row: the prompt, with its images, and the answer behind it, or the target."""

    asked: list[int]
    answer: list[int]
    images: tuple[Image.Image, ...] = ()


def prompt_of(ids: Any, targets: Any) -> RowPrompt | None:
    """Returns what comes before the first target, and the targets from there on; None if either is empty.

    `ids` and `targets` are (length,).
    """
    learned = np.asarray(targets, dtype=bool)
    first = PLAIN_PROMPT if learned[1:].all() else int(learned.argmax())
    if first == 0 or first >= len(ids):
        return None
    ends = np.flatnonzero(~learned[first:])
    end = first + int(ends[0]) if len(ends) else len(ids)
    return RowPrompt([int(token) for token in ids[:first]], [int(token) for token in ids[first:end]])
