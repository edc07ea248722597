"""A page of the samples of `toolkit sample`: prompts with their completions, the best first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import counted
from toolkit.pages.parts.page import render, write_page

SAMPLES_PAGE = "samples.html"

PROMPTS_SHOWN = 100
"""The first ones; the file of samples has all."""

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


def write_samples_page(path: Path, title: str, results: Sequence[str], prompts: Sequence[SampledPrompt]) -> None:
    """Writes the page.

    Args:
        title: of the page, such as the name of the folder.
        results: what came of the samples, as lines.
        prompts: all of them; the page shows the first.
    """
    write_page(path, render_samples(title, results, prompts))


def render_samples(title: str, results: Sequence[str], prompts: Sequence[SampledPrompt]) -> str:
    """Returns the whole page as HTML text."""
    left = len(prompts) - PROMPTS_SHOWN
    return render(
        "sampled.html.jinja",
        title=title,
        results=[*results, *([f"{counted(left, 'prompt')} more in samples.jsonl"] if left > 0 else [])],
        prompts=best_first(prompts[:PROMPTS_SHOWN]),
    )


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
