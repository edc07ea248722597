"""Samples: rows of tokens as a model takes them, put together when they are asked for."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from toolkit.data.documents import Documents
from toolkit.data.packing import Pieces
from toolkit.objectives.specs.batches import KL_PREFIX

IGNORED = -100
"""The label of a token that is no target; torch's cross-entropy skips it."""

MULTIPLE = 8
"""Padded batches are as long as their longest row, rounded up to a multiple of it (tokens)."""

Batch = dict[str, torch.Tensor]


class Samples(Protocol):
    """A data set of samples."""

    def __len__(self) -> int: ...

    def batch(self, numbers: Sequence[int]) -> Batch:
        """The samples of these numbers, each tensor (B, ...)."""


class TokenRows(Protocol):
    """Rows of tokens."""

    def __len__(self) -> int: ...

    def tokens(self, row: int, start: int = 0, stop: int | None = None) -> tuple[Any, Any]:
        """`input_ids` and `targets` of a part of a row, each (length,)."""

    def ends(self, row: int) -> list[int]:
        """One after the last token of each sample of a row: of each answer, with `data.targets: each_turn`."""


class Rows:
    """The rows of several sources under one numbering."""

    def __init__(self, sources: list[Documents]) -> None:
        self.sources = sources
        self.starts = np.cumsum([0, *(len(source.table) for source in sources)]).tolist()

    def __len__(self) -> int:
        return int(self.starts[-1])

    def where(self, row: int) -> tuple[Documents, int]:
        """The source of a row, and its number there."""
        # To the right: a source without rows starts where the next one does.
        source = bisect.bisect_right(self.starts, row) - 1
        return self.sources[source], row - self.starts[source]

    def column(self, name: str) -> Any:
        """A column of numbers over all rows."""
        return np.concatenate([source.column(name) for source in self.sources])

    def labels(self) -> list[str | None]:
        """The class of each row; None where it has none."""
        return [label for source in self.sources for label in source.table.column("label").to_pylist()]

    def tags(self) -> list[list[str]]:
        """The tags of each row's words, by its targets; empty where words are not tagged."""
        return [tags for source in self.sources for tags in source.table.column("tags").to_pylist()]

    def told_as(self, names: Sequence[str]) -> Any:
        """The number of each row's source among these names, (rows,); -1 if it has none of them."""
        numbers = [-1 if source.told_as is None else names.index(source.told_as) for source in self.sources]
        return np.repeat(np.array(numbers, dtype=np.int64), np.diff(self.starts))

    def tokens(self, row: int, start: int = 0, stop: int | None = None) -> tuple[Any, Any]:
        """See `Documents.tokens`."""
        source, number = self.where(row)
        return source.tokens(number, start, stop)

    def ends(self, row: int) -> list[int]:
        """See `Documents.ends`."""
        source, number = self.where(row)
        return source.ends(number)

    def pictures(self, row: int) -> list[tuple[dict[str, Any], str]]:
        """See `Documents.pictures`."""
        source, number = self.where(row)
        return source.pictures(number)

    @property
    def have_pictures(self) -> bool:
        """Whether rows may have pictures."""
        return any("pictures" in source.table.column_names for source in self.sources)

    def name(self, row: int) -> str:
        """See `Documents.row_name`."""
        source, number = self.where(row)
        return source.row_name(number)


