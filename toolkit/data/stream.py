"""Makes samples while training, for data larger than the disk: reads, tokenises and packs rows a window at a time.

Every rank reads all rows and keeps its share of the samples, so that the global order is the same for any
number of ranks, and an interrupted run resumes at the same sample.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from toolkit.data import report as reports
from toolkit.data.documents.encode import Document, Encoder, ends_of, notes_in, records_of
from toolkit.data.documents.processes import image_root
from toolkit.data.images.images import Images
from toolkit.data.kinds.kind import TOO_LONG, RowKind
from toolkit.data.layouts.layout import Layout
from toolkit.data.report import ROWS_NAMED, DataReport, Found, SplitReport
from toolkit.data.rows.readers import Row, Shard
from toolkit.data.rows.sources import Source, rows_of_shards
from toolkit.data.samples.image_samples import ImageSamples
from toolkit.data.samples.loader import ahead, first_positions
from toolkit.data.samples.packing import Ints, by_sample, samples_of
from toolkit.data.samples.samples import Batch, Samples, SeenRows, TextSamples
from toolkit.data.samples.sequence_parts import WHOLE, Part
from toolkit.data.selection import judge, named_reasons, nothing_left, require_few_dropped, require_few_long
from toolkit.errors import DataError

WINDOW_SAMPLES = 256
"""Rows are read until their tokens fill this many samples; then these are packed and shuffled."""

BATCH_ROWS = 16
"""Number of rows that are read and tokenised at a time."""

ROWS_JUDGED = 1000
"""Rows of a window after which too large a share of bad ones is an error before the window is full."""

ROWS_MEASURED = 10_000
"""Number of rows whose lengths are kept for the report."""

State = dict[str, Any]
"""The beginning of a window as plain JSON: its number, the samples before it, and each source's pass and row."""


@dataclass
class StreamCounts:
    """What became of the rows so far.

    Attributes:
        dropped, noted: reason of dropping, and what is not learned of kept rows -> how many, and the first of them.
        long: rows longer than the limit, even if they were kept.
        lengths, targets: tokens and target tokens of the first usable rows.
        also_held_out: digests of rows that are evaluated, too.
    """

    read: int = 0
    kept: int = 0
    long: int = 0
    cut_tokens: int = 0
    tokens: int = 0
    repeated_tokens: int = 0
    target_tokens: int = 0
    dropped: dict[str, Found] = field(default_factory=dict)
    noted: dict[str, Found] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    longest: tuple[int, str] = (0, "")
    also_held_out: set[int] = field(default_factory=set)

    def add(self, rows: SeenRows, kept: Ints, dropped: dict[int, str], long: Ints) -> None:
        """Counts rows; see `judge`."""
        self.read += len(rows)
        self.kept += len(kept)
        self.long += len(long)
        _add(self.dropped, named_reasons(rows, dropped))
        _add(self.noted, reports.notes(rows, kept))
        lengths, targets = rows.column("length")[kept], rows.column("num_targets")[kept]
        self.tokens += int(lengths.sum())
        self.target_tokens += int(targets.sum())
        self.repeated_tokens += reports.repeated_tokens(rows, kept)
        room = ROWS_MEASURED - len(self.lengths)
        self.lengths += lengths[:room].tolist()
        self.targets += targets[:room].tolist()
        sizes = zip(lengths.tolist(), map(rows.name, kept.tolist()), strict=True)
        self.longest = max([self.longest, *sizes])

    @property
    def good(self) -> int:
        """Number of valid rows, too long ones included."""
        return self.kept + (self.dropped[TOO_LONG].count if TOO_LONG in self.dropped else 0)


def _add(found: dict[str, Found], more: Mapping[str, Found]) -> None:
    """Adds rows to the earlier ones; the first ones keep their names, each once."""
    for what, new in more.items():
        old = found.get(what, Found(count=0, rows=[]))
        names = list(dict.fromkeys([*old.rows, *new.rows]))[:ROWS_NAMED]
        found[what] = Found(count=old.count + new.count, rows=names)


@dataclass(frozen=True)
class StreamedSource:
    """A source, and how its rows are read and encoded."""

    source: Source
    layout: Layout
    encoder: Encoder


