"""Selects the rows to train on, which are good, not too long and not held out, and their order in one pass."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from toolkit.data.kinds.kind import RowKind
from toolkit.data.kinds.labelled import NO_CLASS
from toolkit.data.report import NONE, Found, by_text, describe_lengths, more_found, named, notes, repeated_tokens
from toolkit.data.rows.readers import BLANK
from toolkit.data.samples.packing import Ints, mixed
from toolkit.data.samples.samples import Rows
from toolkit.errors import DataError, counted

LONG_SHARE = 0.01
"""Share of rows longer than `data.max_length` above which they are an error, unless the recipe says otherwise."""

REASONS_TOLD = 5
"""The most reasons of dropping that an error lists."""

Reasons = Mapping[str, Found]
"""Why rows were dropped -> how many, and the names of the first."""


@dataclass(frozen=True)
class Selection:
    """A split's rows.

    Attributes:
        rows: all rows of its sources.
        kept: numbers of the rows to use, rising.
        dropped: row -> why it is not used.
        long: numbers of the rows longer than `data.max_length`, even if they are kept.
    """

    rows: Rows
    kept: Ints
    dropped: dict[int, str]
    long: Ints


@dataclass
class RowCounts:
    """What became of rows, which may be counted in several parts.

    Attributes:
        measured: the most rows whose lengths are kept, or None for all.
        totals: `read`, `kept`, `num_dropped`, and of the kept rows `tokens`, `target_tokens` and `repeated_tokens`.
        dropped, noted: reason of dropping, and what is not learned of kept rows -> how many, and the first of them.
        long: rows longer than the limit, even if they were kept.
        lengths, targets: tokens and target tokens of the first kept rows, (rows,).
        longest: the longest kept row, and its tokens.
    """

    measured: int | None = None
    totals: Counter[str] = field(default_factory=Counter)
    dropped: dict[str, Found] = field(default_factory=dict)
    noted: dict[str, Found] = field(default_factory=dict)
    long: Found = NONE
    lengths: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    targets: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    longest: tuple[str, int] = ("", 0)

    @property
    def read(self) -> int:
        return self.totals["read"]

    def add(self, chosen: Selection) -> None:
        """Counts rows."""
        rows, kept = chosen.rows, chosen.kept
        lengths, targets = rows.column("length")[kept], rows.column("num_targets")[kept]
        self.totals.update(
            read=len(kept) + len(chosen.dropped),
            kept=len(kept),
            num_dropped=len(chosen.dropped),
            tokens=int(lengths.sum(dtype=np.int64)),
            target_tokens=int(targets.sum(dtype=np.int64)),
            repeated_tokens=repeated_tokens(rows, kept),
        )
        more_found(self.dropped, named_reasons(rows, chosen.dropped))
        more_found(self.noted, notes(rows, kept))
        self.long = self.long.and_more(named(rows, chosen.long))
        self.lengths = np.append(self.lengths, lengths)[: self.measured]
        self.targets = np.append(self.targets, targets)[: self.measured]
        if lengths.max(initial=0) > self.longest[1]:
            self.longest = rows.name(int(kept[np.argmax(lengths)])), int(lengths.max())

    def described(self, cut_tokens: int) -> dict[str, Any]:
        """Returns fields of a `SplitReport`; `cut_tokens` were cut off from long rows."""
        return {
            **describe_lengths(self.lengths, self.targets),
            **{name: count for name, count in self.totals.items() if count or name != "repeated_tokens"},
            "dropped": self.dropped,
            **({"noted": self.noted} if self.noted else {}),
            "longest": {"row": self.longest[0], "tokens": self.longest[1]},
            "long": self.long.model_copy(update={"cut_tokens": cut_tokens}),
        }


def judge(kind: RowKind, rows: Rows, policy: str, names: list[str] | None = None) -> Selection:
    """Selects the rows that can be used.

    Args:
        policy: what happens to rows that are too long.
        names: the classes, or None without classes.
    """
    dropped = rows.problems()
    if names is not None:
        dropped |= kind.without_class(rows, names, dropped)
    good = np.setdiff1d(np.arange(len(rows)), list(dropped))
    long = good[np.any([size > most for size, most in zip(kind.sizes(rows, good), kind.most, strict=True)], axis=0)]
    if policy in ("error", "drop"):
        dropped |= dict.fromkeys(long.tolist(), kind.too_long)
    # A prompt that fills max_length leaves nothing to learn.
    if policy == "truncate" and not kind.cuts_rows:
        reason = f"nothing to learn within {kind.data.max_length} tokens (data.max_length)"
        # From the second token on, because the first is never a target.
        useless = [row for row in long.tolist() if not np.any(rows.tokens(row, 1, kind.data.max_length)[1])]
        dropped |= dict.fromkeys(useless, reason)
    return Selection(rows, np.setdiff1d(good, list(dropped)), dropped, long)


def select(kind: RowKind, rows: Rows, field: str, policy: str, names: list[str] | None) -> Selection:
    """Selects the rows of a split that can be used; see `judge`.

    Raises:
        DataError: if too many are too long or cannot be used, or none is left.
    """
    chosen = judge(kind, rows, policy, names)
    good = np.union1d(chosen.kept, chosen.long)
    if policy == "error":
        require_few_long(kind, rows, field, kind.sizes(rows, good), len(good), len(chosen.long))
    reasons = named_reasons(rows, chosen.dropped)
    if len(chosen.kept) == 0:
        raise DataError(nothing_left(f"{field}: none of its rows ({len(rows):,}) can be trained on. ", reasons))
    require_few_dropped(kind, field, len(rows), reasons)
    return chosen


def require_few_long(kind: RowKind, rows: Rows, field: str, sizes: Sequence[Any], num_rows: int, num_long: int) -> None:
    """Raises DataError if rows beyond `LONG_SHARE` are long: the recipe has to say what becomes of them.

    Args:
        sizes: tokens of known ones of these rows; see `RowKind.sizes`.
    """
    if num_long > LONG_SHARE * num_rows:
        ways = ("drop",) if rows.have_images else kind.ways
        listed = ", ".join(way for way in ways if way != "drop" or kind.data.streaming or num_long < num_rows)
        choice = f", or choose what happens to them: data.long_rows={' or '.join(listed.rsplit(', ', 1))}"
        raise DataError(kind.too_many_long(field, sizes, num_rows, num_long, choice if listed else ""))


def require_few_dropped(kind: RowKind, field: str, num_rows: int, reasons: Reasons) -> None:
    """Raises DataError if more rows cannot be used than may be dropped."""
    # Long rows have a rule of their own, so they do not count twice.
    reasons = {why: found for why, found in reasons.items() if why not in (kind.too_long, BLANK)}
    count, allowed = sum(found.count for found in reasons.values()), kind.data.max_dropped_fraction
    if count > allowed * num_rows:
        raise DataError(
            f"{field}: {count:,} of {counted(num_rows, 'row')} ({count / num_rows:.1%}) cannot be used, and "
            f"data.max_dropped_fraction allows {allowed:.1%}. {reasons_in_words(reasons)}. "
            f"{_mend(reasons) or 'Fix these rows'}, or raise data.max_dropped_fraction to leave them out"
        )


def class_names(kind: RowKind, train: Rows) -> list[str] | None:
    """Returns the names of the classes, or None without classes.

    Raises:
        DataError: if no row can be used, or no classifier can be trained on them.
    """
    names = kind.class_names(train)
    if names == []:
        reasons = named_reasons(train, train.problems())
        raise DataError(nothing_left(f"data.train: none of its rows ({len(train):,}) can be trained on. ", reasons))
    return names


def nothing_left(what: str, reasons: Reasons) -> str:
    """Returns the error's text if no row is left: the reasons, and the first rows of each."""
    names = "the names in objective.labels, " if NO_CLASS in reasons else ""
    mend = _mend(reasons) or f"Correct them, {names}or name other columns in data.columns"
    return f"{what}{reasons_in_words(reasons)}. {mend}"


