"""Pairs of completions, one preferred over the other."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import torch

from toolkit.data.documents.encode import (
    Columns,
    Document,
    Encoder,
    digests_of,
    document_of,
    joined_notes,
    unusable,
    with_images,
)
from toolkit.data.images.images import Images
from toolkit.data.kinds.kind import BatchSpec, Field
from toolkit.data.kinds.text import TEXT, TextRows
from toolkit.data.layouts.layout import ColumnLayout, Layout
from toolkit.data.layouts.messages import answered_last, asked_of, conversation, messages_of, tools_of, with_system
from toolkit.data.rows.examples import Answer, Conversation, Example, Message
from toolkit.data.rows.image_places import OF_REJECTED, column_of
from toolkit.data.rows.sources import Source, first_rows
from toolkit.data.rows.values import RowProblem, RowValues, is_absent, is_empty, text_of, type_of
from toolkit.data.samples.image_samples import ImageSamples
from toolkit.data.samples.samples import Batch, ComparedSamples, Rows, Samples, last_tokens_of, segments_of
from toolkit.recipe.objectives.spec import ObjectiveSpec

COMPLETIONS: BatchSpec = {
    **TEXT,
    "segments": Field("BT"),  # the completion that a token is of, counted over the batch; -1 for padding
}

SIDES = ("chosen", "rejected")

_TURN = re.compile(r"\n\n(Human|Assistant):")
"""How hh-rlhf (arXiv 2204.05862) marks turns."""


@dataclass(frozen=True)
class Pair(Example):
    """One completion preferred over the other; what comes before them is the same.

    Attributes:
        margin: by how much the chosen one is better, as the row says; otherwise 0.
    """

    chosen: Answer | Conversation
    rejected: Answer | Conversation
    margin: float = 0.0

    @property
    def is_conversation(self) -> bool:
        return self.chosen.is_conversation

    def texts(self) -> list[str]:
        return [*self.chosen.texts(), *self.rejected.texts()]

    def question(self) -> str:
        return self.chosen.question()

    def with_arguments(self, arguments: dict[str, Any]) -> Pair:
        sides = [side.with_arguments(arguments) for side in (self.chosen, self.rejected)]
        return Pair(sides[0], sides[1], self.margin)


def read_pair(values: RowValues) -> Pair:
    """Returns both completions after their prompt, which may be the common beginning of two conversations.

    Raises:
        RowProblem: if the two are the same, or differ before the last message.
    """
    prompt, names = _prompt(values), values.columns
    # Only a conversation has places for images.
    if (values.templated or values.images is not None) and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    sides = [_completion(prompt, values, side) for side in SIDES]
    chosen, rejected = sides
    if chosen == rejected:
        raise RowProblem(f"{names['chosen']} and {names['rejected']} are the same")
    before = [side.messages[:-1] for side in sides if isinstance(side, Conversation)]
    if before and before[0] != before[-1]:
        raise RowProblem(f"{names['chosen']} and {names['rejected']} differ before the last message")
    return Pair(chosen, rejected, _margin(values))


def _margin(values: RowValues) -> float:
    value: Any = values["margin"]
    if is_absent(value):
        return 0.0
    # A CSV file holds only text; in Python True is a number.
    try:
        margin = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        margin = math.nan
    if not math.isfinite(margin):
        raise RowProblem(f"{values.columns['margin']} is {type_of(value)}, not a finite number")
    return margin


def _prompt(values: RowValues) -> str | list[Message]:
    """Returns the prompt as text or messages, or an empty list if both sides are whole conversations."""
    prompt = values["prompt"]
    if isinstance(prompt, list):
        return messages_of(prompt, values.columns["prompt"], values.images is not None) if prompt else []
    if prompt is not None:
        return text_of(prompt, values.columns["prompt"])
    if (messages := values["messages"]) is not None:
        return messages_of(messages, values.columns["messages"], values.images is not None)
    return asked_of(values) if values["instruction"] is not None else []


def _completion(prompt: str | list[Message], values: RowValues, side: str) -> Answer | Conversation:
    value, column = values[side], values.columns[side]
    if isinstance(prompt, str) and not isinstance(value, list | dict):
        return Answer(prompt, text_of(value, column))
    if isinstance(value, str) and not prompt:
        answered = _dialogue(value, values.columns)
    elif isinstance(value, str) and not isinstance(values["prompt"], list):  # LLaMA-Factory's: the answer alone
        answered = [{"role": "assistant", "content": text_of(value, column)}]
    else:
        answered = messages_of([value] if isinstance(value, dict) else value, column, values.images is not None)
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages = with_system(_prompt_and_answer(asked, answered, column), values)
    return answered_last(conversation(messages, tools_of(values["tools"]), _images(values, side)))


def _images(values: RowValues, side: str) -> list[Any] | None:
    """Returns the images of the row's column for one side, which are those of both unless the row has others."""
    if values.images is None:
        return None
    of_rejected = column_of(values.row, (OF_REJECTED,)) if side == "rejected" else []
    values.taken.add(OF_REJECTED)
    return of_rejected or values.images


