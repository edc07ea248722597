"""Reports what became of the rows: counts, lengths, what was dropped and why, and decoded samples."""

from __future__ import annotations

import re
from collections.abc import Iterable, Set
from itertools import groupby, pairwise
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict
from transformers import PreTrainedTokenizerBase

from toolkit.data.documents.documents import Documents
from toolkit.data.documents.fast_tokens import REFUSED
from toolkit.data.images.image_files import preview
from toolkit.data.images.images import Images
from toolkit.data.kinds.kind import RowKind
from toolkit.data.kinds.registry import LAYOUTS
from toolkit.data.layouts.messages import IN_PARTS
from toolkit.data.samples.samples import Rows
from toolkit.data.templates.masks import special_ids
from toolkit.errors import counted

ROWS_NAMED = 20
"""The most rows named for each reason of dropping."""

EXAMPLES, EXAMPLES_TOKENS = 2000, 300_000
"""The most decoded samples of a split, and their tokens: all rows of small data, else evenly spaced ones."""

EXAMPLES_WITH_IMAGES = 100
"""The most samples if rows have images, of which the page holds small copies."""

EXAMPLES_OF_WINDOW = 100
"""The most samples of a stream's window."""

FIRST_EXAMPLES = 3
"""Of them the first ones are the first rows of the first sources."""

EXAMPLE_TOKENS = 1000
"""The most tokens of each."""

MANY_PASSES = 10.0
"""Passes over a source in one pass over the mix from which there is a warning."""

MANY_DROPPED = 0.05
"""Share of dropped rows above which there is a warning."""


class _ReportPart(BaseModel):
    """A part of the report; fields that do not apply are not set, and are not written."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Found(_ReportPart):
    """Rows with something in common.

    Attributes:
        count: how many there are.
        rows: names of the first, such as `chat.jsonl:12`.
        cut_tokens: tokens cut off from rows that are too long.
    """

    count: int
    rows: list[str]
    cut_tokens: int = 0

    def and_more(self, more: Found) -> Found:
        """Returns these rows and more; the first keep their names, each once."""
        return Found(count=self.count + more.count, rows=list(dict.fromkeys([*self.rows, *more.rows]))[:ROWS_NAMED])


NONE = Found(count=0, rows=[])


class SourceReport(_ReportPart):
    """What became of one source's rows.

    Attributes:
        passes: how often a row is seen in a pass over the mix.
        share: the source's share of the rows of that pass.
        tokens_by: the package that made the tokens, if it is known.
    """

    source: str
    layout: str
    read: int
    kept: int
    num_dropped: int
    tokens: int
    weight: float | None
    passes: float
    share: float
    tokens_by: str | None = None


class SplitReport(_ReportPart):
    """What became of the rows of a split, and how long the kept ones are.

    Attributes:
        dropped: reason -> the rows.
        tokens: tokens of the kept rows, before any of them is cut.
        target_tokens, target_share, target_share_histogram: not set for classification.
        lengths: min, median, mean, p90, p99 and max (tokens).
        length_histogram: `edges` (tokens) and `counts` (rows).
        longest: the `row` and its `tokens`.
        repeated_tokens: with a sample for each answer, the tokens beyond `tokens`, because what comes before an answer
            is read again for each.
        noted: what is not learned of kept rows, or may not be meant to be -> the rows.
        duplicates: rows equal to an earlier one; not known for a stream.
        also_in_train: held-out rows that are trained on, too.
        sources: one entry for each source; not known for a stream.
        long: rows longer than `data.max_length`, even if they are kept.
        fill_rate: share of the samples that is tokens, or None if rows are padded.
        labels: rows of each class, or words of each tag.
    """

    read: int
    kept: int
    num_dropped: int
    dropped: dict[str, Found]
    tokens: int
    target_tokens: int | None = None
    target_share: float | None = None
    repeated_tokens: int | None = None
    lengths: dict[str, int | float]
    length_histogram: dict[str, list[int | float]]
    target_share_histogram: dict[str, list[int | float]] | None = None
    longest: dict[str, int | str]
    noted: dict[str, Found] = {}
    duplicates: Found | None = None
    sources: list[SourceReport] = []
    long: Found
    samples: int
    fill_rate: float | None = None
    labels: dict[str, int] | None = None
    also_in_train: int | None = None


class DataReport(_ReportPart):
    """What was read, what became of it, and the settings by which it is learned.

    Attributes:
        max_length: length of a sample (tokens).
        packing: whether rows share samples.
        long_rows, targets: the recipe's settings, resolved; `targets` is None if the objective decides what is learned.
        chat_template: one of ours, the name of a file, or `the tokenizer's own`; None if there is none.
        train: the rows to train on; for a stream its first window, and later all that has been read.
        examples: decoded samples.
        warnings: what the user should look at before the run.
    """

    max_length: int
    packing: bool
    long_rows: str
    targets: str | None
    chat_template: str | None
    streaming: bool
    train: SplitReport | None = None
    examples: list[dict[str, Any]] = []
    validation: SplitReport | None = None
    warnings: list[str] = []

    @property
    def label_counts(self) -> dict[str, int] | None:
        """Rows to train on of each class, in the order of their numbers; None without classification."""
        return self.train.labels if self.train is not None else None

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of data_report.json: plain JSON values, without fields that do not apply."""
        # Unset, not None: a null that was set, such as the fill rate of padded rows, is written.
        return self.model_dump(mode="json", exclude_unset=True)


