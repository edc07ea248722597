"""Options of `toolkit sample`, checked together before a library is imported."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from toolkit.errors import BadInputError
from toolkit.generation.text.options import Options, WritingOptions
from toolkit.recipe.objectives.section import Comparison

MOST_SAMPLES = 10_000
"""Most samples of a prompt: a rank holds them in memory before it writes them."""


@dataclass(frozen=True)
class SampleOptions(WritingOptions):
    """Options of the command; None for those that are not given.

    Attributes:
        prompts: file of prompts; with answers, unless a reward model or a function scores.
        to: folder of the files that are written.
        samples: completions of each prompt.
        reward: folder of a reward model's run or export; without it, completions are compared with the rows'
            answers, or a function scores.

    Raises:
        BadInputError: if options contradict each other or are out of range; it names all problems.
    """

    source: str
    prompts: Path
    to: Path
    samples: int = 8
    reward: str | None = None
    batch_size: int = 8

    def __post_init__(self) -> None:
        problems = list(self._problems())
        try:
            self.writing  # noqa: B018 (its options are checked as it is made)
        except BadInputError as problem:
            problems += str(problem).splitlines()
        try:
            Comparison.of(self.compare)
        except ValueError as problem:
            problems.append(f"--compare: {problem}")
        if problems:
            raise BadInputError("\n".join(problems))

    @property
    def writing(self) -> Options:
        """Returns the options for completions, those of `toolkit generate --file`."""
        shared = {field.name: getattr(self, field.name) for field in fields(WritingOptions) if field.name != "compare"}
        return Options(self.source, file=self.prompts, batch_size=self.batch_size, **shared)

    def _problems(self) -> Iterator[str]:
        if not 1 <= self.samples <= MOST_SAMPLES:
            yield f"--samples: {self.samples} is out of range; allowed: 1 to {MOST_SAMPLES:,}"
        if self.temperature == 0 and self.samples > 1:
            yield (
                f"--temperature 0 and --samples {self.samples} contradict each other: always the most likely token "
                "makes all samples alike; raise the temperature, or set --samples 1"
            )
        if self.reward is not None and self.compare is not None:
            yield "--compare and --reward contradict each other: the reward model scores; leave --compare out"
