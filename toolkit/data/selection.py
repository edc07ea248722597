"""Selects the rows to train on, which are good, not too long and not held out, and their order in one pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from toolkit.data.kinds.kind import RowKind
from toolkit.data.kinds.labelled import NO_CLASS
from toolkit.data.layouts.messages import NO_CALLS
from toolkit.data.report import by_reason
from toolkit.data.rows.readers import BLANK
from toolkit.data.samples.packing import Ints, mixed
from toolkit.data.samples.samples import Rows
from toolkit.errors import DataError, counted

LONG_SHARE = 0.01
"""Share of rows longer than `data.max_length` above which they are an error, unless the recipe says otherwise."""

REASONS_TOLD = 5
"""The most reasons of dropping that an error lists."""


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


def select(kind: RowKind, rows: Rows, field: str, policy: str, names: list[str] | None) -> Selection:
    """Selects the rows of a split that can be used.

    Args:
        policy: what happens to rows that are too long.
        names: the classes, or None without classes.

    Raises:
        DataError: if too many are too long or cannot be used, or none is left.
    """
    data = kind.data
    dropped = problems_of(rows)
    if names is not None:
        dropped |= kind.without_class(rows, names, dropped)
    good = np.setdiff1d(np.arange(len(rows)), list(dropped))
    sizes, too_long = kind.sizes(rows, good), kind.too_long
    long = good[np.any([size > most for size, most in zip(sizes, kind.most, strict=True)], axis=0)]
    # A few long rows are dropped and counted; beyond 1 % the recipe has to say what becomes of them.
    if policy == "error" and len(long) > LONG_SHARE * len(good):
        ways = ("drop",) if rows.have_images else kind.ways
        raise DataError(kind.too_many_long(field, sizes, len(good), len(long), ways))
    if policy in ("error", "drop"):
        dropped |= dict.fromkeys(long.tolist(), too_long)
    # A prompt that fills max_length leaves nothing to learn.
    if policy == "truncate" and not kind.cuts_rows:
        reason = nothing_within(data.max_length)
        dropped |= dict.fromkeys(_without_targets(rows, long, data.max_length), reason)
    kept = np.setdiff1d(good, list(dropped))
    if len(kept) == 0:
        raise DataError(nothing_left(field, rows, dropped))
    # Long rows have a rule of their own above, so they do not count twice.
    unusable = {row: reason for row, reason in dropped.items() if reason not in (too_long, BLANK)}
    if len(unusable) > data.max_dropped_fraction * len(rows):
        raise DataError(too_many_dropped(field, len(rows), data.max_dropped_fraction, _named_reasons(rows, unusable)))
    return Selection(rows, kept, dropped, long)


def class_names(kind: RowKind, train: Rows) -> list[str] | None:
    """Returns the names of the classes, or None without classes.

    Raises:
        DataError: if no row can be used, or no classifier can be trained on them.
    """
    names = kind.class_names(train)
    if names == []:
        raise DataError(nothing_left("data.train", train, problems_of(train)))
    return names


def problems_of(rows: Rows) -> dict[int, str]:
    """Returns why rows cannot be used with any recipe, by row."""
    found: dict[int, str] = {}
    for source, start in zip(rows.sources, rows.starts, strict=False):
        found |= {start + row: problem for row, problem in source.problems().items()}
    return found


def _without_targets(rows: Rows, long: Ints, max_length: int) -> list[int]:
    # From the second token on, because the first is never a target.
    return [row for row in long.tolist() if not rows.tokens(row, 1, max_length)[1].any()]


def nothing_within(max_length: int) -> str:
    """Returns the reason for a row whose targets are all cut off."""
    return f"nothing to learn within {max_length} tokens (data.max_length)"


def nothing_left(field: str, rows: Rows, dropped: dict[int, str]) -> str:
    """Returns the error's text if no row is left: the reasons, and the first rows of each."""
    names = "the names in objective.labels, " if NO_CLASS in dropped.values() else ""
    reasons = _named_reasons(rows, dropped)
    return (
        f"{field}: none of its rows ({len(rows):,}) can be trained on. {reasons_in_words(reasons)}. "
        f"{mend(reasons) or f'Correct them, {names}or name other columns in data.columns'}"
    )


def mend(reasons: Iterable[str]) -> str | None:
    """Returns what helps where a chat template leaves out calls of tools, or None for other reasons."""
    if NO_CALLS not in reasons:
        return None
    return "Set data.chat_template=chatml, or alpaca if the vocabulary lacks its markers: both write tools and calls"


def too_many_dropped(field: str, num_rows: int, allowed: float, reasons: dict[str, tuple[int, list[str]]]) -> str:
    """Returns the error's text if too many rows cannot be used; for `reasons` see `reasons_in_words`."""
    count = sum(number for number, _ in reasons.values())
    return (
        f"{field}: {count:,} of {counted(num_rows, 'row')} ({count / num_rows:.1%}) cannot be used, and "
        f"data.max_dropped_fraction allows {allowed:.1%}. {reasons_in_words(reasons)}. "
        f"{mend(reasons) or 'Fix these rows'}, or raise data.max_dropped_fraction to leave them out"
    )


def reasons_in_words(reasons: dict[str, tuple[int, list[str]]]) -> str:
    """Lists each reason with its number of rows and the names of three, the most frequent reasons first."""
    by_count = sorted(reasons.items(), key=lambda item: -item[1][0])
    told = [f"{reason}: {count:,} ({', '.join(names[:3])})" for reason, (count, names) in by_count[:REASONS_TOLD]]
    more = [f"and {len(by_count) - REASONS_TOLD} more reasons"] if len(by_count) > REASONS_TOLD else []
    return "; ".join([*told, *more])


def _named_reasons(rows: Rows, dropped: dict[int, str]) -> dict[str, tuple[int, list[str]]]:
    return {reason: (len(found), [rows.name(row) for row in found[:3]]) for reason, found in by_reason(dropped).items()}


def hold_out(chosen: Selection, fraction: float, seed: int) -> tuple[Selection, Selection]:
    """Returns the rows to train on, and held-out rows chosen by the seed, which count no dropped rows.

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
