"""Text, answers and conversations, whose next tokens a model learns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from toolkit.data.images.images import Images
from toolkit.data.kinds.kind import Arrays, BatchSpec, Field, RowKind
from toolkit.data.layouts.layout import ColumnLayout
from toolkit.data.layouts.messages import asked_of, conversation, messages_of, tools_of, with_system
from toolkit.data.rows.examples import Answer, Example, Text
from toolkit.data.rows.values import JUDGED, RowValues, text_of, yes_or_no
from toolkit.data.samples.image_samples import ImageSamples
from toolkit.data.samples.packing import Ints, Pieces, by_sample, samples_of, split, whole
from toolkit.data.samples.samples import Rows, Samples, TextSamples
from toolkit.errors import DataError

TEXT: BatchSpec = {
    "input_ids": Field("BT"),
    "labels": Field("BT"),  # aligned with input_ids; -100 for what is not learned
    "position_ids": Field("BT"),  # restart with each document of a sample
    "lengths": Field("B"),  # tokens without padding
}


def read_text(values: RowValues) -> Example:
    return Text(values.text("text"))


def read_messages(values: RowValues) -> Example:
    messages = messages_of(values["messages"], values.columns["messages"], values.images is not None)
    return conversation(with_system(messages, values), tools_of(values["tools"]), values.images)


def read_completion(values: RowValues) -> Example:
    prompt, completion, columns = values["prompt"], values["completion"], values.columns
    if isinstance(prompt, list) or isinstance(completion, list):
        asked = messages_of(prompt, columns["prompt"], values.images is not None)
        answered = messages_of(completion, columns["completion"], values.images is not None)
        found = conversation([*asked, *answered], tools_of(values["tools"]), values.images)
        return replace(found, num_asked=len(asked))
    return Answer(text_of(prompt, columns["prompt"]), text_of(completion, columns["completion"]))


def read_instruction(values: RowValues) -> Example:
    messages = [*asked_of(values), {"role": "assistant", "content": values.text("output")}]
    return conversation(with_system(messages, values), None, values.images or None)


ALPACA = ("input", "system", "history")
"""What rows of instructions may have besides."""

ANSWERS = (
    ColumnLayout("messages", ("messages",), read_messages, ("system", "tools"), has_conversations=True),
    ColumnLayout(
        "conversations",
        ("messages",),
        read_messages,
        ("system", "tools"),
        has_conversations=True,
        names={"messages": "conversations"},  # ShareGPT's
    ),
    ColumnLayout(
        "prompt and completion",
        ("prompt", "completion"),
        read_completion,
        ("tools",),
        some_conversations=True,
        elsewhere=dict.fromkeys(
            ALPACA,
            "or name the prompt {columns}.instruction and the completion {columns}.output",
        ),
    ),
    ColumnLayout("instruction and output", ("instruction", "output"), read_instruction, ALPACA, has_conversations=True),
)
"""Layouts of answers, which other kinds judge or compare."""


def _read_unjudged(read: Callable[[RowValues], Example], values: RowValues) -> Example:
    """Reads an answer.

    Raises:
        DataError: if answers have judgements: the bad ones would be learned like the good ones.
    """
    for column in JUDGED:
        if yes_or_no(values.row.get(column)) is not None:
            raise DataError(
                f"data: rows are judged good or bad one by one ({column}: {values.row[column]}), as for KTO; set "
                "objective.kind=kto (toolkit init: --method kto), or keep only the good rows and remove the "
                f"column {column}"
            )
    return read(values)


class TextRows(RowKind):
    """Rows whose own tokens are learned. They are cut into pieces, which share samples."""

    name = "text"
    layouts = (
        *(replace(layout, read=partial(_read_unjudged, layout.read)) for layout in ANSWERS),
        ColumnLayout("text", ("text",), read_text, is_plain=True),
    )
    also_called: ClassVar = {
        "messages": ("dialogue", "dialog", "conversation", "chat", "turns"),
        "prompt": ("question", "query", "problem", "context"),
        "completion": ("answer", "response", "solution", "reply", "target", "chosen"),
        "instruction": ("task", "question", "query", "input"),
        "input": ("context",),
        "system": ("system_prompt",),
        "output": ("answer", "response"),
        "text": ("body", "content", "document", "sentence", "review", "passage"),
    }

    def pieces(self, rows: Rows, order: Ints, policy: str) -> tuple[Pieces, int]:
        """Returns the pieces of rows in order, and how many tokens are cut off."""
        lengths = rows.column("length").astype(np.int64)
        max_length, turns = self.data.max_length, rows.turns()
        cut = split if policy == "split" else whole
        pieces = cut(order, lengths, max_length, turns)
        tokens = int(samples_of(order, lengths, turns).lengths().sum())
        cut_tokens = 0 if policy == "split" else tokens - int(pieces.lengths().sum())
        of_long = np.flatnonzero(lengths[pieces.row] > max_length).tolist()
        # A long prompt makes pieces without a target. Rows that are not cut have a target, or were dropped before.
        useless = [i for i in of_long if not rows.tokens(*pieces.place(i))[1][1:].any()]
        return pieces.take(np.setdiff1d(np.arange(len(pieces)), useless)), cut_tokens

    def arrays(self, rows: Rows, order: Ints, policy: str, names: list[str] | None) -> Arrays:
        pieces, cut_tokens = self.pieces(rows, order, policy)
        in_order, ends = by_sample(pieces, self.sample_of(pieces))
        # With padding it is not known yet, because padding depends on which rows meet in a batch.
        fill = float(pieces.lengths().sum() / (len(ends) * self.data.max_length)) if self.packed else None
        arrays = {"row": in_order.row, "start": in_order.start, "stop": in_order.stop, "ends": ends}
        return arrays, {"samples": len(ends), "fill_rate": fill, "cut_tokens": cut_tokens}

    def samples(self, rows: Rows, arrays: Mapping[str, Any], pad_id: int, images: Images | None) -> Samples:
        of, fields = self.fields(rows, images)
        pieces = Pieces(arrays["row"], arrays["start"], arrays["stop"])
        return of(rows, pieces, arrays["ends"].tolist(), self.data.max_length, self.packed, pad_id, **fields)

    def fields(self, rows: Rows, images: Images | None) -> tuple[Callable[..., Samples], dict[str, Any]]:
        """Returns the class of the samples, and its fields besides those of all samples of pieces."""
        sources = rows.told_as(self.data.source_names) if self.data.source_names else None
        if rows.have_images:
            return ImageSamples, {"images": images, "source_of": sources}
        return TextSamples, {"source_of": sources}

    @property
    def batch(self) -> BatchSpec:
        # The number of the named source that a token's row is of; -1 for none.
        return {**TEXT, **({"sources": Field("BT", optional=True)} if self.objective.spec.tells_sources else {})}
