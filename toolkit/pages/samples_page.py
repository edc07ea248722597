"""Prompts of a run that samples itself, each with its completions, the best first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LENGTH_SHOWN = 2000
"""Of a prompt its last characters, of a completion its first: a page has to load."""


@dataclass(frozen=True)
class SampledPrompt:
    """A prompt and its completions.

    Attributes:
        place: file:line of the prompt.
        completions: each with its score, None if it has none, and whether a token ended it.
    """

    place: str
    prompt: str
    completions: Sequence[tuple[float | None, str, bool]]


def best_first(prompts: Sequence[SampledPrompt]) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Returns place and text of each prompt, and its completions, each with what is above it."""
    return [
        (prompt.place, prompt.prompt[-LENGTH_SHOWN:], [_line(*each) for each in _sorted(prompt)]) for prompt in prompts
    ]


def _sorted(prompt: SampledPrompt) -> list[tuple[float | None, str, bool]]:
    """Returns the completions by falling score; those without one come last."""
    return sorted(prompt.completions, key=lambda each: (each[0] is None, -(each[0] or 0.0)))


def _line(score: float | None, text: str, stopped: bool) -> tuple[str, str]:
    """Returns what is above a completion, and the text."""
    facts = "no score" if score is None else f"score {score:.4g}"
    cut = "" if stopped else ", cut"
    return facts + cut, text if len(text) <= LENGTH_SHOWN else f"{text[:LENGTH_SHOWN]} ..."