def _prompt_and_answer(asked: list[Message], answered: list[Message], column: str) -> list[Message]:
    """Returns the prompt and the answer; the column may repeat the prompt, as UltraFeedback's do."""
    if not asked or answered[0]["role"] in ("assistant", "tool"):
        return [*asked, *answered]
    # The conversation may have a system turn of its own, which the prompt does not repeat.
    begins = answered[1:] if answered[0]["role"] == "system" and asked[0]["role"] != "system" else answered
    if [_role_and_text(message) for message in begins[: len(asked)]] != [_role_and_text(message) for message in asked]:
        raise RowProblem(f"{column} is a whole conversation that does not begin with the prompt")
    return answered


def _role_and_text(message: Message) -> tuple[str, str]:
    return message["role"], (message["content"] or "").strip()


def _dialogue(text: str, columns: Mapping[str, str]) -> list[Message]:
    """Parses a conversation written as text: `\\n\\nHuman: ...\\n\\nAssistant: ...`."""
    if not _TURN.match(text):
        raise RowProblem(f"{columns['prompt']} is missing or null")
    _, *parts = _TURN.split(text)
    return messages_of(
        [{"from": who.lower(), "value": words.strip()} for who, words in zip(parts[::2], parts[1::2], strict=True)],
        columns["chosen"],
    )


class PairEncoder(Encoder):
    """Encodes pairs: the chosen one's tokens, and after `split` of them the rejected one's; their images likewise."""

    own: ClassVar[Columns] = {"split": ("int32", 0), "margin": ("float32", 0.0)}
    many_pieces = True

    def encode(self, examples: Sequence[Example | RowProblem]) -> list[Document]:
        sides = [[pair if isinstance(pair, RowProblem) else getattr(pair, side) for pair in examples] for side in SIDES]
        chosen, rejected = (super(PairEncoder, self).encode(side) for side in sides)
        margins = [getattr(pair, "margin", 0.0) for pair in examples]
        return [_pair_document(*pair) for pair in zip(chosen, rejected, margins, strict=True)]


def _pair_document(chosen: Document, rejected: Document, margin: float) -> Document:
    problem = chosen["problem"] or rejected["problem"]
    same = np.array_equal(chosen["input_ids"], rejected["input_ids"])
    if problem is None and same and chosen.get("pictures") == rejected.get("pictures"):
        problem = "chosen and rejected make the same tokens"  # a template may trim them, or leave their thoughts out
    if problem is not None:
        return unusable(RowProblem(problem))
    ids, targets = (np.concatenate([chosen[key], rejected[key]]) for key in ("input_ids", "targets"))
    note, split = joined_notes([chosen["note"], rejected["note"]]), chosen["length"]
    images = with_images([(0, chosen.get("pictures", [])), (split, rejected.get("pictures", []))])
    return {**document_of(ids, targets, digests_of(images)), "note": note, "split": split, "margin": margin, **images}