@dataclass(frozen=True)
class TextSamples:
    """For causal LM: `input_ids`, `labels` and `position_ids`, each (B, T), and `lengths` (B,), without padding.

    Pieces that share a sample follow each other; positions restart with each, by which transformers keeps
    attention inside them. What is left of a sample is padding, which continues the last piece's positions
    and is no target: causal attention never looks ahead to it, so no attention mask is needed.

    Attributes:
        rows: where the tokens of a piece are.
        pieces: in the order of their samples.
        ends: one after the last piece of each sample.
        max_length: T, where samples are packed; otherwise T is that of the longest row of a batch.
        packed: whether pieces share samples.
        pad_id: of padding.
        source_of: the number of each row's named source, (rows,), -1 for none; None if the batch does not say.
    """

    rows: TokenRows
    pieces: Pieces
    ends: Sequence[int]
    max_length: int
    packed: bool
    pad_id: int
    source_of: Any = field(default=None, kw_only=True)

    def __len__(self) -> int:
        return len(self.ends)

    def documents(self, number: int) -> list[list[int]]:
        """Token ids of each piece of a sample."""
        return [ids.tolist() for ids, _ in self.tokens(number)]

    def batch(self, numbers: Sequence[int]) -> Batch:
        samples = [self.tokens(number) for number in numbers]
        batch = batch_of(samples, self.max_length, self.packed, self.pad_id)
        if self.source_of is not None:
            batch["sources"] = self._sources(numbers, samples, batch["input_ids"])
        return batch

    def _sources(self, numbers: Sequence[int], samples: list[list[tuple[Any, Any]]], ids: torch.Tensor) -> torch.Tensor:
        """The number of the source that each token is of, (B, T); -1 for none, and for padding."""
        sources = torch.full_like(ids, -1)
        for i, (number, pieces) in enumerate(zip(numbers, samples, strict=True)):
            of_pieces = torch.from_numpy(self.source_of[self.rows_of(number)])
            owners = torch.repeat_interleave(of_pieces, torch.tensor([len(piece) for piece, _ in pieces]))
            sources[i, : len(owners)] = owners
        return sources

    def rows_of(self, number: int) -> list[int]:
        """Rows whose pieces are in a sample."""
        first = self.ends[number - 1] if number else 0
        return self.pieces.row[first : self.ends[number]].tolist()  # type: ignore[no-any-return]

    def tokens(self, number: int) -> list[tuple[Any, Any]]:
        """`(input_ids, targets)` of each piece of a sample."""
        first = self.ends[number - 1] if number else 0
        return [self.rows.tokens(*self.pieces.place(i)) for i in range(first, self.ends[number])]

    def few(self, tokens: int) -> Batch:
        """A micro-batch of one row of at most so many tokens, to try a model on.

        It holds two documents, of unequal length, where documents share rows.
        """
        ids = [token for document in self.documents(0) for token in document][:tokens]
        cut = len(ids) // 3 if self.packed else 0
        pieces = [piece for piece in (ids[:cut], ids[cut:]) if piece]
        return stack([sample_of([(piece, [True] * len(piece)) for piece in pieces], len(ids), self.pad_id)])


def batch_of(samples: list[list[tuple[Any, Any]]], max_length: int, packed: bool, pad_id: int) -> Batch:
    """A batch of samples, each `(input_ids, targets)` of its pieces."""
    longest = max(sum(len(ids) for ids, _ in sample) for sample in samples)
    length = max_length if packed else padded_length(longest, max_length)
    return stack([sample_of(sample, length, pad_id) for sample in samples])


