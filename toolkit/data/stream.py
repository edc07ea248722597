"""Makes samples while training, for data larger than the disk: reads, tokenises and packs rows a window at a time.

A window is to a stream what all rows are to files: it is tokenised, selected, counted and packed by the same functions.
Every rank reads all rows and keeps its share of the samples, so that the global order is the same for any
number of ranks, and an interrupted run resumes at the same sample.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from toolkit.data import report as reports
from toolkit.data.documents.documents import Documents
from toolkit.data.documents.processes import Batch as StoredRows
from toolkit.data.documents.processes import Work, image_root
from toolkit.data.images.images import Images
from toolkit.data.kinds.kind import TOO_LONG, RowKind
from toolkit.data.report import DataReport, SplitReport
from toolkit.data.rows.readers import stored_in
from toolkit.data.rows.sources import Source
from toolkit.data.samples.loader import Loader, ahead
from toolkit.data.samples.packing import Ints, by_sample
from toolkit.data.samples.samples import Batch, Rows, TextSamples
from toolkit.data.selection import RowCounts, judge, nothing_left, require_few_dropped, require_few_long
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


@dataclass(frozen=True)
class StreamedSource:
    """A source, and what makes documents of its rows."""

    source: Source
    work: Work


@dataclass(frozen=True)
class StreamedDocuments(Documents):
    """Rows of several sources in the order in which they are read; the column `row` of their table has their names.

    Attributes:
        contents: digest -> an image that a row holds itself.
    """

    contents: dict[str, bytes] = field(default_factory=dict)

    def row_name(self, row: int) -> str:
        return str(self.table.column("row")[row])

    def images(self, row: int, start: int | None = None) -> list[tuple[dict[str, Any], str]]:
        """See `Documents.images`; the record of an image that its row holds has it under `content`."""
        return [
            (record if "path" in record else {**record, "content": self.contents[record["digest"]]}, root)
            for record, root in super().images(row, start)
        ]


@dataclass(frozen=True)
class Window:
    """Samples of some rows, and the states at their beginning and end."""

    state: State
    samples: TextSamples
    end: State


@dataclass(eq=False)
class Stream:
    """Reads sources window by window, without end: a source that ends starts again.

    Attributes:
        kind: the kind of the rows.
        policy: what happens to rows longer than `data.max_length`: error, drop, truncate or split.
        pad_id: token of padding.
        seed: seed of the order of a window's samples, or None for the order of the rows.
        held_out: digests of the rows that are evaluated, which should not be trained on.
        images: reads the images of the sources that have some, and holds those of a window; None if no source has any.
        counts: what became of the rows so far.
        also_held_out: digests of rows that are evaluated, too.
        cut_tokens: tokens that were cut off from long rows.
        packed: fields of `SplitReport` about the samples of the first window.
    """

    kind: RowKind
    sources: list[StreamedSource]
    policy: str
    pad_id: int
    seed: int | None
    held_out: frozenset[int] = frozenset()
    images: Images | None = None
    counts: RowCounts = field(init=False)
    also_held_out: set[int] = field(init=False)
    cut_tokens: int = field(init=False)
    packed: dict[str, Any] = field(init=False, default_factory=dict)

    def windows(self, state: State | None = None) -> Iterator[Window]:
        """Yields windows from a window's state on, or from the first row if it is None.

        Raises:
            DataError: if a source cannot be read or has no usable row, or too many rows are too long.
        """
        # Counts restart, because the first window is read once before training, for its checks.
        self.counts, self.also_held_out, self.cut_tokens = RowCounts(ROWS_MEASURED), set(), 0
        places = state["sources"] if state is not None else [(0, 0, 0)] * len(self.sources)
        cursors = [_Cursor(of.source, *place) for of, place in zip(self.sources, places, strict=True)]
        state = state or {"window": 0, "samples": 0, "sources": [list(cursor.place()) for cursor in cursors]}
        while True:
            samples = self._samples(self._rows(cursors), state["window"])
            end = {"window": state["window"] + 1, "samples": state["samples"] + len(samples)}
            end["sources"] = [list(cursor.place()) for cursor in cursors]
            # A run interrupted in this window reads it again from its first row.
            yield Window(state, samples, end)
            state = end

    def _rows(self, cursors: list[_Cursor]) -> Rows:
        """Returns good rows whose tokens fill a window."""
        tables: list[pa.Table] = []
        tokens, longest, counts = 0, self.kind.data.max_length, self.counts
        while tokens < WINDOW_SAMPLES * longest:
            numbers, table = self._read(cursors)
            rows = self._as_rows(table, {})
            kept = self._chosen(rows)
            for number, good in zip(numbers, np.isin(np.arange(len(rows)), kept).tolist(), strict=True):
                if (length := cursors[number].without_good(good)) is not None:
                    source = self.sources[number].source
                    what = f"{source.field}: none of the rows of {source.name!r} ({length:,}) can be used"
                    raise DataError(nothing_left(f"{what}. Of {counts.read:,} read: ", counts.dropped))
            tables.append(table.take(kept))
            lengths, turns = rows.column("length").tolist(), rows.turns()
            for ends in (turns.get(row, [lengths[row]]) for row in kept.tolist()):
                tokens += ends[-1] if self.policy == "split" or len(ends) > 1 else min(ends[-1], longest)
            if counts.read >= ROWS_JUDGED:
                require_few_dropped(self.kind, "data.train", counts.read, counts.dropped)
        require_few_dropped(self.kind, "data.train", counts.read, counts.dropped)
        held = {} if self.images is None or self.images.held is None else self.images.held
        contents = dict(held)
        held.clear()  # the reader holds the images of one window alone
        return self._as_rows(pa.concat_tables(tables).combine_chunks(), contents)

    def _read(self, cursors: list[_Cursor]) -> tuple[list[int], pa.Table]:
        """Returns the source of each of the next rows, and the rows, tokenised, in the sources' order."""
        drawn = []
        for _ in range(BATCH_ROWS):
            # By weight, or one source after the other.
            number = min(range(len(cursors)), key=lambda number: (cursors[number].turn(), number))
            drawn.append((number, *cursors[number].draw()))
        # Neighbours in a shard together, because each source has its own layout; then back into the order of the draw.
        places = sorted(range(len(drawn)), key=lambda place: drawn[place][:3])
        starts = np.cumsum([0, *(len(of.source.shards) for of in self.sources)]).tolist()
        tables = [pa.unify_schemas([of.work.schema for of in self.sources]).empty_table()]
        for (number, _, shard), rows in itertools.groupby((drawn[place] for place in places), key=lambda row: row[:3]):
            (_, _, _, before, _, first), *others = rows
            of, stored = self.sources[number], [first, *(row[-1] for row in others)]
            together = StoredRows(starts[number] + shard, of.source.shards[shard], before, stored)
            tables.append(pa.Table.from_batches([of.work.documents(together)]))
        table = pa.concat_tables(tables, promote_options="default").take(np.argsort(places))
        return [row[0] for row in drawn], table.append_column("row", [[row[4] for row in drawn]])

    def _as_rows(self, table: pa.Table, contents: dict[str, bytes]) -> Rows:
        return Rows([StreamedDocuments("", "", None, [], [], table, None, None, self._roots, contents=contents)])

    @functools.cached_property
    def _roots(self) -> tuple[str, ...]:
        encoders = ((of.work.encoder, shard) for of in self.sources for shard in of.source.shards)
        return tuple(str(image_root(shard, encoder.image_root)) for encoder, shard in encoders)

    def _chosen(self, rows: Rows) -> Ints:
        """Counts rows, and returns the numbers of those that can be used."""
        chosen, counts = judge(self.kind, rows, self.policy), self.counts
        counts.add(chosen)
        self.also_held_out |= self.held_out.intersection(rows.column("digest")[chosen.kept].tolist())
        # One long row at the beginning is no error.
        if self.policy == "error" and counts.long.count > 1:
            sizes = [np.append(counts.lengths, rows.column("length")[chosen.long])]
            good = counts.totals["kept"] + counts.dropped[TOO_LONG].count
            require_few_long(self.kind, rows, "data.train", sizes, good, counts.long.count)
        return chosen.kept

    def _samples(self, rows: Rows, window: int) -> TextSamples:
        arrays, facts = self.kind.arrays(rows, np.arange(len(rows)), self.policy, None)
        self.cut_tokens += facts.pop("cut_tokens")
        self.packed = self.packed or facts
        samples = self.kind.samples(rows, {**arrays, "ends": np.array(arrays["ends"])}, self.pad_id, self.images)
        assert isinstance(samples, TextSamples)
        if self.seed is None:
            return samples
        # The seed has the window's number, so that a resumed run shuffles its window the same way.
        mixed_up = hashlib.sha256(f"{self.seed}/{window}".encode()).digest()[:8]
        order = np.random.default_rng(int.from_bytes(mixed_up)).permutation(len(samples))
        pieces, ends = by_sample(samples.pieces, np.repeat(order, np.diff(samples.ends, prepend=0)))
        return replace(samples, pieces=pieces, ends=ends)


