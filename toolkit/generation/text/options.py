"""Options of `toolkit generate`, checked together before a library is imported."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from toolkit.errors import BadInputError
from toolkit.recipe.objectives.section import Comparison

MODES = ("--prompt", "--chat", "--file", "--eval")

NAMES = {"evaluation": "--eval", "output": "--to", "as_json": "--json", "images": "--image"}
"""Field -> the option with another name."""

BELONGS_TO = {
    "--to": ("--file", "--eval"),
    "--batch-size": ("--file", "--eval"),
    "--compare": ("--eval",),
    "--json": ("--eval",),
    "--image": ("--prompt",),
}
"""Option -> the modes in which it has an effect; all other options have one in every mode."""

CONTRADICTIONS = {
    ("--raw", "--chat"): "a conversation needs the chat template",
    ("--raw", "--system"): "a system text needs the chat template",
    ("--raw", "--image"): "images go where the chat template says",
    ("--temperature", "--eval"): "an evaluation takes the most likely token",
    ("--top-p", "--eval"): "an evaluation takes the most likely token",
    ("--seed", "--eval"): "an evaluation takes the most likely token",
}
"""Options that exclude each other -> why. The first is the one to remove."""

LEAST_TEMPERATURE = 0.001
"""Lowest temperature: logits divided by less could overflow their type."""

CHOICES = {"--dtype": ("auto", "float32", "bfloat16", "float16"), "--device": ("auto", "cpu", "cuda")}


@dataclass(frozen=True, kw_only=True)
class WritingOptions:
    """Options of how a model writes and how answers are compared; None for those that are not given."""

    raw: bool = False
    system: str | None = None
    compare: str | None = None
    max_new_tokens: int = 256
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    dtype: str = "auto"
    device: str = "auto"


@dataclass(frozen=True)
class Options(WritingOptions):
    """Options of the command; None for those that are not given.

    Raises:
        BadInputError: if options contradict each other or are out of range; it names all problems.
    """

    source: str
    prompt: str | None = None
    chat: bool = False
    file: Path | None = None
    evaluation: Path | None = None
    output: Path | None = None
    as_json: bool = False
    batch_size: int | None = None
    images: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        given = self._options_given()
        problems = [*_mode_problems(given), *_contradictions(given), *self._range_problems()]
        if problems:
            raise BadInputError("\n".join(problems))

    @property
    def sampling(self) -> Sampling:
        """Settings of how tokens are drawn, with defaults for options that are not given."""
        if self.evaluation is not None:
            return Sampling(self.max_new_tokens, 0.0)
        given = {name: getattr(self, name) for name in ("temperature", "top_p", "seed")}
        return Sampling(self.max_new_tokens, **{name: value for name, value in given.items() if value is not None})

    def _options_given(self) -> set[str]:
        given = [each.name for each in fields(self) if getattr(self, each.name) != each.default]
        return {NAMES.get(name, f"--{name.replace('_', '-')}") for name in given}

    def _range_problems(self) -> Iterator[str]:
        temperature, top_p, seed = self.temperature, self.top_p, self.seed
        for option, count in (("--max-new-tokens", self.max_new_tokens), ("--batch-size", self.batch_size)):
            if count is not None and count < 1:
                yield f"{option}: {count} is too small; allowed: 1 or more"
        if temperature is not None and temperature != 0 and not LEAST_TEMPERATURE <= temperature < math.inf:
            least = f"0 (always the most likely token), or {LEAST_TEMPERATURE} and more"
            yield f"--temperature: {temperature} is out of range; allowed: {least}"
        for option, value in (("--top-p", top_p), ("--seed", seed)):
            if temperature == 0 and value is not None:
                yield (
                    f"{option} and --temperature 0 contradict each other: it takes the most likely token; leave "
                    f"{option} out"
                )
        if top_p is not None and not 0 < top_p <= 1:
            yield f"--top-p: {top_p} is out of range; allowed: more than 0, at most 1 (all tokens)"
        if seed is not None and not 0 <= seed < 2**63:
            yield f"--seed: {seed} is out of range; allowed: 0 to 2**63 - 1"
        for option, found in (("--dtype", self.dtype), ("--device", self.device)):
            if found not in CHOICES[option]:
                yield f"{option}: unknown {found!r}; allowed: {', '.join(CHOICES[option])}"
        for option, text in (("--prompt", self.prompt), ("--system", self.system)):
            yield from _text_problems(option, text)
        try:
            Comparison.of(self.compare)
        except ValueError as problem:
            yield f"--compare: {problem}"


@dataclass(frozen=True)
class Sampling:
    """Settings of how tokens are drawn.

    Attributes:
        max_new_tokens: most tokens of one completion; fewer if the model's positions end before.
        temperature: divides the logits; 0 takes the most likely token.
        top_p: draws from the most likely tokens that together have this probability.
        seed: seed of all draws.
    """

    max_new_tokens: int = 256
    temperature: float = 0.7
    top_p: float = 0.95
    seed: int = 0


def _mode_problems(given: set[str]) -> Iterator[str]:
    modes = [mode for mode in MODES if mode in given]
    if not modes:
        yield f"nothing to do: give one of {', '.join(MODES)}"
    if len(modes) > 1:
        yield f"{' and '.join(modes)} contradict each other; give one of them"
    for option, homes in BELONGS_TO.items():
        if option in given and len(modes) == 1 and modes[0] not in homes:
            belongs = f"{option} belongs to {' and '.join(homes)}"
            yield f"{option} and {modes[0]} contradict each other: {belongs}; leave one of them out"


def _contradictions(given: set[str]) -> Iterator[str]:
    for (option, other), reason in CONTRADICTIONS.items():
        if option in given and other in given:
            yield f"{option} and {other} contradict each other: {reason}; leave {option} out"


def _text_problems(option: str, text: str | None) -> Iterator[str]:
    if text is None:
        return
    if not text.strip():
        yield f"{option}: is empty; give it some text"
    if text != encodable(text):
        yield f"{option}: is not UTF-8 text"


def encodable(text: str) -> str:
    """Returns the text with a question mark for each byte or half character that UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode("utf-8")