class WindowRows:
    """Documents of a stream as `SeenRows`.

    Args:
        contents: digest -> an image that a row holds itself; None if no images are read.
    """

    def __init__(self, documents: list[Document], contents: dict[str, bytes] | None = None) -> None:
        self.documents = documents
        self.starts = [0]
        self._contents = contents

    def __len__(self) -> int:
        return len(self.documents)

    def column(self, name: str) -> Any:
        """Returns a column of numbers, (rows,)."""
        return np.array([document[name] for document in self.documents], dtype=np.int64)

    def problems(self) -> dict[int, str]:
        """See `SeenRows.problems`."""
        each = enumerate(self.documents)
        return {row: document["problem"] for row, document in each if document["problem"] is not None}

    def notes(self) -> dict[int, list[str]]:
        """See `SeenRows.notes`."""
        return {row: notes_in(note) for row, document in enumerate(self.documents) if (note := document["note"])}

    def tokens(self, row: int, start: int = 0, stop: int | None = None) -> tuple[Any, Any]:
        """Returns `input_ids` and `targets` of a part of a document, each (length,)."""
        document = self.documents[row]
        return document["input_ids"][start:stop], document["targets"][start:stop]

    def turns(self) -> dict[int, list[int]]:
        """See `TokenRows`."""
        return {row: document["ends"] for row, document in enumerate(self.documents) if document.get("ends")}

    @property
    def have_images(self) -> bool:
        return self._contents is not None

    def images(self, row: int, start: int | None = None) -> list[tuple[dict[str, Any], str]]:
        """See `SeenRows.images`; the record of an image that its row holds has it under `content`."""
        document = self.documents[row]
        if self._contents is None or "pictures" not in document:
            return []
        found = records_of(document, start)
        contents = [{} if "path" in record else {"content": self._contents[record["digest"]]} for record in found]
        return [({**record, **held}, document["root"]) for record, held in zip(found, contents, strict=True)]

    def name(self, row: int) -> str:
        """See `SeenRows.name`."""
        return str(self.documents[row]["row"])

    def cached_in(self, row: int) -> None:
        """Returns None: the tokens of a window are in no cache."""


@dataclass(frozen=True)
class Window:
    """Samples of some rows, and the state at their beginning."""

    state: State
    samples: TextSamples


