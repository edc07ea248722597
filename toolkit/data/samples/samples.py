"""Samples: rows of tokens as a model takes them, put together on demand."""

from __future__ import annotations

import bisect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, TypeVar

import numpy as np
import torch
from PIL import Image

from toolkit.data.documents.documents import Documents
from toolkit.data.samples.packing import Pieces, Turns

IGNORED = -100
"""The label of a token that is not a target; torch's cross-entropy skips it."""

MULTIPLE = 8
"""Padded batches are as long as their longest row, rounded up to a multiple of this many tokens."""

SAMPLES_LOOKED_AT = 256
"""Number of samples in which the ends of answers are searched: a template has one or two."""

Batch = dict[str, torch.Tensor]

T = TypeVar("T")


PLAIN_PROMPT = 16
"""Tokens of a row that are its prompt if all of it is learned, as in plain text."""


@dataclass(frozen=True)
class RowPrompt:
    """Tokens of a row: the prompt, with its images, and the answer after it, or the target."""

    asked: list[int]
    answer: list[int]
    images: tuple[Image.Image, ...] = ()


def prompt_of(ids: Any, targets: Any) -> RowPrompt | None:
    """Returns what comes before the first target, and the targets from there on; None if either is empty.

    `ids` and `targets` are (length,).
    """
    learned = np.asarray(targets, dtype=bool)
    first = PLAIN_PROMPT if learned[1:].all() else int(learned.argmax())
    if first == 0 or first >= len(ids):
        return None
    ends = np.flatnonzero(~learned[first:])
    end = first + int(ends[0]) if len(ends) else len(ids)
    return RowPrompt([int(token) for token in ids[:first]], [int(token) for token in ids[first:end]])


class SampledPrompts(Protocol):
    """Prompts whose completions the model in training writes."""

    @property
    def pad_id(self) -> int: ...

    @property
    def num_prompts(self) -> int: ...

    def prompt(self, number: int) -> tuple[list[int], str, dict[str, Any]]:
        """Returns the tokens of a prompt, the name of its row, and the row with what is asked."""


class Samples(ABC):
    """A data set of samples. It answers what the rest of a run asks of its kind of row, so that nobody asks its class.

    Attributes:
        rows: the rows that hold the tokens.
        max_length: the most tokens of a row, of a source if it has a target.
        pad_id: token of padding.
        keep_apart: what a user can do if documents of a sample see each other in a model.
    """

    rows: Rows
    max_length: int
    pad_id: int
    keep_apart: ClassVar[str] = "Set data.packing=false, or another model.attention"

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batch(self, numbers: Sequence[int]) -> Batch:
        """Returns the samples of these numbers, each tensor (B, ...)."""

    @abstractmethod
    def lengths(self) -> Any:
        """Returns the number of tokens of each row, or piece of a row, that is in a sample, (pieces,), int64."""

    @property
    def longest(self) -> int:
        """The most tokens of a document: a row, or a piece or side of one."""
        return int(self.lengths().max())

    @property
    def is_packed(self) -> bool:
        """Whether rows share samples in order to fill them."""
        return False

    @property
    def shares_samples(self) -> bool:
        """Whether a sample may hold several documents, which must not see each other; pairs do without packing."""
        return self.is_packed

    @property
    def continues_text(self) -> bool:
        """Whether labels are the row's own tokens, so that a model continues it and its beginning is a row as well."""
        return False

    @property
    def has_images(self) -> bool:
        """Whether rows may have images."""
        return False

    @property
    def has_several_labels(self) -> bool:
        """Whether any number of labels may hold for a row."""
        return False

    @property
    def placeholders(self) -> frozenset[int]:
        """The tokens that stand for images; text has none."""
        return frozenset()

    @property
    def compared(self) -> ComparedSamples | None:
        """These samples if a reference's log-probabilities belong to their completions, else None."""
        return None

    @property
    def asked_of_itself(self) -> SampledPrompts | None:
        """These samples if the model in training writes their completions, else None."""
        return None

    @property
    def most_answer_tokens(self) -> int | None:
        """The most tokens of an answer next to any prompt, or None if both share `max_length`."""
        return None

    def tokens(self, number: int) -> list[tuple[Any, Any]]:
        """Returns `(input_ids, targets)` of each piece of a sample, each (length,); empty if no token is learned."""
        return []

    def learned_ends(self, possible: Set[int]) -> frozenset[int]:
        """Returns the tokens that the first samples teach as the end of a text or of a turn.

        The last target is not enough to know: in Harmony's earlier turns it may be a token that ends a channel, and a
        long text is cut anywhere. So only tokens in `possible` count.
        """
        pieces = (piece for number in range(min(len(self), SAMPLES_LOOKED_AT)) for piece in self.tokens(number))
        return frozenset({int(ids[targets.nonzero()[0][-1]]) for ids, targets in pieces if targets.any()} & possible)

    def documents(self, number: int) -> list[list[int]]:
        """Returns the token ids of each piece of a sample."""
        return [ids.tolist() for ids, _ in self.tokens(number)]

    def prompts(self, number: int) -> Iterator[RowPrompt]:
        """Yields the prompts of a sample that a model can answer, with their answers; a text to classify has none."""
        return iter(())

    def few(self, tokens: int) -> Batch | None:
        """Returns a micro-batch of one row of at most `tokens` tokens to try a model on, or None if none can be made.

        A source and its target have none: the checks that try parts of a row are for one row of tokens.
        """
        return None


