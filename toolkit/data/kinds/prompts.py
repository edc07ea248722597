"""Prompts, whose completions the model in training samples, with any further columns for the rewards."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from toolkit.data.documents.encode import (
    Columns,
    Document,
    Encoder,
    document_of,
    joined_notes,
    notes_of_template,
    unusable,
)
from toolkit.data.images.images import Images
from toolkit.data.kinds.kind import Arrays, BatchSpec, Field
from toolkit.data.kinds.pairs import COMPLETIONS
from toolkit.data.kinds.text import TextRows
from toolkit.data.layouts.answers import learned_answer
from toolkit.data.layouts.layout import ColumnLayout
from toolkit.data.layouts.left_out import left_out_of
from toolkit.data.layouts.messages import messages_of, tools_of, with_system
from toolkit.data.rows.examples import Example, Message
from toolkit.data.rows.values import RowProblem, RowValues, text_of
from toolkit.data.samples.packing import Ints
from toolkit.data.samples.samples import Batch, Rows, Samples, TextSamples, batch_of, segments_of
from toolkit.data.templates.prompts import prompt_ids, prompt_of
from toolkit.errors import DataError

NO_ROOM = "longer than data.max_length less objective.max_new_tokens"

ASKERS = ("user", "tool")
"""Roles after which an assistant answers."""


@dataclass(frozen=True)
class Prompted(Example):
    """A prompt, with the row that it is from.

    Attributes:
        asked: a text, or messages of which the last one is to be answered.
        row: the whole row, as the file has it.
    """

    asked: str | list[Message]
    tools: list[dict[str, Any]] | None
    row: Mapping[str, Any]
    arguments: Mapping[str, Any]

    @property
    def is_conversation(self) -> bool:
        return True

    def texts(self) -> list[str]:
        if isinstance(self.asked, str):
            return [self.asked]
        return [message["content"] for message in self.asked if message["content"]]

    def with_arguments(self, arguments: dict[str, Any]) -> Prompted:
        return replace(self, arguments=arguments)


def read_prompt(column: str, values: RowValues) -> Prompted:
    """Reads a prompt of text or messages, and keeps the other columns for rewards; raises RowProblem."""
    value, name = values[column], values.columns[column]
    tools = tools_of(values["tools"])
    values.taken |= set(values.row)
    messages = messages_of(value, name) if isinstance(value, list) else []
    row, answer = dict(values.row), learned_answer(values.row, messages)
    if row.get("answer") is None and answer is not None:
        row["answer"] = answer  # of a row to learn answers from: the rewards compare with it
    if not isinstance(value, list):
        asked = text_of(value, name)
        messages = with_system([{"role": "user", "content": asked}], values)
        return Prompted(asked if len(messages) == 1 else messages, tools, row, {})
    if len(messages) > 1 and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if messages[-1]["role"] not in ASKERS:
        raise RowProblem("nothing is asked: the last message is not the user's")
    return Prompted(with_system(messages, values), tools, row, {})


class PromptEncoder(Encoder):
    """Encodes prompts up to the beginning of an answer, as `toolkit generate` asks; `asked` is the row in JSON."""

    own: ClassVar[Columns] = {"asked": ("string", None)}

    def encode(self, examples: Sequence[Example | RowProblem]) -> list[Document]:
        return [self._prompt(item) if isinstance(item, Prompted) else unusable(item) for item in examples]

    def _prompt(self, example: Prompted) -> Document:
        kept = {"prompt": example.asked, "tools": example.tools, "arguments": example.arguments, "row": example.row}
        try:
            asked = json.dumps(kept, ensure_ascii=False, default=str)  # dates are texts, as a file of JSON has them
        except (TypeError, ValueError):
            return unusable(RowProblem("a column holds a value that JSON cannot write, so no reward could read it"))
        try:
            ids, notes = self._ids_and_notes(example)
        except RowProblem as problem:
            return unusable(problem)
        # Every token is a target of the checks before the first step; the completions after it are what is learned.
        return {**document_of(ids, [True] * len(ids), asked), "asked": asked, "note": joined_notes(notes)}

    def _ids_and_notes(self, example: Prompted) -> tuple[list[int], list[str]]:
        """Returns the tokens of a prompt, and notes about what the chat template leaves out of it."""
        asked, tools = example.asked, example.tools
        if self.tokenizer.chat_template is None:
            if not isinstance(asked, str):
                raise RowProblem("a conversation, and the tokenizer has no chat template (data.chat_template)")
            return prompt_ids(self.tokenizer, asked, self.bos_id), []
        messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        text = prompt_of(self.tokenizer, messages, tools, example.arguments)
        template = self.tokenizer.get_chat_template(tools=tools)
        notes = [*notes_of_template(messages, tools, template), *left_out_of(messages, text, tools)]
        return prompt_ids(self.tokenizer, text, None), notes


@dataclass(frozen=True)
class PromptSamples(TextSamples):
    """For online learning: a sample is a completion that is still to be written. Number n is one of prompt n // G.

    Batches are of prompts alone, two of them side by side if completions share rows: the checks before the first step
    try the model on them, and rollouts make those that are trained on.

    Attributes:
        group_size: G, the completions of each prompt.
    """

    rows: Rows
    group_size: int = 1

    def __len__(self) -> int:
        return len(self.ends) * self.group_size

    @property
    def is_packed(self) -> bool:
        return False  # nothing is known of the lengths of completions

    @property
    def shares_samples(self) -> bool:
        return self.packed

    @property
    def asked_of_itself(self) -> PromptSamples:
        return self

    @property
    def num_prompts(self) -> int:
        return len(self.ends)

    def prompt(self, number: int) -> tuple[list[int], str, dict[str, Any]]:
        """Returns the tokens of a prompt, the name of its row, and what `PromptEncoder` kept of that."""
        row = int(self.pieces.row[number])
        ids, _ = self.rows.tokens(row)
        return ids.tolist(), self.rows.name(row), json.loads(self.rows.value("asked", row))

    def rows_of(self, number: int) -> list[int]:
        first = number // self.group_size
        others = [(first + 1) % self.num_prompts] if self.packed and self.num_prompts > 1 else []
        return [int(self.pieces.row[each]) for each in (first, *others)]

    def places(self, number: int) -> list[tuple[int, int, int | None]]:
        return [(row, 0, None) for row in self.rows_of(number)]

    def batch(self, numbers: Sequence[int], seen: Sequence[Sequence[Sequence[Any]]] | None = None) -> Batch:
        samples = [self.tokens(number) for number in numbers]
        longest = max(sum(len(ids) for ids, _ in sample) for sample in samples)
        batch = batch_of(samples, longest, False, self.pad_id)
        segments = segments_of(samples, batch["input_ids"])
        zeros = torch.zeros(batch["input_ids"].shape)
        return {**batch, "segments": segments, "advantages": torch.zeros(int(segments.max()) + 1), "drawn": zeros}


class PromptRows(TextRows):
    """Prompts to sample completions of."""

    name = "prompts"
    layouts: ClassVar = tuple(
        ColumnLayout(
            name,
            (column,),
            partial(read_prompt, column),
            ("system", "tools"),
            has_conversations=column == "messages",
            some_conversations=True,
            names={"messages": "conversations"},  # ShareGPT's
        )
        for name, column in (("asked messages", "messages"), ("prompt", "prompt"))
    )
    also_called: ClassVar = {"prompt": ("question", "query", "problem", "instruction"), "messages": ("conversation",)}
    encodes: ClassVar[type[Encoder]] = PromptEncoder
    learns_tokens = False
    too_long = NO_ROOM

    @property
    def chosen_targets(self) -> str | None:
        return None

    def encoder(self, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> Encoder:
        if self.room < 1:
            raise DataError(
                f"objective.max_new_tokens: {self.objective.max_new_tokens} leaves no room for prompts in "
                f"data.max_length {self.data.max_length}; lower it, or raise that"
            )
        return super().encoder(tokenizer, **settings)

    @property
    def room(self) -> int:
        """The most tokens of a prompt."""
        assert self.objective.max_new_tokens is not None
        return self.data.max_length - self.objective.max_new_tokens

    @property
    def ways(self) -> tuple[str, ...]:
        return ("drop",)

    @property
    def most(self) -> tuple[int, ...]:
        return (self.room,)

    def shown(self, rows: Rows, row: int, targets: Any) -> tuple[Any, dict[str, Any]]:
        return np.zeros_like(targets), {}  # no token of a prompt is learned

    def arrays(self, rows: Rows, order: Ints, policy: str, names: list[str] | None) -> Arrays:
        lengths = rows.column("length").astype(np.int64)[order]
        arrays = {"row": order, "start": np.zeros_like(order), "stop": lengths, "ends": np.arange(1, len(order) + 1)}
        return arrays, {"samples": len(order), "fill_rate": None, "cut_tokens": 0}

    def fields(self, rows: Rows, images: Images | None) -> tuple[Callable[..., Samples], dict[str, Any]]:
        return PromptSamples, {"group_size": self.objective.completions_per_prompt}

    @property
    def batch(self) -> BatchSpec:
        return {
            **COMPLETIONS,
            "advantages": Field("R", "float32"),  # of the completions, against the mean of their groups
            "drawn": Field("BT", "float32"),  # the log-probability with which a learned token was sampled; 0 elsewhere
        }