class Stream:
    """Reads sources window by window, without end: a source that ends starts again.

    Args:
        kind: the kind of the rows.
        policy: what happens to rows longer than `data.max_length`: error, drop, truncate or split.
        pad_id: token of padding.
        seed: seed of the order of a window's samples, or None for the order of the rows.
        held_out: digests of the rows that are evaluated, which should not be trained on.
        images: reads the images of the sources that have some, and holds those of a window; None if no source has any.
    """

    def __init__(
        self,
        kind: RowKind,
        sources: list[StreamedSource],
        policy: str,
        pad_id: int,
        seed: int | None,
        held_out: frozenset[int] = frozenset(),
        images: Images | None = None,
    ) -> None:
        self.kind = kind
        self.sources = sources
        self.images = images
        self.policy = policy
        self.max_length = kind.data.max_length
        self.pad_id = pad_id
        self.seed = seed
        self.held_out = held_out
        self.counts = StreamCounts()

    def windows(self, state: State | None = None) -> Iterator[Window]:
        """Yields windows from a window's state on, or from the first row if it is None.

        Raises:
            DataError: if a source cannot be read or has no usable row, or too many rows are too long.
        """
        # Counts restart, because the first window is read once before training, for its checks.
        self.counts = StreamCounts()
        places = state["sources"] if state is not None else [(0, 0, 0)] * len(self.sources)
        cursors = [_Cursor(of.source, *place) for of, place in zip(self.sources, places, strict=True)]
        number, samples_before = (state["window"], state["samples"]) if state is not None else (0, 0)
        while True:
            # Taken before the rows are read: a run interrupted in this window reads it again from its first row.
            begins = {"window": number, "samples": samples_before, "sources": [list(c.place()) for c in cursors]}
            window = Window(begins, self._samples(self._documents(cursors), number))
            yield window
            number += 1
            samples_before += len(window.samples)

    def _documents(self, cursors: list[_Cursor]) -> list[Document]:
        """Returns good documents whose tokens fill a window."""
        kept: list[Document] = []
        tokens = 0
        while tokens < WINDOW_SAMPLES * self.max_length:
            documents = self._read_documents(cursors)
            good = self._judged(documents)
            for row, document in enumerate(documents):
                if (read := cursors[document["source"]].without_good(row in good)) is not None:
                    raise DataError(self._nothing_left(self.sources[document["source"]].source, read))
                if row in good:
                    # As arrays: lists of Python numbers would take a window several times the memory.
                    arrays = {name: np.asarray(document[name]) for name in ("input_ids", "targets")}
                    kept.append({**document, **arrays})
                    total = ends_of(document)[-1]
                    tokens += (
                        total if self.policy == "split" or len(ends_of(document)) > 1 else min(total, self.max_length)
                    )
            if self.counts.read >= ROWS_JUDGED:
                require_few_dropped(self.kind, "data.train", self.counts.read, self.counts.dropped)
        require_few_dropped(self.kind, "data.train", self.counts.read, self.counts.dropped)
        return kept

    def _judged(self, documents: list[Document]) -> set[int]:
        """Counts documents, and returns the numbers of those that can be used."""
        rows, counts = WindowRows(documents, None if self.images is None else {}), self.counts
        kept, dropped, long = judge(self.kind, rows, self.policy)
        counts.add(rows, kept, dropped, long)
        if self.policy == "truncate":
            lengths = samples_of(long, rows.column("length"), rows.turns()).lengths()
            counts.cut_tokens += int(np.maximum(lengths - self.max_length, 0).sum())
        counts.also_held_out |= self.held_out.intersection(rows.column("digest")[kept].tolist())
        # One long row at the beginning is no error.
        if self.policy == "error" and counts.long > 1:
            sizes = [np.array([*counts.lengths, *rows.column("length")[long]])]
            require_few_long(self.kind, rows, "data.train", sizes, counts.good, counts.long)
        return set(kept.tolist())

    def _nothing_left(self, source: Source, num_rows: int) -> str:
        """Returns the error's text if no row of a source can be used."""
        what = f"{source.field}: none of the rows of {source.name!r} ({num_rows:,}) can be used"
        return nothing_left(f"{what}. Of {self.counts.read:,} read: ", self.counts.dropped)

    def _read_documents(self, cursors: list[_Cursor]) -> list[Document]:
        """Returns the next rows in the sources' order, tokenised."""
        drawn: list[tuple[int, str, str, Row]] = []
        for _ in range(BATCH_ROWS):
            number = _next_source(cursors)
            shard, name, row = cursors[number].draw()
            drawn.append((number, self._root_of(number, shard), name, row))
        found: dict[int, Document] = {}
        # A source and folder at a time, because each has its own layout; then back into the order of the draw.
        for number, root in sorted({(number, root) for number, root, _, _ in drawn}):
            mine = [i for i, (*drawn_from, _, _) in enumerate(drawn) if drawn_from == [number, root]]
            encoder = self.sources[number].encoder
            encoder = replace(encoder, image_root=Path(root)) if encoder.images is not None else encoder
            documents = encoder.documents([drawn[i][3] for i in mine], self.sources[number].layout)
            for i, document in zip(mine, documents, strict=True):
                found[i] = {**document, "row": drawn[i][2], "source": number, "root": root}
        return [found[i] for i in range(len(drawn))]

    def _root_of(self, number: int, shard: Shard) -> str:
        """Returns the folder of the images that the rows of a source's shard name; empty if none is read."""
        encoder = self.sources[number].encoder
        return "" if encoder.images is None else str(image_root(shard, encoder.image_root))

    def _samples(self, documents: list[Document], window: int) -> TextSamples:
        rows = WindowRows(documents, self._taken_contents())
        lengths = np.array([document["length"] for document in documents], dtype=np.int64)
        pieces, _ = self.kind.pieces(rows, np.arange(len(documents)), lengths, self.policy)
        sample_of_piece = self.kind.sample_of(pieces)
        if self.seed is not None:
            num_samples = int(sample_of_piece.max()) + 1
            # The seed has the window's number, so that a resumed run shuffles its window the same way.
            mixed_up = hashlib.sha256(f"{self.seed}/{window}".encode()).digest()[:8]
            sample_of_piece = np.random.default_rng(int.from_bytes(mixed_up)).permutation(num_samples)[sample_of_piece]
        in_order, ends = by_sample(pieces, sample_of_piece)
        of = TextSamples if self.images is None else partial(ImageSamples, images=self.images)
        return of(rows, in_order, ends, self.max_length, self.kind.packed, self.pad_id)

    def _taken_contents(self) -> dict[str, bytes] | None:
        """Takes the images that a window's rows hold themselves from the reader, so that it holds a window's alone."""
        if self.images is None or self.images.held is None:
            return None
        contents = dict(self.images.held)
        self.images.held.clear()
        return contents