class Rows:
    """The rows of several sources under one numbering."""

    def __init__(self, sources: list[Documents]) -> None:
        self.sources = sources
        self.starts = np.cumsum([0, *(len(source.table) for source in sources)]).tolist()

    def __len__(self) -> int:
        return int(self.starts[-1])

    def where(self, row: int) -> tuple[Documents, int]:
        """Returns the source of a row, and its number there."""
        # bisect_right, because a source without rows starts at the same row as the next one.
        source = bisect.bisect_right(self.starts, row) - 1
        return self.sources[source], row - self.starts[source]

    def column(self, name: str) -> Any:
        """Returns a column of numbers over all rows, (rows,)."""
        return np.concatenate([source.column(name) for source in self.sources])

    def problems(self) -> dict[int, str]:
        """See `Documents.problems`."""
        return self._by_row(Documents.problems)

    def notes(self) -> dict[int, list[str]]:
        """See `Documents.notes`."""
        return self._by_row(Documents.notes)

    def _by_row(self, read: Callable[[Documents], dict[int, T]]) -> dict[int, T]:
        each = zip(self.sources, self.starts, strict=False)
        return {start + row: value for source, start in each for row, value in read(source).items()}

    def values(self, name: str) -> list[Any]:
        """Returns a column of other values over all rows."""
        return [value for source in self.sources for value in source.table.column(name).to_pylist()]

    def value(self, name: str, row: int) -> Any:
        """Returns the value of one row in a column."""
        source, number = self.where(row)
        return source.table.column(name)[number].as_py()

    def told_as(self, names: Sequence[str]) -> Any:
        """Returns the number of each row's source among these names, (rows,), int64; -1 if it has none of them."""
        numbers = [-1 if source.told_as is None else names.index(source.told_as) for source in self.sources]
        return np.repeat(np.array(numbers, dtype=np.int64), np.diff(self.starts))

    def tokens(self, row: int, start: int = 0, stop: int | None = None) -> tuple[Any, Any]:
        """See `Documents.tokens`."""
        source, number = self.where(row)
        return source.tokens(number, start, stop)

    def turns(self) -> Turns:
        """See `Documents.turns`."""
        of_each = zip(self.starts, self.sources, strict=False)
        return {start + row: ends for start, source in of_each for row, ends in source.turns().items()}

    def images(self, row: int, start: int | None = None) -> list[tuple[dict[str, Any], str]]:
        """See `Documents.images`."""
        source, number = self.where(row)
        return source.images(number, start)

    def cached_in(self, row: int) -> Path | None:
        """Returns the folder in the cache that holds a row's tokens; None for a streamed row, which is in no cache."""
        return self.where(row)[0].folder

    @property
    def have_images(self) -> bool:
        """Whether rows may have images."""
        return any("pictures" in source.table.column_names for source in self.sources)

    def name(self, row: int) -> str:
        """See `Documents.row_name`."""
        source, number = self.where(row)
        return source.row_name(number)