@dataclass
class _Cursor:
    """The reading position in a source.

    Attributes:
        passes: number of finished passes through the source.
        row: row of the current pass.
        drawn: number of rows drawn in total.
        length: number of rows of a pass, once one is done.
    """

    source: Source
    passes: int
    row: int
    drawn: int
    length: int | None = None
    bad_in_a_row: int = 0

    def __post_init__(self) -> None:
        self._begin(self.row)

    def _begin(self, row: int) -> None:
        self._rows = itertools.islice(_stored_rows(self.source), row, None)
        # One row ahead, so that a pass is known to end when its last row is drawn.
        self._upcoming = next(self._rows, None)
        if self._upcoming is None:
            raise DataError(f"{self.source.field}: {self.source.name!r} holds no rows, or fewer than before")

    def place(self) -> tuple[int, int, int]:
        """Returns the position as the constructor takes it."""
        return self.passes, self.row, self.drawn

    def turn(self) -> float:
        """Returns when the next row comes: of weight w the k-th at (k + 1/2) / w, see `mixed`; else after each pass."""
        return self.passes if self.source.weight is None else (self.drawn + 0.5) / self.source.weight

    def draw(self) -> tuple[int, int, int, str, Any]:
        """Returns the next row with its pass, shard, place in the shard and name; the first follows the last."""
        assert self._upcoming is not None
        found = (self.passes, *self._upcoming)
        self.row += 1
        self.drawn += 1
        self._upcoming = next(self._rows, None)
        if self._upcoming is None:
            self.passes, self.length, self.row = self.passes + 1, self.row, 0
            self._begin(0)
        return found

    def without_good(self, good: bool) -> int | None:
        """Counts whether a row could be used, and returns the length of a pass if no row of a whole one could."""
        self.bad_in_a_row = 0 if good else self.bad_in_a_row + 1
        # The length of a pass is not known until it ends, and bad rows may be only its beginning.
        return self.length if self.length is not None and self.bad_in_a_row > self.length else None