def _mend(reasons: Reasons) -> str | None:
    """Returns the setting that a reason names, which was tried on its rows; None if none does."""
    if all("data.max_length" in reason for reason in reasons):
        return "Raise data.max_length"
    found = (re.search(r"data\.chat_template=\w+", reason) for reason in reasons)
    return next((f"Set {setting[0]}" for setting in found if setting), None)


def reasons_in_words(reasons: Reasons) -> str:
    """Lists each reason with its number of rows and the names of three, the most frequent reasons first."""
    by_count = sorted(reasons.items(), key=lambda item: -item[1].count)
    told = [f"{reason}: {of.count:,} ({', '.join(of.rows[:3])})" for reason, of in by_count[:REASONS_TOLD]]
    more = [f"and {len(by_count) - REASONS_TOLD} more reasons"] if len(by_count) > REASONS_TOLD else []
    return "; ".join([*told, *more])


def named_reasons(rows: Rows, dropped: dict[int, str]) -> dict[str, Found]:
    """Returns why rows are dropped -> how many, and the names of the first."""
    return by_text(rows, sorted(dropped.items()))


def hold_out(
    chosen: Selection, fraction: float, seed: int, classes: Sequence[Any] | None = None
) -> tuple[Selection, Selection]:
    """Returns the rows to train on, and held-out rows chosen by the seed, which count no dropped rows.

    Args:
        classes: of each of `chosen.rows`; then each class has about the same share of both. None: rows have none.

    Raises:
        DataError: if there is a single row.
    """
    count = len(chosen.kept)
    if count < 2:
        raise DataError(
            "data.validation_fraction: data.train has a single usable row, so no row can be held out; remove it, or "
            "name held-out rows in data.validation"
        )
    num_held = min(max(1, round(fraction * count)), count - 1)
    mixed_up = np.random.default_rng(seed).permutation(chosen.kept)
    if classes is not None:  # spreads the rows of each class evenly over the order
        numbers, sizes, places = Counter[Any](), Counter(classes[row] for row in mixed_up), []
        for of in (classes[row] for row in mixed_up):
            numbers[of] += 1
            places.append((numbers[of] - 0.5) / sizes[of])
        mixed_up = mixed_up[np.argsort(places, kind="stable")]
    # Sorted again: `one_pass` looks up the sources in it by bisection.
    held, rest = np.sort(mixed_up[:num_held]), np.sort(mixed_up[num_held:])
    is_held = np.isin(chosen.long, held)
    train = replace(chosen, kept=rest, long=chosen.long[~is_held])
    return train, Selection(chosen.rows, held, {}, chosen.long[is_held])


def one_pass(chosen: Selection) -> Ints:
    """Returns the rows of one pass in order: one source after the other, or mixed by their weights.

    Raises:
        DataError: if a weighted source has no usable row.
    """
    sources = chosen.rows.sources
    if any(source.weight is None for source in sources):
        return chosen.kept
    bounds = np.searchsorted(chosen.kept, chosen.rows.starts)
    parts = [chosen.kept[start:stop] for start, stop in pairwise(bounds.tolist())]
    for source, part in zip(sources, parts, strict=True):
        if len(part) == 0:
            raise DataError(f"data.train: {source.name!r} has a weight, but none of its rows can be used")
    weights = [source.weight or 0.0 for source in sources]
    order = mixed([len(part) for part in parts], weights)
    rows = np.empty(sum(len(places) for places, _ in order), dtype=np.int64)
    for part, (places, numbers) in zip(parts, order, strict=True):
        rows[places] = part[numbers]
    return rows