@dataclass(frozen=True)
class TextSamples(Samples):
    """For causal LM: `input_ids`, `labels` and `position_ids`, each (B, T), and `lengths` (B,), without padding.

    Pieces that share a sample follow each other; positions restart with each, by which transformers keeps
    attention inside them. The rest of a sample is padding, which continues the last piece's positions and
    has no targets: causal attention never looks ahead to it, so no attention mask is needed.

    Attributes:
        rows: the rows that hold the tokens of pieces.
        pieces: in the order of their samples.
        ends: the number after the last piece of each sample.
        max_length: T if samples are packed; otherwise T is that of the longest row of a batch.
        packed: whether pieces share samples.
        pad_id: token of padding.
        source_of: the number of each row's named source, (rows,), -1 for none; None if batches have no `sources`.
    """

    rows: Rows
    pieces: Pieces
    ends: Sequence[int]
    max_length: int
    packed: bool
    pad_id: int
    source_of: Any = field(default=None, kw_only=True)

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def is_packed(self) -> bool:
        return self.packed

    @property
    def continues_text(self) -> bool:
        return True

    def batch(self, numbers: Sequence[int], seen: Sequence[Sequence[Sequence[Any]]] | None = None) -> Batch:
        """Returns the samples of these numbers, each tensor (B, ...).

        Args:
            seen: images of each piece of each sample, in the sizes of the rows' own; None: the rows' own.
        """
        samples = [self.tokens(number) for number in numbers]
        batch = self.tensors(samples, [self.seen(number) for number in numbers] if seen is None else seen)
        if self.source_of is not None:
            batch["sources"] = self._source_numbers(numbers, samples, batch["input_ids"])
        return batch

    def tensors(self, samples: list[list[tuple[Any, Any]]], seen: Sequence[Sequence[Sequence[Any]]]) -> Batch:
        """Returns a batch of samples, given `(input_ids, targets)` and the images of each of their pieces."""
        return batch_of(samples, self.max_length, self.packed, self.pad_id)

    def _source_numbers(
        self, numbers: Sequence[int], samples: list[list[tuple[Any, Any]]], ids: torch.Tensor
    ) -> torch.Tensor:
        """Returns the number of each token's source, (B, T), int64; -1 for none, and for padding."""
        sources = torch.full_like(ids, -1)
        for i, (number, pieces) in enumerate(zip(numbers, samples, strict=True)):
            of_pieces = torch.from_numpy(self.source_of[self.rows_of(number)])
            owners = torch.repeat_interleave(of_pieces, torch.tensor([len(piece) for piece, _ in pieces]))
            sources[i, : len(owners)] = owners
        return sources

    def rows_of(self, number: int) -> list[int]:
        """Returns the rows whose pieces are in a sample."""
        first = self.ends[number - 1] if number else 0
        return self.pieces.row[first : self.ends[number]].tolist()  # type: ignore[no-any-return]

    def places(self, number: int) -> list[tuple[int, int, int | None]]:
        """Returns row, first token and end of each piece of a sample; no end is the row's."""
        first = self.ends[number - 1] if number else 0
        return [self.pieces.place(i) for i in range(first, self.ends[number])]

    def tokens(self, number: int) -> list[tuple[Any, Any]]:
        return [self.rows.tokens(*place) for place in self.places(number)]

    def asked(self, number: int) -> Iterator[tuple[tuple[Any, Any], list[Any]]]:
        """Yields the pieces whose answers the model should write, with their images; of a pair, the chosen one."""
        return zip(self.tokens(number), self.seen(number), strict=True)

    def seen(self, number: int) -> list[list[Any]]:
        """Returns the images of each piece of a sample; text has none."""
        return [[] for _ in self.places(number)]

    def prompts(self, number: int) -> Iterator[RowPrompt]:
        """Yields the prompts of a sample, but those in which an image follows the prompt."""
        for (ids, targets), images in self.asked(number):
            prompt = prompt_of(ids, targets)
            if prompt is not None and self.placeholders.isdisjoint(map(int, ids[len(prompt.asked) :])):
                yield replace(prompt, images=tuple(images))

    def lengths(self) -> Any:
        return self.pieces.lengths()

    def few(self, tokens: int) -> Batch:
        """Returns a micro-batch of one row of at most `tokens` tokens, (1, T), to try a model on.

        It holds two documents, of unequal length, if documents share rows.
        """
        ids = [token for document in self.documents(0) for token in document][:tokens]
        cut = len(ids) // 3 if self.packed else 0
        pieces = [piece for piece in (ids[:cut], ids[cut:]) if piece]
        return stack([sample_of([(piece, [True] * len(piece)) for piece in pieces], len(ids), self.pad_id)])


def batch_of(samples: list[list[tuple[Any, Any]]], max_length: int, packed: bool, pad_id: int) -> Batch:
    """Returns a batch (B, T) of samples, each `(input_ids, targets)` of its pieces."""
    longest = max(sum(len(ids) for ids, _ in sample) for sample in samples)
    length = max_length if packed else padded_length(longest, max_length)
    return stack([sample_of(sample, length, pad_id) for sample in samples])


