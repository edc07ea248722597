"""Makes samples while training, for data larger than the disk: reads, tokenises and packs rows a window at a time.

Every rank reads all rows and keeps its share of the samples, so that the global order is the same for any
number of ranks, and an interrupted run resumes at the same sample.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
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
from toolkit.data.rows.readers import BLANK, Row, Shard
from toolkit.data.rows.sources import Source, rows_of_shards
from toolkit.data.samples.image_samples import ImageSamples
from toolkit.data.samples.loader import ahead, first_positions
from toolkit.data.samples.packing import by_sample
from toolkit.data.samples.samples import Batch, Samples, TextSamples
from toolkit.data.samples.sequence_parts import WHOLE, Part
from toolkit.data.selection import LONG_SHARE, nothing_within, reasons_in_words, too_many_dropped
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
        dropped: reason -> how many, and the names of the first.
        noted: what is not learned of kept rows -> how many, and the names of the first.
        long: rows longer than the limit, even if they were kept.
        lengths, targets: tokens and target tokens of the first usable rows.
        held_out: digests of rows that are evaluated, too.
    """

    read: int = 0
    num_dropped: int = 0
    dropped: dict[str, dict[str, Any]] = field(default_factory=dict)
    noted: dict[str, dict[str, Any]] = field(default_factory=dict)
    long: int = 0
    cut_tokens: int = 0
    tokens: int = 0
    repeated_tokens: int = 0
    target_tokens: int = 0
    lengths: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    longest: tuple[int, str] = (0, "")
    held_out: set[int] = field(default_factory=set)

    def keep(self, document: Document) -> None:
        self.tokens += document["length"]
        self.repeated_tokens += ends_of(document)[-1] - document["length"]
        self.target_tokens += document["num_targets"]
        if len(self.lengths) < ROWS_MEASURED:
            self.lengths.append(document["length"])
            self.targets.append(document["num_targets"])
        self.longest = max(self.longest, (document["length"], document["row"]))
        for note in notes_in(document["note"] or ""):
            if note:
                _count_row(self.noted, note, document["row"])

    def drop(self, reason: str, row: str) -> None:
        self.num_dropped += 1
        _count_row(self.dropped, reason, row)

    @property
    def reasons(self) -> dict[str, tuple[int, list[str]]]:
        """Why rows were dropped -> how many, and the names of the first."""
        return {why: (found["count"], found["rows"]) for why, found in self.dropped.items()}

    @property
    def good(self) -> int:
        """Number of valid rows, too long ones included."""
        too_long = self.dropped.get(TOO_LONG, {"count": 0})
        return self.read - self.num_dropped + int(too_long["count"])


def _count_row(found: dict[str, dict[str, Any]], what: str, row: str) -> None:
    entry = found.setdefault(what, {"count": 0, "rows": []})
    entry["count"] += 1
    if len(entry["rows"]) < ROWS_NAMED and row not in entry["rows"]:
        entry["rows"].append(row)


@dataclass(frozen=True)
class StreamedSource:
    """A source, and how its rows are read and encoded."""

    source: Source
    layout: Layout
    encoder: Encoder


