"""Words with a tag each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from toolkit.data.documents.encode import Columns, Document, Encoder, document_of, unusable
from toolkit.data.images.images import Images
from toolkit.data.kinds.kind import BatchSpec, Field
from toolkit.data.kinds.labelled import PADDED_TEXT, LabelledRows, LabelledSamples, class_name
from toolkit.data.layouts.layout import ColumnLayout
from toolkit.data.rows.examples import Example
from toolkit.data.rows.values import RowProblem, RowValues, text_of
from toolkit.data.samples.samples import IGNORED, Batch, Rows, Samples
from toolkit.errors import DataError


@dataclass(frozen=True)
class Tagged(Example):
    """Words, and the tag of each; a number that names a tag comes as text."""

    words: tuple[str, ...]
    tags: tuple[str, ...]

    def texts(self) -> list[str]:
        return [" ".join(self.words)]


def read_tagged(values: RowValues) -> Tagged:
    """Reads words and their tags; raises RowProblem."""
    words, tags, columns = values["tokens"], values["tags"], values.columns
    for value, column in ((words, columns["tokens"]), (tags, columns["tags"])):
        if not isinstance(value, list):
            raise RowProblem(f"{column} is {'missing or null' if value is None else 'not a list'}")
    if not words:
        raise RowProblem(f"{columns['tokens']} is empty")
    if len(words) != len(tags):
        raise RowProblem(f"{columns['tokens']} and {columns['tags']} are of different lengths")
    return Tagged(
        tuple(text_of(word, f"a word of {columns['tokens']}") for word in words),
        tuple(class_name(tag, f"a tag of {columns['tags']}", values.label_names) for tag in tags),
    )


class TaggedEncoder(Encoder):
    """Encodes words; `tags` are those of the targets, in order."""

    own: ClassVar[Columns] = {"tags": (["string"], [])}

    def encode(self, examples: Sequence[Example | RowProblem]) -> list[Document]:
        return [self._tagged_document(item) if isinstance(item, Tagged) else unusable(item) for item in examples]

    def _tagged_document(self, example: Tagged) -> Document:
        """Returns a document whose targets are the first token of each word, with the words' tags.

        The words are joined by spaces, so that they are tokenised like a text given to a pipeline. A word without a
        token of its own, for example of characters that the tokenizer drops, has no target.
        """
        if not self.tokenizer.is_fast:
            raise DataError(
                f"model.tokenizer: {type(self.tokenizer).__name__} does not report where in the text its tokens are, "
                "so words' tags cannot be given to them; use a model with a fast tokenizer"
            )
        cut = {} if self.truncate_to is None else {"truncation": True, "max_length": self.truncate_to}
        text = " ".join(example.words)
        encoded = self.tokenizer(
            text,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
            return_attention_mask=False,
            verbose=False,
            **cut,
        )
        # One past each word. The space before a word belongs to it: its token may begin there, or be only that.
        ends = np.cumsum([len(word) + 1 for word in example.words]) - 1
        targets, tags, last = [False] * len(encoded["input_ids"]), [], -1
        for token, (start, end) in enumerate(encoded["offset_mapping"]):
            word = int(np.searchsorted(ends, max(start, end - 1), side="right"))
            begins = start + len(text[start:end]) - len(text[start:end].lstrip())
            if begins < end and int(np.searchsorted(ends, begins, side="right")) < word:
                return unusable(RowProblem("a token of the tokenizer spans two words, and can carry one tag alone"))
            if word > last and not encoded["special_tokens_mask"][token]:
                targets[token], last = True, word
                tags.append(example.tags[word])
        return {**document_of(encoded["input_ids"], targets, "\n".join(tags)), "tags": tags}


@dataclass(frozen=True)
class TaggedSamples(LabelledSamples):
    """For words with tags: `LabelledSamples` with `labels` (B, T), IGNORED except at the first token of each word.

    Attributes:
        labels: the numbers of the tags of each sample's words.
    """

    def batch(self, numbers: Sequence[int]) -> Batch:
        tokens = [self.row(number) for number in numbers]
        batch = self._padded_batch([(ids, np.zeros_like(ids)) for ids, _ in tokens])
        labels = torch.full_like(batch["input_ids"], IGNORED)
        for i, (number, (_, firsts)) in enumerate(zip(numbers, tokens, strict=True)):
            labels[i, np.flatnonzero(firsts)] = torch.tensor(self.labels[number], dtype=torch.long)
        return {**batch, "labels": labels}


class TaggedRows(LabelledRows):
    """Rows with a class for each word."""

    name = "tagged"
    encodes = TaggedEncoder
    mixes_numbers = False
    strata = None
    layouts: ClassVar = (
        ColumnLayout(
            "tokens and tags",
            ("tokens", "tags"),
            read_tagged,
            names={"tags": "ner_tags"},  # usual for named entities
        ),
    )
    also_called: ClassVar = {
        "tokens": ("words",),
        "tags": ("ner", "labels", "pos_tags", "chunk_tags", "ner_labels"),
    }

    def labels(self, rows: Rows) -> list[list[str]]:
        return rows.values("tags")

    def samples(self, rows: Rows, arrays: Mapping[str, Any], pad_id: int, images: Images | None) -> Samples:
        labels = np.split(arrays["label"], arrays["ends"][:-1])
        return TaggedSamples(rows, arrays["row"], self.data.max_length, pad_id, labels)

    @property
    def batch(self) -> BatchSpec:
        return {**PADDED_TEXT, "labels": Field("BT")}  # the tag at the first token of each word, else -100

    def shown(self, rows: Rows, row: int, targets: Any) -> tuple[Any, dict[str, Any]]:
        return targets, {}