def notes(rows: Rows, kept: Any) -> dict[str, Found]:
    """Returns the kept rows by what is not learned or not read of them."""
    is_kept = set(kept.tolist())
    return by_text(rows, ((row, note) for row, of_row in rows.notes().items() if row in is_kept for note in of_row))


def by_text(rows: Rows, texts: Iterable[tuple[int, str]]) -> dict[str, Found]:
    """Returns rows by a text about each, such as the reason of dropping."""
    found: dict[str, list[int]] = {}
    for row, text in texts:
        found.setdefault(text, []).append(row)
    return {text: named(rows, numbers) for text, numbers in found.items()}


def more_found(found: dict[str, Found], more: dict[str, Found]) -> None:
    """Adds rows to the earlier ones."""
    for what, new in more.items():
        found[what] = found.get(what, NONE).and_more(new)


def named(rows: Rows, numbers: Any) -> Found:
    """Returns the number of rows, and the names of the first."""
    return Found(count=len(numbers), rows=[rows.name(int(row)) for row in numbers[:ROWS_NAMED]])


def describe_lengths(lengths: Any, targets: Any) -> dict[str, Any]:
    """Returns statistics of the tokens of each row, (rows,), and of its learned tokens, (rows,)."""
    # `lower`: lengths that rows really have, not values between two of them.
    median, p90, p99 = (int(value) for value in np.percentile(lengths, (50, 90, 99), method="lower"))
    return {
        "target_share": int(targets.sum(dtype=np.int64)) / int(lengths.sum(dtype=np.int64)),
        "lengths": {
            "min": int(lengths.min()),
            "median": median,
            "mean": float(lengths.mean()),
            "p90": p90,
            "p99": p99,
            "max": int(lengths.max()),
        },
        "length_histogram": _histogram(lengths, np.linspace(0, int(lengths.max()), 33)),
        "target_share_histogram": _histogram(targets / np.maximum(1, lengths), np.linspace(0, 1, 21)),
    }


def _histogram(values: Any, edges: Any) -> dict[str, Any]:
    counts, edges = np.histogram(values, edges)
    return {"edges": edges.tolist(), "counts": counts.tolist()}


def duplicates(rows: Rows, kept: Any) -> Any:
    """Returns the numbers of the rows whose tokens are those of an earlier row."""
    digests = rows.column("digest")[kept]
    _, first = np.unique(digests, return_index=True)
    repeated = np.ones(len(kept), dtype=bool)
    repeated[first] = False
    return kept[repeated]


def repeated_tokens(rows: Rows, kept: Any) -> int:
    """Returns how many tokens samples of answers read more than once."""
    used = set(kept.tolist())
    return sum(ends[-1] - int(max(np.diff([0, *ends]))) for row, ends in rows.turns().items() if row in used)


def repeated_in(rows: Rows, kept: Any, others: Rows, others_kept: Any) -> int:
    """Returns how many rows are among the others, too."""
    return int(np.isin(rows.column("digest")[kept], others.column("digest")[others_kept]).sum())


def describe_sources(rows: Rows, kept: Any, dropped: dict[int, str], order: Any) -> list[SourceReport]:
    """Returns a report for each source. `order` is the rows of one pass, with repetitions."""
    lengths = rows.column("length")
    found = []
    for source, start in zip(rows.sources, rows.starts, strict=False):
        stop = start + len(source.table)
        mine = kept[(kept >= start) & (kept < stop)]
        used = int(((order >= start) & (order < stop)).sum())
        num_dropped = sum(start <= row < stop for row in dropped)
        found.append(
            SourceReport(
                source=source.name,
                layout=source.layout,
                read=len(mine) + num_dropped,
                kept=len(mine),
                num_dropped=num_dropped,
                tokens=int(lengths[mine].sum(dtype=np.int64)),
                weight=source.weight,
                passes=used / max(1, len(mine)),
                share=used / max(1, len(order)),
                tokens_by=source.tokens_by,
            )
        )
    return found


