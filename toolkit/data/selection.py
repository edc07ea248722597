"""Selects the rows to train on, which are good, not too long and not held out, and their order in one pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from toolkit.data.report import by_reason
from toolkit.data.rows.values import numbers_first
from toolkit.data.samples.packing import Ints, Pieces, mixed, of_turns, split, whole
from toolkit.data.samples.samples import Rows, TokenRows
from toolkit.errors import DataError, counted
from toolkit.recipe.objectives.spec import ObjectiveSpec

LONG_SHARE = 0.01
"""Share of rows longer than `data.max_length` above which they are an error, unless the recipe says otherwise."""

REASONS_TOLD = 5
"""The most reasons of dropping that an error lists."""

TOO_LONG = "longer than data.max_length"


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


def select(
    rows: Rows,
    field: str,
    policy: str,
    max_length: int,
    label_names: list[str] | None,
    already_cut: bool,
    max_dropped: float,
    max_target_length: int | None = None,
    ways: Sequence[str] = ("drop",),
) -> Selection:
    """Selects the rows of a split that can be used.

    Args:
        policy: `data.long_rows`.
        label_names: the classes, or None without classification.
        already_cut: whether long rows were cut when they were tokenised, so that `truncate` finds none.
        max_dropped: share of the rows that may be dropped, not counting those that are too long.
        max_target_length: the most tokens of a target, for rows of a source and a target, else None.
        ways: the values of `data.long_rows` that an error may advise.

    Raises:
        DataError: if too many are too long or cannot be used, or none is left.
    """
    dropped = problems_of(rows)
    if label_names is not None:
        dropped |= _without_class(rows, label_names, dropped)
    good = np.setdiff1d(np.arange(len(rows)), list(dropped))
    lengths = rows.column("length")
    if max_target_length is None:
        long, too_long = good[lengths[good] > max_length], TOO_LONG
    else:
        sources = rows.column("split")
        long = good[(sources[good] > max_length) | ((lengths - sources)[good] > max_target_length)]
        too_long = f"{TOO_LONG}, or its target than data.max_target_length"
    # A few long rows are dropped and counted; beyond 1 % the recipe has to say what becomes of them.
    if policy == "error" and len(long) > LONG_SHARE * len(good):
        if max_target_length is not None:
            raise DataError(_too_many_of_two(field, rows, good, len(long), max_length, max_target_length))
        raise DataError(too_many_long(field, lengths[good], len(good), len(long), max_length, ways))
    if policy in ("error", "drop"):
        dropped |= dict.fromkeys(long.tolist(), too_long)
    # A prompt that fills max_length leaves nothing to learn.
    if policy == "truncate" and not already_cut:
        dropped |= dict.fromkeys(_without_targets(rows, long, max_length), nothing_within(max_length))
    kept = np.setdiff1d(good, list(dropped))
    if len(kept) == 0:
        raise DataError(nothing_left(field, rows, dropped))
    # Long rows have a rule of their own above, so they do not count twice.
    unusable = {row: reason for row, reason in dropped.items() if reason != too_long}
    if len(unusable) > max_dropped * len(rows):
        raise DataError(too_many_dropped(field, len(rows), max_dropped, _named_reasons(rows, unusable)))
    return Selection(rows, kept, dropped, long)


def _too_many_of_two(field: str, rows: Rows, good: Ints, num_long: int, max_length: int, max_target_length: int) -> str:
    sources = rows.column("split")[good]
    targets = rows.column("length")[good] - sources
    return (
        f"{field}: {num_long:,} of {counted(len(good), 'row')} ({num_long / len(good):.1%}) have a source longer than "
        f"data.max_length, {max_length} tokens, or a target longer than data.max_target_length, {max_target_length}; "
        f"the longest source has {int(sources.max()):,} and the longest target {int(targets.max()):,}. Raise these, or "
        "choose what happens to the rows: data.long_rows=drop or truncate"
    )


def ways_of_long_rows(spec: ObjectiveSpec, whole: bool) -> tuple[str, ...]:
    """Returns the values of `data.long_rows` besides `error` that rows support.

    Args:
        whole: whether the rows are never cut: they have images, or a sample for each answer.
    """
    if whole or spec.compares_completions:
        return ("drop",)
    return ("drop", "truncate") if spec.padded else ("drop", "truncate", "split")


def problems_of(rows: Rows) -> dict[int, str]:
    """Returns why rows cannot be used with any recipe, by row."""
    found: dict[int, str] = {}
    for source, start in zip(rows.sources, rows.starts, strict=False):
        found |= {start + row: problem for row, problem in source.problems().items()}
    return found


def _without_class(rows: Rows, label_names: list[str], dropped: dict[int, str]) -> dict[int, str]:
    known = set(label_names)
    return {
        row: NO_CLASS
        for row, (label, tags) in enumerate(zip(rows.labels(), rows.tags(), strict=True))
        if row not in dropped and not known.issuperset(tags or [label])
    }


def _without_targets(rows: Rows, long: Ints, max_length: int) -> list[int]:
    # From the second token on, because the first is never a target.
    return [row for row in long.tolist() if not rows.tokens(row, 1, max_length)[1].any()]


def class_names(train: Rows, tagged: bool) -> list[str]:
    """Returns the names of the classes: those of the data set, or of the rows.

    Args:
        tagged: whether words have classes, not rows.

    Raises:
        DataError: if there are fewer than two, or some are numbers and others names.
    """
    named = [source.label_names for source in train.sources if source.label_names]
    # If sources name their numbers differently, one number would mean two classes: the rows' names decide.
    if named and len(named) == len(train.sources) and all(names == named[0] for names in named):
        return named[0]
    found = {label for source in train.sources for label in source.table.column("label").unique().to_pylist()}
    found |= {tag for tags in train.tags() for tag in tags}
    names = sorted(found - {None}, key=numbers_first)
    if not names:
        raise DataError(nothing_left("data.train", train, problems_of(train)))
    numbers = [name for name in names if name.isdecimal()]
    if tagged and 0 < len(numbers) < len(names):
        raise DataError(
            f"data.train: tags are numbers ({numbers[0]}) in some places and names ({names[-1]}) in others, and "
            "one would be taken for two classes; write all as numbers or all as names"
        )
    if len(names) < 2:
        raise DataError(f"data.train: all rows are of one class ({names[0]}); a classifier needs two or more")
    return names


def nothing_within(max_length: int) -> str:
    """Returns the reason for a row whose targets are all cut off."""
    return f"nothing to learn within {max_length} tokens"


def too_many_long(field: str, lengths: Any, num_rows: int, num_long: int, max_length: int, ways: Sequence[str]) -> str:
    """Returns the error's text. `lengths` are those of the rows that are known; for `ways` see `select`."""
    share = num_long / num_rows
    p99 = int(np.percentile(lengths, 99, method="higher"))
    return (
        f"{field}: {num_long:,} of {counted(num_rows, 'row')} ({share:.1%}) are longer than data.max_length, "
        f"{max_length} tokens; the longest has {int(lengths.max()):,}, and 99 % have at most {p99:,}. Raise "
        f"data.max_length, or choose what happens to them: data.long_rows={_any_of(ways)}"
    )