class WindowRows:
    """The tokens of a window's documents, and their images.

    Args:
        contents: digest -> an image that a row holds itself; None if no images are read.
    """

    def __init__(self, documents: list[Document], contents: dict[str, bytes] | None = None) -> None:
        self.documents = documents
        self._contents = contents

    def __len__(self) -> int:
        return len(self.documents)

    def tokens(self, row: int, start: int = 0, stop: int | None = None) -> tuple[Any, Any]:
        """Returns `input_ids` and `targets` of a part of a document, each (length,)."""
        document = self.documents[row]
        return document["input_ids"][start:stop], document["targets"][start:stop]

    def ends(self, row: int) -> list[int]:
        """Returns the position after the last token of each sample of a document."""
        return ends_of(self.documents[row])

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
            for document in self._read_documents(cursors):
                kept_it = self._count_document(document)
                if (read := cursors[document["source"]].without_good(kept_it)) is not None:
                    raise DataError(self._nothing_left(self.sources[document["source"]].source, read))
                if kept_it:
                    # As arrays: lists of Python numbers would take a window several times the memory.
                    arrays = {name: np.asarray(document[name]) for name in ("input_ids", "targets")}
                    kept.append({**document, **arrays})
                    total = ends_of(document)[-1]
                    tokens += (
                        total if self.policy == "split" or len(ends_of(document)) > 1 else min(total, self.max_length)
                    )
            if self.counts.read >= ROWS_JUDGED:
                self._check_dropped()
        self._check_dropped()
        return kept

    def _nothing_left(self, source: Source, num_rows: int) -> str:
        """Returns the error's text if no row of a source can be used."""
        reasons = reasons_in_words(self.counts.reasons)
        return (
            f"{source.field}: none of the rows of {source.name!r} ({num_rows:,}) can be used. Of "
            f"{self.counts.read:,} read: {reasons}. Correct them, or name other columns in data.columns"
        )

    def _check_dropped(self) -> None:
        """Raises DataError if more rows could not be used than may be dropped."""
        counts = self.counts
        reasons = {why: found for why, found in counts.reasons.items() if why not in (TOO_LONG, BLANK)}
        if sum(number for number, _ in reasons.values()) > self.kind.data.max_dropped_fraction * counts.read:
            allowed = self.kind.data.max_dropped_fraction
            raise DataError(too_many_dropped("data.train", counts.read, allowed, reasons))

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

    def _count_document(self, document: Document) -> bool:
        counts = self.counts
        counts.read += 1
        problem = document["problem"]
        if problem is None and document["length"] > self.max_length:
            counts.long += 1
            problem = self._problem_of_long(document)
        if problem is not None:
            counts.drop(problem, document["row"])
            return False
        counts.keep(document)
        if document["digest"] in self.held_out:
            counts.held_out.add(document["digest"])
        return True

    def _problem_of_long(self, document: Document) -> str | None:
        counts = self.counts
        if (
            # The share is that of at least 100 rows, so that one long row at the beginning is no error.
            self.policy == "error"
            and counts.long > 1
            and counts.long > LONG_SHARE * max(counts.good, ROWS_MEASURED // 100)
        ):
            lengths = np.array([*counts.lengths, document["length"]])
            ways = self.kind.ways if self.images is None else ("drop",)
            raise DataError(self.kind.too_many_long("data.train", [lengths], counts.good, counts.long, ways))
        if self.policy in ("error", "drop"):
            return TOO_LONG
        if self.policy == "truncate":
            counts.cut_tokens += document["length"] - self.max_length
            if not any(document["targets"][1 : self.max_length]):
                return nothing_within(self.max_length)
        return None

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
    lengths, targets = np.array(counts.lengths), np.array(counts.targets)
    used = int(samples.lengths().sum())
    described = reports.describe_lengths(lengths, targets)
    noted = {what: Found(**found) for what, found in counts.noted.items()}
    train = SplitReport(
        read=counts.read,
        kept=counts.read - counts.num_dropped,
        num_dropped=counts.num_dropped,
        dropped={reason: Found(**found) for reason, found in counts.dropped.items()},
        long=Found(count=counts.long, rows=[], cut_tokens=counts.cut_tokens),
        **({"noted": noted} if noted else {}),
        **({"repeated_tokens": counts.repeated_tokens} if stream.kind.by_turn else {}),
        **{**described, "tokens": counts.tokens, "target_tokens": counts.target_tokens},
        longest={"row": counts.longest[1], "tokens": counts.longest[0]},
        samples=len(samples),
        fill_rate=used / (len(samples) * stream.max_length) if stream.kind.packed else None,
    )
    rows = samples.rows
    assert isinstance(rows, WindowRows)
    # At the end of a run the report has them already.
    shown = range(min(reports.EXAMPLES_OF_WINDOW, len(rows))) if report.train is None else ()
    examples = [
        {
            **reports.decoded(tokenizer, *rows.tokens(row, 0, stream.max_length)),
            **reports.previews(rows, row, stream.images),
        }
        for row in shown
    ]
    splits = {"train": train}
    if report.validation is not None:
        splits["validation"] = report.validation.model_copy(update={"also_in_train": len(counts.held_out)})
    return report.model_copy(
        update={**splits, "examples": [*examples, *report.examples], "warnings": reports.warnings(splits)}
    )