def _stored_rows(source: Source) -> Iterator[tuple[int, int, str, Any]]:
    """Yields every row as it is stored, with its shard, the number of rows before it there, and its name."""
    for path, shards in itertools.groupby(enumerate(source.shards), key=lambda each: each[1].path):
        numbers = itertools.count(1)
        for shard, of in shards:
            for before, stored in enumerate(stored_in(of)):
                yield shard, before, f"{source.paths[path]}:{next(numbers)}", stored


class StreamLoader(Loader):
    """Yields the micro-batches of a stream.

    The next window is made while the one before is trained on. A thread may be steps ahead of training, so
    the states of all windows from the current one on are kept.
    """

    def __init__(self, stream: Stream, **split: Any) -> None:
        super().__init__(**split)
        self.stream = stream
        self._states: list[State] = []

    def epoch_at(self, step: int) -> float:
        """Returns the whole passes over the source with the fewest, because a stream's length is not known."""
        state = self.state_at(self.samples_at(step))
        if state is not None:
            del self._states[: self._states.index(state)]  # a run does not go back
        return float(min(passes for passes, _, _ in state["sources"])) if state is not None else 0.0

    def state_at(self, samples: int) -> State | None:
        """Returns the state of the window that holds the next sample after `samples`."""
        begun = [state for state in self._states if state["samples"] <= samples]
        return begun[-1] if begun else None

    def resume(self, step: int, samples: int, state: State | None) -> None:
        """Resumes after `step` optimizer steps at position `samples`, in the window that `state` begins."""
        super().resume(step, samples, state)
        self._states = [state] if state is not None else []

    def __iter__(self) -> Iterator[list[Batch]]:
        samples = self._samples()
        for _ in self.step_starts():
            step = list(itertools.islice(samples, self.samples_per_step))
            yield [self.part.of(_micro_batch([step[i] for i in mine])) for mine in self.micro_batches(0)]

    def _samples(self) -> Iterator[tuple[TextSamples, int]]:
        """Yields every sample from the start on: the samples of its window, and its number among them."""
        state = self.state_at(self.start[1])
        skip = self.start[1] - (state["samples"] if state is not None else 0)
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


def describe_stream(report: DataReport, stream: Stream) -> DataReport:
    """Returns the data report with the rows to train on, as far as they have been read."""
    splits = {"train": SplitReport(**stream.counts.described(stream.cut_tokens), **stream.packed)}
    if report.validation is not None:
        splits["validation"] = report.validation.model_copy(update={"also_in_train": len(stream.also_held_out)})
    return report.model_copy(update={**splits, "warnings": reports.warnings(splits)})