def padded_length(longest: int, max_length: int) -> int:
    """Tokens of each row of a padded batch."""
    return min(-(-longest // MULTIPLE) * MULTIPLE, max_length)


def sample_of(pieces: list[tuple[Any, Any]], length: int, pad_id: int) -> dict[str, Any]:
    """One sample of `length` tokens from `(input_ids, targets)` of its pieces: arrays (T,), `lengths` a number."""
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
    """Samples of equal length as a batch."""
    return {name: torch.from_numpy(np.stack([sample[name] for sample in samples])) for name in samples[0]}


@dataclass(frozen=True)
class PairSamples(TextSamples):
    """For preferences: as `TextSamples`, both completions of a pair in one sample, and `segments` (B, T).

    A segment is a completion with its prompt: of the batch's i-th pair 2 i is the chosen one, 2 i + 1 the
    rejected one; padding is -1. `reference` is (P, 2), for P pairs; NaN where there is none. `margin` is (P,).

    Attributes:
        splits: tokens of the chosen completion of each row.
        reference: log-probabilities of both completions of each row, (rows, 2); None: there are none.
        margins: by how much the chosen completion of each row is better; None: the batch does not say.
    """

    splits: Any = None
    reference: Any = None
    margins: Any = None

    def batch(self, numbers: Sequence[int]) -> Batch:
        batch = super().batch(numbers)
        batch["segments"] = segments_of([self.tokens(number) for number in numbers], batch["input_ids"])
        rows = [row for number in numbers for row in self.rows_of(number)]
        unknown = torch.full((len(rows), 2), math.nan)
        batch["reference"] = unknown if self.reference is None else torch.from_numpy(self.reference[rows])
        if self.margins is not None:
            batch["margin"] = torch.from_numpy(self.margins[rows])
        return batch

    def tokens(self, number: int) -> list[tuple[Any, Any]]:
        """`(input_ids, targets)` of the chosen and the rejected completion of each pair."""
        parts = []
        for row in self.rows_of(number):
            # Two pieces, so that positions restart at the second: the rejected side does not see the chosen one.
            (ids, targets), split = self.rows.tokens(row), int(self.splits[row])
            parts += [(ids[:split], targets[:split]), (ids[split:], targets[split:])]
        return parts

    def few(self, tokens: int) -> Batch:
        """See `TextSamples.few`; the ends of both completions of a pair."""
        chosen, rejected = self.tokens(0)[:2]
        batch = _ends_of([(chosen, tokens // 3), (rejected, tokens - tokens // 3)], self.pad_id)
        return {**batch, "reference": torch.zeros(1, 2), "margin": torch.zeros(1)}


@dataclass(frozen=True)
class JudgedSamples(TextSamples):
    """For KTO: as `TextSamples`, with `segments` (B, T), the number of the row in the batch; padding is -1.

    `good` (R,) are the judgements of its R rows. What begins with `kl_` is the same for the prompts with other
    completions: within a sample each prompt has the completion of the row before it, the first that of the last, so
    that both have equally many tokens. A row alone in its sample has the completion of the next sample's first row,
    cut to what is left of `max_length`. None of this depends on ranks, micro-batches or the order of samples.
    `reference` is (R, 2): of a prompt with its own and with the other completion; NaN where there is none.

    Attributes:
        good: whether the completion of each row is.
        reference: log-probabilities of each row, (rows, 2); None: there are none.
    """

    good: Any = None
    reference: Any = None

    def batch(self, numbers: Sequence[int]) -> Batch:
        own, other = (self._batch([tokens(number) for number in numbers]) for tokens in (self.tokens, self.mismatched))
        rows = [row for number in numbers for row in self.rows_of(number)]
        unknown = torch.full((len(rows), 2), math.nan)
        return {
            **own,
            **{f"{KL_PREFIX}{name}": tensor for name, tensor in other.items()},
            "good": torch.from_numpy(self.good[rows]),
            "reference": unknown if self.reference is None else torch.from_numpy(self.reference[rows]),
        }

    def _batch(self, samples: list[list[tuple[Any, Any]]]) -> Batch:
        batch = batch_of(samples, self.max_length, self.packed, self.pad_id)
        return {**batch, "segments": segments_of(samples, batch["input_ids"])}

    def mismatched(self, number: int) -> list[tuple[Any, Any]]:
        """`(input_ids, targets)` of each prompt of a sample with the completion of another row."""
        own = self.tokens(number)
        others = [own[-1], *own[:-1]] if len(own) > 1 else [self.tokens((number + 1) % len(self))[0]]
        return [self._joined(*pair) for pair in zip(own, others, strict=True)]

    def _joined(self, own: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
        starts = [int(np.argmax(targets)) for _, targets in (own, other)]
        parts = [(mine[: starts[0]], theirs[starts[1] :]) for mine, theirs in zip(own, other, strict=True)]
        ids, targets = (np.concatenate(part)[: self.max_length] for part in parts)
        return ids, targets

    def few(self, tokens: int) -> Batch:
        """See `TextSamples.few`; the end of a row, with its own and with another completion."""
        own, other = (_ends_of([(row, tokens)], self.pad_id) for row in (self.tokens(0)[0], self.mismatched(0)[0]))
        others = {f"{KL_PREFIX}{name}": tensor for name, tensor in other.items()}
        return {**own, **others, "good": torch.ones(1, dtype=torch.bool), "reference": torch.zeros(1, 2)}


def _ends_of(pieces: list[tuple[tuple[Any, Any], int]], pad_id: int) -> Batch:
    """A row of the last tokens of pieces, so many of each: targets are at the end."""
    short = [(ids[-tokens:], targets[-tokens:]) for (ids, targets), tokens in pieces]
    batch = stack([sample_of(short, sum(len(ids) for ids, _ in short), pad_id)])
    return {**batch, "segments": segments_of([short], batch["input_ids"])}


def segments_of(samples: list[list[tuple[Any, Any]]], input_ids: torch.Tensor) -> torch.Tensor:
    """The number of the piece that each token is in, (B, T), counted over all samples; -1 for padding."""
    segments = torch.full_like(input_ids, -1)
    first = 0
    for i, pieces in enumerate(samples):
        lengths = torch.tensor([len(ids) for ids, _ in pieces])
        owners = torch.repeat_interleave(torch.arange(first, first + len(pieces)), lengths)
        segments[i, : len(owners)] = owners
        first += len(pieces)
    return segments


@dataclass(frozen=True)
class LabelledSamples:
    """For classification: `input_ids`, `attention_mask`, `token_type_ids`, each (B, T), and `labels`, `lengths` (B,).

    Token types that are all 0 are left out: most models assume 0 then, and GPT-2 would add the embedding of word 0.

    Attributes:
        rows: where the tokens are.
        numbers: of the rows that are samples.
        labels: of each of these.
        max_length: of a row (tokens).
        pad_id: of padding.
    """

    rows: Rows
    numbers: Any
    labels: Any
    max_length: int
    pad_id: int

    def __len__(self) -> int:
        return len(self.numbers)

    def batch(self, numbers: Sequence[int]) -> Batch:
        tokens = [self.rows.tokens(int(self.numbers[number])) for number in numbers]
        return {**self._padded(tokens), "labels": torch.from_numpy(np.asarray(self.labels)[list(numbers)])}

    def few(self, tokens: int) -> Batch:
        """A micro-batch of one row of at most so many tokens and its padding, to try a model on."""
        batch = {name: tensor[:, :tokens] if tensor.dim() == 2 else tensor for name, tensor in self.batch([0]).items()}
        padded = [name for name in batch if name in ("attention_mask", "token_type_ids")]
        cut = {name: F.pad(batch[name], (0, MULTIPLE)) for name in padded}
        ids = F.pad(batch["input_ids"], (0, MULTIPLE), value=self.pad_id)
        labels = batch["labels"]
        if labels.dim() == 2:
            labels = F.pad(labels, (0, MULTIPLE), value=IGNORED)
        return {**cut, "input_ids": ids, "labels": labels, "lengths": batch["lengths"].clamp_max(tokens)}

    def _padded(self, tokens: list[tuple[Any, Any]]) -> Batch:
        """All but the labels of a batch whose rows have these ids and token types."""
        shape = (len(tokens), padded_length(max(len(ids) for ids, _ in tokens), self.max_length))
        batch = {
            "input_ids": torch.full(shape, self.pad_id),
            "attention_mask": torch.zeros(shape, dtype=torch.long),
            "token_type_ids": torch.zeros(shape, dtype=torch.long),
        }
        for i, (ids, kinds) in enumerate(tokens):
            batch["input_ids"][i, : len(ids)] = torch.from_numpy(ids.astype(np.int64))
            batch["attention_mask"][i, : len(ids)] = 1
            batch["token_type_ids"][i, : len(ids)] = torch.from_numpy(kinds.astype(np.int64))
        if not batch["token_type_ids"].any():
            del batch["token_type_ids"]
        return {**batch, "lengths": torch.tensor([len(ids) for ids, _ in tokens])}


@dataclass(frozen=True)
class SourceTargetSamples:
    """For sequence to sequence: `input_ids` and `attention_mask` of sources (B, S), and `labels` (B, T) of targets.

    Labels are IGNORED in padding; `lengths` and `target_lengths` (B,) are without it.

    Attributes:
        rows: where the tokens are: a source's, which are no targets, and then its target's.
        numbers: of the rows that are samples.
        max_length: of a source (tokens).
        max_target_length: of a target (tokens).
        pad_id: of padding.
    """

    rows: Rows
    numbers: Any
    max_length: int
    max_target_length: int
    pad_id: int

    def __len__(self) -> int:
        return len(self.numbers)

    def parts(self, number: int) -> tuple[Any, Any]:
        """The tokens of a sample's source, and of its target."""
        ids, is_target = self.rows.tokens(int(self.numbers[number]))
        return ids[~is_target], ids[is_target]

    def batch(self, numbers: Sequence[int]) -> Batch:
        sources, targets = zip(*(self.parts(number) for number in numbers), strict=True)
        input_ids, lengths = filled_up(sources, self.pad_id, self.max_length)
        labels, target_lengths = filled_up(targets, IGNORED, self.max_target_length)
        mask = (torch.arange(input_ids.shape[1]) < lengths[:, None]).long()
        return {
            "input_ids": input_ids,
            "attention_mask": mask,
            "labels": labels,
            "lengths": lengths,
            "target_lengths": target_lengths,
        }


def filled_up(rows: Sequence[Any], filling: int, max_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of tokens as one tensor (B, T), and their lengths (B,)."""
    lengths = torch.tensor([len(row) for row in rows])
    whole = torch.full((len(rows), padded_length(int(lengths.max()), max_length)), filling)
    for i, row in enumerate(rows):
        whole[i, : len(row)] = torch.from_numpy(np.asarray(row, dtype=np.int64))
    return whole, lengths


@dataclass(frozen=True)
class TaggedSamples(LabelledSamples):
    """For words with tags: as `LabelledSamples`, with `labels` (B, T), IGNORED but for the first token of each word.

    Attributes:
        labels: of each sample, the numbers of its words' tags.
    """

    def batch(self, numbers: Sequence[int]) -> Batch:
        tokens = [self.rows.tokens(int(self.numbers[number])) for number in numbers]
        batch = self._padded([(ids, np.zeros_like(ids)) for ids, _ in tokens])
        labels = torch.full_like(batch["input_ids"], IGNORED)
        for i, (number, (_, firsts)) in enumerate(zip(numbers, tokens, strict=True)):
            labels[i, np.flatnonzero(firsts)] = torch.tensor(self.labels[number], dtype=torch.long)
        return {**batch, "labels": labels}