NO_CLASS = "the label is not one of the classes"


def _any_of(values: Sequence[str]) -> str:
    *before, last = values
    return f"{', '.join(before)} or {last}" if before else last


def nothing_left(field: str, rows: Rows, dropped: dict[int, str]) -> str:
    """Returns the error's text if no row is left: the reasons, and the first rows of each."""
    names = "the names in objective.labels, " if NO_CLASS in dropped.values() else ""
    return (
        f"{field}: none of its rows ({len(rows):,}) can be trained on. "
        f"{reasons_in_words(_named_reasons(rows, dropped))}. Correct them, {names}or name other columns in data.columns"
    )


def too_many_dropped(field: str, num_rows: int, allowed: float, reasons: dict[str, tuple[int, list[str]]]) -> str:
    """Returns the error's text if too many rows cannot be used; for `reasons` see `reasons_in_words`."""
    count = sum(number for number, _ in reasons.values())
    return (
        f"{field}: {count:,} of {counted(num_rows, 'row')} ({count / num_rows:.1%}) cannot be used, and "
        f"data.max_dropped_fraction allows {allowed:.1%}. {reasons_in_words(reasons)}. Fix these rows, or raise "
        "data.max_dropped_fraction to leave them out"
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


def cut(
    rows: TokenRows, order: Ints, lengths: Ints, policy: str, max_length: int, by_turn: bool = False
) -> tuple[Pieces, int]:
    """Returns the pieces of rows in order, and how many tokens are cut off; `by_turn` makes a piece of each answer."""
    if by_turn:
        return of_turns(order, [rows.ends(row) for row in order.tolist()]), 0
    if policy != "split":
        pieces = whole(order, lengths, max_length)
        return pieces, int((lengths[order] - pieces.lengths()).sum())
    pieces = split(order, lengths, max_length)
    of_long = np.flatnonzero(lengths[pieces.row] > max_length).tolist()
    # A long prompt makes pieces without a target. Rows that are not cut have a target, or were dropped before.
    useless = [i for i in of_long if not rows.tokens(*pieces.place(i))[1][1:].any()]
    return pieces.take(np.setdiff1d(np.arange(len(pieces)), useless)), 0


def judgements(rows: Rows, chosen: Any) -> dict[str, int]:
    """Returns how many rows have each judgement."""
    labels = rows.labels()
    return dict(sorted(Counter(str(labels[row]) for row in chosen.tolist()).items()))


def require_both(train: Selection) -> None:
    """Checks that some rows are judged good and some bad.

    Raises:
        DataError: if all have the same judgement.
    """
    found = judgements(train.rows, train.kept)
    if len(found) < 2:
        raise DataError(
            f"data.train: every row ({len(train.kept):,}) is judged {next(iter(found))}; KTO learns from good and bad "
            "completions; add some of the other kind"
        )