class _Cursor:
    """The reading position in a source.

    Args:
        passes: number of finished passes through the source.
        row: row of the current pass.
        drawn: number of rows drawn in total.
    """

    def __init__(self, source: Source, passes: int, row: int, drawn: int) -> None:
        self.weight = source.weight
        self.passes = passes
        self._source = source
        self._row = row
        self._drawn = drawn
        self._bad_in_a_row = 0
        self._length: int | None = None  # of a pass, once one is done
        rows = rows_of_shards(source.shards, source.paths)
        self._rows: Iterator[tuple[Shard, str, Row]] = itertools.islice(rows, row, None)
        # One row ahead, so that a pass is known to end when its last row is drawn.
        self._upcoming = next(self._rows, None)
        if self._upcoming is None:
            raise DataError(f"{source.field}: {source.name!r} holds no rows, or fewer than before")

    def place(self) -> tuple[int, int, int]:
        """Returns the position as the constructor takes it."""
        return self.passes, self._row, self._drawn

    def turn(self) -> float:
        """Returns the time of a weighted source's next row: the k-th of weight w at (k + 1/2) / w, see `mixed`."""
        return (self._drawn + 0.5) / (self.weight or 1.0)

    def draw(self) -> tuple[Shard, str, Row]:
        """Returns the next row after its shard and its name; the first row follows the last one."""
        found = self._upcoming
        assert found is not None
        self._row += 1
        self._drawn += 1
        self._upcoming = next(self._rows, None)
        if self._upcoming is None:
            self._begin_again()
        return found

    def without_good(self, good: bool) -> int | None:
        """Counts whether a row could be used, and returns the length of a pass if no row of a whole one could."""
        self._bad_in_a_row = 0 if good else self._bad_in_a_row + 1
        # The length of a pass is not known until it ends, and bad rows may be only its beginning.
        return self._length if self._length is not None and self._bad_in_a_row > self._length else None

    def _begin_again(self) -> None:
        self.passes += 1
        self._length, self._row = self._row, 0
        self._rows = rows_of_shards(self._source.shards, self._source.paths)
        self._upcoming = next(self._rows)


def _next_source(cursors: list[_Cursor]) -> int:
    """Returns the source of the next row: by weight, or one source after the other."""
    if cursors[0].weight is not None:
        return min(range(len(cursors)), key=lambda number: (cursors[number].turn(), number))
    return min(range(len(cursors)), key=lambda number: (cursors[number].passes, number))