@dataclass(frozen=True)
class PairSamples(ComparedSamples):
    """For preferences: `TextSamples` with both completions of a pair in one sample, and `segments` (B, T).

    A segment is a completion with its prompt: in the batch's i-th pair, 2 i is the chosen one and 2 i + 1 the
    rejected one; padding is -1. `reference` is (P, 2) for P pairs, and NaN without a reference. `margin` is (P,).

    Attributes:
        splits: tokens of the chosen completion of each row, (rows,).
        margins: by how much the chosen completion of each row is better, (rows,), or None if batches have no `margin`.
    """

    keep_apart: ClassVar[str] = (
        "Both completions of a pair share a sample: remove data.packing, or set another model.attention"
    )
    splits: Any = None
    margins: Any = None

    @property
    def shares_samples(self) -> bool:
        return True

    @functools.cached_property
    def longest(self) -> int:
        splits = self.splits[self.pieces.row]
        return int(np.maximum(splits, self.lengths() - splits).max())

    def batch(self, numbers: Sequence[int], seen: Sequence[Sequence[Sequence[Any]]] | None = None) -> Batch:
        batch = super().batch(numbers, seen)
        batch["position_ids"] %= self.longest  # padding is in no document, and may go beyond a model's positions
        batch["segments"] = segments_of([self.tokens(number) for number in numbers], batch["input_ids"])
        rows = [row for number in numbers for row in self.rows_of(number)]
        batch["reference"] = self.references(rows)
        if self.margins is not None:
            batch["margin"] = torch.from_numpy(self.margins[rows])
        return batch

    def places(self, number: int) -> list[tuple[int, int, int | None]]:
        """Returns row, first token and end of the chosen and the rejected completion of each pair."""
        # Two pieces, so that positions restart at the second: the rejected side does not see the chosen one.
        splits = [(row, int(self.splits[row])) for row in self.rows_of(number)]
        return [place for row, split in splits for place in ((row, 0, split), (row, split, None))]

    def asked(self, number: int) -> Iterator[tuple[tuple[Any, Any], list[Any]]]:
        return islice(super().asked(number), 0, None, 2)

    def few(self, tokens: int) -> Batch:
        """Returns a row (1, T) of the ends of both completions of a pair; see `TextSamples.few`."""
        chosen, rejected = self.tokens(0)[:2]
        batch = last_tokens_of([(chosen, tokens // 3), (rejected, tokens - tokens // 3)], self.pad_id)
        return {**batch, "reference": torch.zeros(1, 2), "margin": torch.zeros(1)}


@dataclass(frozen=True)
class ImagePairSamples(ImageSamples, PairSamples):
    """`PairSamples` with images: each completion sees those of its own conversation."""


class PairRows(TextRows):
    """Pairs; both completions of one are in one sample."""

    name = "pairs"
    documents = 2
    encodes = PairEncoder
    layouts = (
        ColumnLayout(
            "chosen and rejected",
            ("chosen", "rejected"),
            read_pair,
            ("prompt", "messages", "instruction", "input", "history", "system", "tools", "margin"),
            some_conversations=True,
            names={"messages": "conversations"},
            elsewhere={"margin": "or set objective.kind=reward, which uses it"},
        ),
    )
    also_called: ClassVar = {
        **TextRows.also_called,
        "chosen": ("preferred", "winner", "response_w", "better"),
        "rejected": ("dispreferred", "loser", "response_l", "worse"),
    }

    @classmethod
    def idle_columns(cls, spec: ObjectiveSpec) -> frozenset[str]:
        return frozenset() if spec.has_margins else frozenset({"margin"})

    @classmethod
    def adapted(cls, layout: Layout, source: Source, by_hand: Mapping[str, str]) -> Layout:
        """Returns the layout, as conversations if pairs of a text prompt and texts have a system prompt or tools.

        Intel/orca_dpo_pairs has them, and only a conversation has a place for these. The first rows decide for all, and
        a column that is named by hand does, because rows without a system prompt among others must not be learned in
        another form.
        """
        found = (RowValues(row, layout.columns) for row in first_rows(source.shards))
        texts = [values for values in found if isinstance(values["prompt"], str) and isinstance(values["chosen"], str)]
        more = any(what in by_hand or not is_empty(values[what]) for values in texts for what in ("system", "tools"))
        return replace(layout, templated=more)

    def agreed(self, layout: Layout, others: Callable[[], list[Layout]]) -> Layout:
        """Returns the layout, as conversations if those of any source are; held-out ones count, too."""
        return replace(layout, templated=any(other.templated for other in [layout, *others()]))

    def fields(self, rows: Rows, images: Images | None) -> tuple[Callable[..., Samples], dict[str, Any]]:
        margins = rows.column("margin") if self.objective.spec.has_margins else None
        fields = {"splits": rows.column("split"), "margins": margins}
        return (ImagePairSamples, {**fields, "images": images}) if rows.have_images else (PairSamples, fields)

    def parts(self, rows: Rows, row: int) -> list[tuple[str, int, int | None]]:
        split = int(rows.value("split", row))
        return [("chosen", 0, split), ("rejected", split, None)]

    @property
    def batch(self) -> BatchSpec:
        return {
            **COMPLETIONS,  # of pair p, segment 2 p is the chosen completion and 2 p + 1 the rejected one
            "reference": Field("R2", "float32"),  # log-probabilities of both by the reference; NaN: not known
            # by how much the chosen completion is better
            **({"margin": Field("R", "float32")} if self.objective.spec.has_margins else {}),
        }
