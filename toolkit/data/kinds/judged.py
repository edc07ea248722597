"""Completions that are judged good or bad one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch

from toolkit.data.documents.encode import Columns, Document, Encoder
from toolkit.data.images.images import Images
from toolkit.data.kinds.kind import Arrays, BatchSpec, Field
from toolkit.data.kinds.labelled import class_name
from toolkit.data.kinds.pairs import COMPLETIONS
from toolkit.data.kinds.text import ANSWERS, TextRows
from toolkit.data.layouts.messages import answered_last
from toolkit.data.layouts.template_arguments import COLUMN
from toolkit.data.rows.examples import Answer, Conversation, Example
from toolkit.data.rows.sources import Source
from toolkit.data.rows.values import RowProblem, RowValues, yes_or_no
from toolkit.data.samples.image_samples import ImageSamples, is_of_images
from toolkit.data.samples.packing import Ints
from toolkit.data.samples.samples import Batch, ComparedSamples, Rows, Samples, last_tokens_of, segments_of
from toolkit.data.samples.sequence_parts import KL_PREFIX
from toolkit.errors import DataError


@dataclass(frozen=True)
class Judged(Example):
    """A completion that is good or bad; in a conversation it is the last turn."""

    answer: Answer | Conversation
    good: bool

    @property
    def is_conversation(self) -> bool:
        return self.answer.is_conversation

    def texts(self) -> list[str]:
        return self.answer.texts()

    def question(self) -> str:
        return self.answer.question()

    def with_arguments(self, arguments: dict[str, Any]) -> Judged:
        return Judged(self.answer.with_arguments(arguments), self.good)


def read_judged(read: Callable[[RowValues], Example], values: RowValues) -> Judged:
    """Reads an answer and its judgement; raises RowProblem."""
    answer = read(values)
    assert isinstance(answer, Answer | Conversation)
    if isinstance(answer, Conversation):
        answered_last(answer)
    column = values.columns["label"]
    # As the name of a class: a CSV file holds only text, and numbers of `datasets` mean what their names say.
    name = class_name(values["label"], column, values.label_names)
    good = yes_or_no(name)
    if good is None:
        what = f"the class {name!r}, which is " if name in values.label_names else ""
        raise RowProblem(f"{column} is {what}neither true nor false{' (data.map can make it so)' if what else ''}")
    return Judged(answer, good)


class JudgedEncoder(Encoder):
    """Encodes each completion with its prompt; `label` says whether it is good."""

    own: ClassVar[Columns] = {"label": ("string", None)}

    def encode(self, examples: Sequence[Example | RowProblem]) -> list[Document]:
        documents = super().encode([item.answer if isinstance(item, Judged) else item for item in examples])
        good = [str(item.good).lower() if isinstance(item, Judged) else None for item in examples]
        return [{**document, "label": label} for document, label in zip(documents, good, strict=True)]


@dataclass(frozen=True)
class JudgedSamples(ComparedSamples):
    """For KTO: `TextSamples` with `segments` (B, T), the number of the row in the batch; padding is -1.

    `good` (R,) are the judgements of its R rows. Keys that begin with `kl_` are the same for mismatched completions:
    within a sample each prompt gets the completion of the row before it, the first that of the last, so that both have
    the same number of tokens. A row alone in its sample gets the completion of the next sample's first row, cut to what
    is left of `max_length`. None of this depends on ranks, micro-batches or the order of samples.
    `reference` is (R, 2), for a prompt with its own and with the mismatched completion, and NaN without a reference.

    Attributes:
        good: whether the completion of each row is good, (rows,), bool.
    """

    good: Any = None

    def batch(self, numbers: Sequence[int], seen: Sequence[Sequence[Sequence[Any]]] | None = None) -> Batch:
        seen = [self.seen(number) for number in numbers] if seen is None else seen
        own = self._batch([self.tokens(number) for number in numbers], seen)
        # Images are of prompts, so both completions of a prompt see the same.
        other = self._batch([self.mismatched(number) for number in numbers], seen)
        rows = [row for number in numbers for row in self.rows_of(number)]
        return {
            **own,
            **{f"{KL_PREFIX}{name}": tensor for name, tensor in other.items() if not is_of_images(name)},
            "good": torch.from_numpy(self.good[rows]),
            "reference": self.references(rows),
        }

    def _batch(self, samples: list[list[tuple[Any, Any]]], seen: Sequence[Sequence[Sequence[Any]]]) -> Batch:
        batch = self.tensors(samples, seen)
        return {**batch, "segments": segments_of(samples, batch["input_ids"])}

    def mismatched(self, number: int) -> list[tuple[Any, Any]]:
        """Returns `(input_ids, targets)` of each prompt of a sample with the completion of another row."""
        own = self.tokens(number)
        others = [own[-1], *own[:-1]] if len(own) > 1 else [self.tokens((number + 1) % len(self))[0]]
        return [self._with_completion_of(*pair) for pair in zip(own, others, strict=True)]

    def _with_completion_of(self, own: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
        starts = [int(np.argmax(targets)) for _, targets in (own, other)]
        parts = [(mine[: starts[0]], theirs[starts[1] :]) for mine, theirs in zip(own, other, strict=True)]
        ids, targets = (np.concatenate(part)[: self.max_length] for part in parts)
        return ids, targets

    def few(self, tokens: int) -> Batch:
        """Returns the end of a row (1, T), with its own and with another completion; see `TextSamples.few`."""
        own, other = (
            last_tokens_of([(row, tokens)], self.pad_id) for row in (self.tokens(0)[0], self.mismatched(0)[0])
        )
        others = {f"{KL_PREFIX}{name}": tensor for name, tensor in other.items()}
        return {**own, **others, "good": torch.ones(1, dtype=torch.bool), "reference": torch.zeros(1, 2)}


@dataclass(frozen=True)
class ImageJudgedSamples(ImageSamples, JudgedSamples):
    """`JudgedSamples` with images, which are those of the prompt for its own and for the mismatched completion."""


class JudgedRows(TextRows):
    """Completions with a judgement each."""

    name = "judged"
    encodes = JudgedEncoder
    layouts = tuple(
        replace(
            layout,
            name=f"judged {layout.name}",
            needed=(*layout.needed, "label"),
            read=partial(read_judged, layout.read),
            names={**layout.names, "label": "kto_tag"},  # LLaMA-Factory's
        )
        for layout in ANSWERS
    )
    also_called: ClassVar = {**TextRows.also_called, "label": ("class", "category", "sentiment", "target", "stars")}

    def key(self, source: Source) -> list[Any]:
        # Documents of rows with such a column were made without it until version 0.2.
        return [COLUMN] if COLUMN in source.columns else []

    def require(self, rows: Rows, kept: Ints) -> None:
        """Checks that some rows are judged good and some bad.

        Raises:
            DataError: if all have the same judgement.
        """
        found = _judgements(rows, kept)
        if len(found) < 2:
            raise DataError(
                f"data.train: every row ({len(kept):,}) is judged {next(iter(found))}; KTO learns from good and bad "
                "completions; add some of the other kind"
            )

    def arrays(self, rows: Rows, order: Ints, policy: str, names: list[str] | None) -> Arrays:
        arrays, facts = super().arrays(rows, order, policy, names)
        return arrays, {**facts, "labels": _judgements(rows, order)}

    def fields(self, rows: Rows, images: Images | None) -> tuple[Callable[..., Samples], dict[str, Any]]:
        good = np.array([label == "true" for label in rows.values("label")])
        if rows.have_images:
            return ImageJudgedSamples, {"good": good, "images": images}
        return JudgedSamples, {"good": good}

    @property
    def batch(self) -> BatchSpec:
        return {
            **COMPLETIONS,
            **{f"{KL_PREFIX}{name}": field for name, field in COMPLETIONS.items()},  # of mismatched completions
            "reference": Field("R2", "float32"),  # of a prompt with its own and with the other completion
            "good": Field("R", "bool"),  # the judgements
        }

    def shown(self, rows: Rows, row: int, targets: Any) -> tuple[Any, dict[str, Any]]:
        return targets, {"label": rows.value("label", row)}


def _judgements(rows: Rows, chosen: Any) -> dict[str, int]:
    """Returns how many rows have each judgement."""
    labels = rows.values("label")
    return dict(sorted(Counter(str(labels[row]) for row in chosen.tolist()).items()))