class StreamLoader:
    """Yields, per optimizer step, this rank's micro-batches of a stream; see `toolkit.data.samples.loader.TrainLoader`.

    Rank r's m-th micro-batch of step s holds the B samples from s G + (m W + r) B on, as there.
    The next window is made while the one before is trained on. A thread may be steps ahead of training, so
    the states of all windows from the current one on are kept.
    """

    fresh = False

    def __init__(
        self,
        stream: Stream,
        *,
        num_positions: int,
        micro_batch_size: int,
        gradient_accumulation_steps: int,
        rank: int,
        world_size: int,
        part: Part = WHOLE,
    ) -> None:
        self._part = part
        self.stream = stream
        self.num_positions = num_positions
        self._micro_batch_size = micro_batch_size
        self._accumulation = gradient_accumulation_steps
        self._rank = rank
        self._world_size = world_size
        self._start = (0, 0)
        self._states: list[State] = []

    @property
    def samples_per_step(self) -> int:
        """G, the samples of a step over all ranks."""
        return self._micro_batch_size * self._world_size * self._accumulation

    def epoch_at(self, step: int) -> float:
        """Returns the whole passes over the source with the fewest, because a stream's length is not known."""
        state = self.state_at(self.samples_at(step))
        if state is not None:
            del self._states[: self._states.index(state)]  # a run does not go back
        return float(min(passes for passes, _, _ in state["sources"])) if state is not None else 0.0

    def samples_at(self, step: int) -> int:
        """Returns the samples seen by all ranks after `step` optimizer steps."""
        start_step, start = self._start
        return start + (step - start_step) * self.samples_per_step

    def state_at(self, samples: int) -> State | None:
        """Returns the state of the window that holds the next sample after `samples`, for a checkpoint."""
        begun = [state for state in self._states if state["samples"] <= samples]
        return begun[-1] if begun else None

    def resume(self, step: int, samples: int, num_positions: int, state: State | None) -> None:
        """Resumes after `step` optimizer steps at position `samples`, in the window that `state` begins."""
        self._start = (step, samples)
        self.num_positions = num_positions
        self._states = [state] if state is not None else []

    def __iter__(self) -> Iterator[list[Batch]]:
        samples = self._samples()
        for start in range(self._start[1], self.num_positions, self.samples_per_step):
            firsts = first_positions(start, self._micro_batch_size, self._accumulation, self._rank, self._world_size)
            mine = [range(first, first + self._micro_batch_size) for first in firsts]
            taken: dict[int, tuple[TextSamples, int]] = {}
            for position in range(start, start + self.samples_per_step):
                sample = next(samples)
                if any(position in micro_batch for micro_batch in mine):
                    taken[position] = sample
            yield [self._part.of(_micro_batch([taken[p] for p in micro_batch])) for micro_batch in mine]

    def _samples(self) -> Iterator[tuple[TextSamples, int]]:
        """Yields every sample from the start on: the samples of its window, and its number among them."""
        state = self.state_at(self._start[1])
        skip = self._start[1] - (state["samples"] if state is not None else 0)
        for window in ahead(self.stream.windows(state), "stream"):
            # After a resume the state of the first window is known already.
            if all(known["samples"] < window.state["samples"] for known in self._states):
                self._states.append(window.state)
            for number in range(skip, len(window.samples)):
                yield window.samples, number
            skip = max(0, skip - len(window.samples))


def _micro_batch(taken: list[tuple[TextSamples, int]]) -> Batch:
    """Returns a batch of samples, which may be of several windows."""
    tokens = [samples.tokens(number) for samples, number in taken]
    return taken[0][0].tensors(tokens, [samples.seen(number) for samples, number in taken])


def describe_stream(
    report: DataReport, stream: Stream, samples: Samples, tokenizer: PreTrainedTokenizerBase
) -> DataReport:
    """Returns the data report with the rows to train on, as far as they have been read.

    Args:
        samples: samples of the first window.
    """
    counts = stream.counts
    used = int(samples.lengths().sum())
    described = reports.describe_lengths(np.array(counts.lengths), np.array(counts.targets))
    train = SplitReport(
        read=counts.read,
        kept=counts.kept,
        num_dropped=counts.read - counts.kept,
        dropped=counts.dropped,
        long=Found(count=counts.long, rows=[], cut_tokens=counts.cut_tokens),
        **({"noted": counts.noted} if counts.noted else {}),
        **({"repeated_tokens": counts.repeated_tokens} if counts.repeated_tokens else {}),
        **{**described, "tokens": counts.tokens, "target_tokens": counts.target_tokens},
        longest={"row": counts.longest[1], "tokens": counts.longest[0]},
        samples=len(samples),
        fill_rate=used / (len(samples) * stream.max_length) if stream.kind.packed else None,
    )
    rows: Any = samples.rows  # `WindowRows` have what an example of text needs of `Rows`
    # At the end of a run the report has them already.
    shown = np.arange(min(reports.EXAMPLES_OF_WINDOW, len(rows)) if report.train is None else 0)
    examples = reports.examples(stream.kind, tokenizer, rows, shown, "train", stream.images) if len(shown) else []
    splits = {"train": train}
    if report.validation is not None:
        splits["validation"] = report.validation.model_copy(update={"also_in_train": len(counts.also_held_out)})
    return report.model_copy(
        update={**splits, "examples": [*examples, *report.examples], "warnings": reports.warnings(splits)}
    )