def examples(
    kind: RowKind, tokenizer: PreTrainedTokenizerBase, rows: Rows, kept: Any, split: str, images: Images | None
) -> list[dict[str, Any]]:
    """Decodes rows in stretches that are targets or not, with small images: first ones, and then evenly spaced ones.

    Args:
        split: the name of the split, which each of them gets.
        images: reads the images of rows, or None if they have none.
    """
    lengths = np.minimum(rows.column("length")[kept], EXAMPLE_TOKENS)
    most = min(len(kept), EXAMPLES_WITH_IMAGES if images is not None and rows.have_images else EXAMPLES)
    most = max(FIRST_EXAMPLES, min(most, int(EXAMPLES_TOKENS / max(1.0, float(lengths.mean())))))
    source_of = np.searchsorted(rows.starts, kept, side="right")
    # A row of each source before a second row of any, because each source has its own layout.
    firsts = [kept[int(np.argmax(source_of == source))] for source in dict.fromkeys(source_of.tolist())]
    begin = sorted(list(dict.fromkeys([*firsts, *kept[:FIRST_EXAMPLES].tolist()]))[:FIRST_EXAMPLES])
    spaced = kept[np.linspace(0, len(kept) - 1, most).astype(int)].tolist()
    chosen = list(dict.fromkeys(map(int, [*begin, *spaced])))[:most]
    return [{**_example(kind, tokenizer, rows, row, images), "split": split} for row in chosen]


def previews(rows: Rows, row: int, images: Images | None, start: int | None = None) -> dict[str, Any]:
    """Returns small images of a row of the report, or of its piece that begins with token `start`, by their key."""
    if images is None or not rows.have_images:
        return {}
    name, cached = rows.name(row), rows.cached_in(row)
    found = [preview(images.read(*shown, name, cached)) for shown in rows.images(row, start)]
    return {"images": found} if found else {}


def _example(
    kind: RowKind, tokenizer: PreTrainedTokenizerBase, rows: Rows, row: int, images: Images | None
) -> dict[str, Any]:
    most = min(EXAMPLE_TOKENS, sum(kind.lengths))
    ids, targets = rows.tokens(row, 0, most)
    targets, facts = kind.shown(rows, row, targets)
    found = {"row": rows.name(row), **decoded(tokenizer, ids, targets), **facts}
    # Of a pair each conversation by itself, with its images.
    apart = [
        (name, previews(rows, row, images, start), decoded(tokenizer, ids[start:stop], targets[start:stop]))
        for name, start, stop in kind.parts(rows, row)
        if start < len(ids)
    ]
    if not apart:
        return found | previews(rows, row, images)
    parts = [{"name": name, "segments": len(part["segments"]), **shown} for name, shown, part in apart]
    return found | {"segments": [each for _, _, part in apart for each in part["segments"]], "parts": parts}


def decoded(tokenizer: PreTrainedTokenizerBase, ids: Any, targets: Any) -> dict[str, Any]:
    """Decodes a row in stretches that are targets or not; `ids` and `targets` are (length,)."""
    edges = [0, *(np.flatnonzero(np.diff(targets)) + 1).tolist(), len(ids)]
    segments = [
        [_text_of_tokens(tokenizer, ids[start:stop].tolist()), bool(targets[start])]
        for start, stop in pairwise(edges)
        if stop > start
    ]
    return {"tokens": len(ids), "target_tokens": int(targets.sum()), "segments": segments}


RUN = 8
"""The longest run of equal tokens that is written out, because thousands may stand for an image."""


