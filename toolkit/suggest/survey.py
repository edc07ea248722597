"""Surveys the rows and the model before any value of a recipe is chosen."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from toolkit.data import build
from toolkit.data.kinds.registry import kind_for
from toolkit.data.layouts.answers import right_answers
from toolkit.data.layouts.layout import Layout
from toolkit.data.rows.examples import Example
from toolkit.data.rows.sources import Source, first_rows
from toolkit.data.rows.values import RowProblem
from toolkit.data.samples.packing import Ints
from toolkit.data.samples.samples import Rows, SampledPrompts
from toolkit.data.templates.templates import MARKERS
from toolkit.model.attention.positions import num_positions, takes_positions
from toolkit.model.load import load_without_weights
from toolkit.recipe.objectives.objective_section import ObjectiveSection
from toolkit.recipe.schema import DataSection, ModelSection

UNCUT = 2**24
"""The largest `data.max_length`, with which rows are measured whole."""

PROMPT_WORDS = 8
"""Words of the first row in the prompt of the command for generation."""


@dataclass(frozen=True)
class RightAnswers:
    """The right answers of prompts.

    Attributes:
        lengths: tokens of each answer, with the one that ends it; of several right ones the longest.
        compare: how completions are compared with them: numeric if each is a number and nothing else, structured if
            each is an object or a list in JSON, else text.
        lacking: places of the prompts without an answer.
    """

    lengths: Ints
    compare: str
    lacking: list[str]


@dataclass(frozen=True)
class UsableRows:
    """The rows that can be used.

    Attributes:
        lengths: tokens of each row with tokenizer and chat template; for a pair of both completions, for a source and
            its target of the source.
        longest: tokens of the longest document: of a row, or of one side of a pair.
        labels: names of the classes, or None without classification.
        target_lengths: tokens of targets, or None if targets are not separate.
        answers: of prompts whose completions the model samples, or None.
    """

    lengths: Ints
    longest: int
    labels: list[str] | None
    target_lengths: Ints | None = None
    answers: RightAnswers | None = None

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def longer_than(self, length: int, target_length: int | None = None) -> int:
        """Returns the number of rows that are longer, or whose target is."""
        longer = self.lengths > length
        if self.target_lengths is not None and target_length is not None:
            longer |= self.target_lengths > target_length
        return int(longer.sum())


@dataclass(frozen=True)
class Model:
    """Facts about a model from its configuration.

    Attributes:
        positions: tokens of the longest row that it can read, or None if no limit is known.
        takes_positions: whether rows can share a sample, because their positions restart.
    """

    num_parameters: int
    positions: int | None
    takes_positions: bool


def covering(lengths: Ints, share: float) -> int:
    """Returns the smallest length that at least this share of the lengths does not exceed."""
    return int(np.sort(lengths)[math.ceil(share * len(lengths)) - 1])


def measure(data: DataSection, tokenizer: PreTrainedTokenizerBase, objective: ObjectiveSection) -> UsableRows:
    """Tokenises the rows; a run with the same data and tokenizer finds them in the cache.

    Raises:
        DataError: if rows cannot be read, or too many cannot be used.
    """
    kind = kind_for(objective.kind)
    whole = data.model_copy(
        update={
            **dict.fromkeys(kind.limits, UNCUT),
            "packing": None if objective.spec.padded else False,
            "long_rows": None,
            "streaming": False,
            **dict.fromkeys(("validation", "validation_fraction", "max_validation_samples")),
        }
    )
    found = build.build(whole, tokenizer, 0, objective)
    rows = found.train.rows
    assert isinstance(rows, Rows), "nothing is streamed"
    usable = np.flatnonzero(rows.column("length"))
    sizes = (found.train.lengths(),) if rows.turns() else kind.sizes(rows, usable)
    lengths, *targets = (size.astype(np.int64) for size in sizes)
    asked = found.train.asked_of_itself
    answers = None if asked is None else _answers_of(asked, tokenizer)
    return UsableRows(lengths, found.train.longest, found.label_names, targets[0] if targets else None, answers)


def _answers_of(asked: SampledPrompts, tokenizer: PreTrainedTokenizerBase) -> RightAnswers:
    texts: list[tuple[str, ...]] = []
    lacking = []
    for number in range(asked.num_prompts):
        _, place, kept = asked.prompt(number)
        try:
            texts.append(right_answers(kept["row"].get("answer")))
        except RowProblem:
            texts.append(())
            lacking.append(place)
    lengths = [max((len(tokenizer(text)["input_ids"]) + 1 for text in each), default=0) for each in texts]
    every = [*itertools.chain(*texts)]
    compare = "numeric" if all(map(_is_number, every)) else "structured" if all(map(_is_json, every)) else "text"
    return RightAnswers(np.array(lengths), compare, lacking)


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict | list)
    except (ValueError, RecursionError):
        return False


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text.strip().lstrip("$").rstrip("%").replace(",", "")))
    except ValueError:
        return False


def look_at(model: ModelSection, tokenizer: PreTrainedTokenizerBase, rows: UsableRows, objective: str) -> Model:
    """Builds the model on the meta device from its configuration, and returns facts about it and these rows.

    Raises:
        BadInputError: if there is no such model.
    """
    built = load_without_weights(model, tokenizer, rows.labels, objective=objective)
    positions = num_positions(built)
    if positions is not None and rows.longest <= positions:
        positions *= kind_for(objective).documents
    return Model(sum(parameter.numel() for parameter in built.parameters()), positions, takes_positions(built))


def template_for(tokenizer: PreTrainedTokenizerBase, source: Source, layout: Layout) -> str | None:
    """Returns our chat template that the rows need, or None if the tokenizer has one or no row is a dialogue."""
    has_template = getattr(tokenizer, "chat_template", None)
    if has_template or not any(example.is_conversation for example in _examples(source, layout)):
        return None
    # chatml's markers would be several tokens each in a vocabulary that does not hold them.
    return "chatml" if set(MARKERS["chatml"]) <= set(tokenizer.get_vocab()) else "alpaca"


def first_words(source: Source, layout: Layout) -> str:
    """Returns the first words of the first usable row or its prompt, or an empty text if no row has any."""
    for example in _examples(source, layout):
        words = example.question().split()[:PROMPT_WORDS]
        if words:
            return " ".join(words)
    return ""


def _examples(source: Source, layout: Layout) -> Iterator[Example]:
    """Yields the usable examples among the first rows."""
    for row in first_rows(source.shards):
        try:
            yield layout.example(row)
        except RowProblem:
            continue