def padded_length(longest: int, max_length: int) -> int:
    """Returns the tokens of each row of a padded batch."""
    return min(-(-longest // MULTIPLE) * MULTIPLE, max_length)


def sample_of(pieces: list[tuple[Any, Any]], length: int, pad_id: int) -> dict[str, Any]:
    """Returns one sample of T = `length` tokens: arrays (T,), and `lengths` as a number.

    Args:
        pieces: `(input_ids, targets)` of each piece.
    """
    input_ids = np.full(length, pad_id, dtype=np.int64)
    labels = np.full(length, IGNORED, dtype=np.int64)
    position_ids = np.arange(length, dtype=np.int64)
    end = 0
    for ids, targets in pieces:
        start, end = end, end + len(ids)
        input_ids[start:end] = ids
        labels[start:end] = np.where(targets, ids, IGNORED)
        labels[start] = IGNORED  # nothing precedes it
        position_ids[start:] = np.arange(length - start)
    return {"input_ids": input_ids, "labels": labels, "position_ids": position_ids, "lengths": np.int64(end)}


def stack(samples: list[dict[str, Any]]) -> Batch:
    """Stacks samples of equal length (T,) as a batch (B, T)."""
    return {name: torch.from_numpy(np.stack([sample[name] for sample in samples])) for name in samples[0]}


@dataclass(frozen=True)
class ComparedSamples(TextSamples):
    """Samples of completions that are compared with what a reference model makes of them.

    Attributes:
        reference: two log-probabilities of each row, (rows, 2), or None.
    """

    reference: Any = field(default=None, kw_only=True)

    @property
    def compared(self) -> ComparedSamples:
        return self

    def with_reference(self, reference: Any) -> Self:
        """Returns the samples with these log-probabilities, (rows, 2)."""
        return replace(self, reference=reference)

    def references(self, rows: list[int]) -> torch.Tensor:
        """Returns the log-probabilities of these R rows, (R, 2); NaN without a reference."""
        if self.reference is None:
            return torch.full((len(rows), 2), math.nan)
        return torch.from_numpy(self.reference[rows])


def last_tokens_of(pieces: list[tuple[tuple[Any, Any], int]], pad_id: int) -> Batch:
    """Returns a row (1, T) of the last tokens of pieces, as many as each entry says; targets are at the end."""
    short = [(ids[-tokens:], targets[-tokens:]) for (ids, targets), tokens in pieces]
    batch = stack([sample_of(short, sum(len(ids) for ids, _ in short), pad_id)])
    return {**batch, "segments": segments_of([short], batch["input_ids"])}


def segments_of(samples: list[list[tuple[Any, Any]]], input_ids: torch.Tensor) -> torch.Tensor:
    """Returns the number of each token's piece, (B, T), counted over all samples; -1 for padding.

    Args:
        samples: `(input_ids, targets)` of the pieces of each sample.
        input_ids: (B, T), int64.
    """
    segments = torch.full_like(input_ids, -1)
    first = 0
    for i, pieces in enumerate(samples):
        lengths = torch.tensor([len(ids) for ids, _ in pieces])
        owners = torch.repeat_interleave(torch.arange(first, first + len(pieces)), lengths)
        segments[i, : len(owners)] = owners
        first += len(pieces)
    return segments


@dataclass(frozen=True)
class RowSamples(Samples):
    """Samples of a row each, which are padded.

    Attributes:
        rows: the rows that hold the tokens.
        numbers: numbers of the rows that are samples.
        max_length: the most tokens of a row.
        pad_id: token of padding.
    """

    rows: Rows
    numbers: Any
    max_length: int
    pad_id: int

    def __len__(self) -> int:
        return len(self.numbers)

    def row(self, number: int) -> tuple[Any, Any]:
        """Returns `input_ids` and `targets` of a sample's row, each (length,)."""
        return self.rows.tokens(int(self.numbers[number]))

    def rows_of(self, number: int) -> list[int]:
        """Returns the number of a sample's row."""
        return [int(self.numbers[number])]

    def lengths(self) -> Any:
        return self.rows.column("length")[self.numbers].astype(np.int64)


def padded(rows: Sequence[Any], pad_id: int, max_length: int) -> Batch:
    """Returns `input_ids` and `attention_mask`, (B, T), and `lengths`, (B,), of rows of tokens."""
    ids, lengths = filled_up(rows, pad_id, max_length)
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "lengths": lengths}


def filled_up(rows: Sequence[Any], filling: int, max_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pads rows of tokens to one tensor (B, T), int64, and returns it with their lengths (B,)."""
    lengths = torch.tensor([len(row) for row in rows])
    whole = torch.full((len(rows), padded_length(int(lengths.max()), max_length)), filling)
    for i, row in enumerate(rows):
        whole[i, : len(row)] = torch.from_numpy(np.asarray(row, dtype=np.int64))
    return whole, lengths