def _text_of_tokens(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """Decodes tokens; a long run of one token is written once, with its length."""
    parts: list[str] = []
    rest: list[int] = []
    for token, run in groupby(ids):
        count = len(list(run))
        if count <= RUN:
            rest += [token] * count
            continue
        parts += [tokenizer.decode(rest), f"{tokenizer.decode([token])} (x {count:,})"]
        rest = []
    return "".join([*parts, tokenizer.decode(rest)]) if parts else str(tokenizer.decode(ids))


def unclosed(tokenizer: PreTrainedTokenizerBase, rows: Rows, kept: Any, by_answer: bool) -> list[str]:
    """Returns a warning for each source that teaches no end, or not the end of every answer.

    Args:
        by_answer: whether only answers are learned, so that the last target of each is its end.
    """
    special = special_ids(tokenizer)
    found = []
    for source, start in zip(rows.sources, rows.starts, strict=False):
        mine = kept[(kept >= start) & (kept < start + len(source.table))]
        if len(mine) == 0:
            continue
        if LAYOUTS[source.layout].is_plain:
            if tokenizer.eos_token_id is None:
                found.append(
                    f"{source.name}: the tokenizer has no eos_token, so nothing ends a text and the model does not "
                    "learn to stop; use a tokenizer that has one (model.tokenizer)"
                )
        # A chat template that ends no turn is refused before.
        elif by_answer and (some := _with_open_answers(source, special, mine - start)):
            found.append(
                f"{source.name}: {counted(len(some), 'row')} with an answer that no special token ends: "
                f"{', '.join(source.row_name(row) for row in some[:3])}; there the model does not learn to stop"
            )
    return found


def _with_open_answers(source: Documents, special: set[int], mine: Any) -> list[int]:
    """Returns the rows of a source with an answer that no special token ends."""
    # Answers that are learned in parts are left out, because parts may end anywhere.
    notes = source.notes()
    open_ones = np.intersect1d(without_end(source, special), mine).tolist()
    return [row for row in open_ones if IN_PARTS not in notes.get(row, [])]


def without_end(source: Documents, special: Set[int]) -> Any:
    """Returns the numbers of the rows with an answer whose last token is not in `special`.

    The targets of the rows must be whole answers.
    """
    found, before = [], 0
    for batch in source.table.to_batches():
        ids, targets = (batch.column(name) for name in ("input_ids", "targets"))
        edges = targets.offsets.to_numpy() - targets.offsets[0].as_py()
        learned = targets.flatten().to_numpy(zero_copy_only=False)
        last = learned.copy()
        last[:-1] &= ~learned[1:]
        rows = np.flatnonzero(edges[1:] > edges[:-1])
        ends = edges[1:][rows] - 1
        last[ends] = learned[ends]  # the next row's first token continues nothing
        places = np.flatnonzero(last)
        unclosed = places[~np.isin(ids.flatten().to_numpy()[places], list(special))]
        found.append(before + np.unique(np.searchsorted(edges, unclosed, side="right") - 1))
        before += len(batch)
    return np.concatenate(found) if found else np.empty(0, dtype=np.int64)


UNREAD = re.compile(r"column (.*) is not read")


def _note_lines(split: str, noted: dict[str, Found]) -> list[str]:
    """Returns a line for each note, and one for all columns that are not read, which most data sets have."""
    columns = {match[1]: found.count for what, found in noted.items() if (match := UNREAD.fullmatch(what))}
    told = [
        f"{split}: {counted(found.count, 'row')}: {what}" for what, found in noted.items() if not UNREAD.fullmatch(what)
    ]
    if columns:
        listed = ", ".join(f"{column} ({counted(count, 'row')})" for column, count in columns.items())
        told.append(f"{split}: columns that are not read: {listed}")
    return told


def warnings(splits: dict[str, SplitReport]) -> list[str]:
    """Returns what the user should look at before the run, from the splits by their names."""
    found: list[str] = []
    for key, split in splits.items():
        name = "held-out rows" if key == "validation" else key
        if split.num_dropped > MANY_DROPPED * split.read:
            found.append(f"{name}: {split.num_dropped:,} of {counted(split.read, 'row')} dropped")
        found += _note_lines(name, split.noted)
        if split.duplicates is not None and split.duplicates.count:
            found.append(f"{name}: {counted(split.duplicates.count, 'duplicate')} of earlier rows")
        if split.repeated_tokens:
            share = split.repeated_tokens / split.tokens
            found.append(
                f"{name}: {counted(split.repeated_tokens, 'token')} read more than once, {share:.0%} of "
                f"{split.tokens:,}: the chat template writes earlier turns otherwise, so each answer is a sample "
                "of its own with all that comes before it; data.targets=last_turn learns the last one alone"
            )
        if split.also_in_train:
            found.append(f"{name}: {counted(split.also_in_train, 'row')} also in train: the held-out loss is too low")
        if split.long.cut_tokens:
            found.append(
                f"{name}: {counted(split.long.cut_tokens, 'token')} of {counted(split.long.count, 'long row')} cut off"
            )
        found += [
            f"{name}: {source.source} is seen {source.passes:,.0f} times in each pass over the mix"
            for source in split.sources
            if source.passes >= MANY_PASSES
        ]
        slow = {each.tokens_by for each in split.sources if each.tokens_by and each.tokens_by.startswith(REFUSED)}
        found += [f"{name}: tokens are made by {each}" for each in sorted(slow)]
    return found
