"""Shows on the page of a run what the model writes after held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.pages.parts.charts import evenly_spaced
from toolkit.pages.parts.turns import turns_of

LONGEST = 600
"""The most characters of a prompt; the last ones are shown, because these are answered."""

MOST_BETWEEN = 6
"""The most evaluations between the first step and the last whose texts are shown."""


@dataclass(frozen=True)
class SideBySide:
    """A held-out prompt, its answer in the data, and what the model writes, None if it has not yet.

    Attributes:
        between: steps between the first and the last, and what the model writes after each.
        images: small copies of the prompt's images, as `data:` URIs.
    """

    prompt: str
    expected: str
    before: str | None = None
    between: Sequence[tuple[int, str]] = ()
    after: str | None = None
    images: Sequence[str] = ()


def prompts_and_answers(samples: Sequence[SideBySide]) -> list[tuple[str, Sequence[str], list[tuple[str, str]]]]:
    """Returns each prompt with its images, what the model writes over the run, and the data's answer."""
    return [(_end_of(sample.prompt), sample.images, _answers(sample)) for sample in samples]


def last_turn(prompt: str) -> str:
    """Returns the last turn of a prompt, or all of it if it has no marks of turns, for a line of the console."""
    turns = turns_of(prompt)
    return " ".join((turns[-1][1] if turns else prompt).split())


def _end_of(prompt: str) -> str:
    return prompt if len(prompt) <= LONGEST else f"… {prompt[-LONGEST:]}"


def _answers(sample: SideBySide) -> list[tuple[str, str]]:
    """Returns what there is: a run that is under way, or was stopped, has not written all of it."""
    return [
        *([] if sample.before is None else [("Before training", sample.before)]),
        *((f"After step {step:,}", text) for step, text in evenly_spaced(sample.between, MOST_BETWEEN)),
        *([] if sample.after is None else [("After training", sample.after)]),
        ("In the data", sample.expected),
    ]
