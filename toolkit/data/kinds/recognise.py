"""Recognises the layout of a source by its columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from toolkit.data.kinds.kind import RowKind
from toolkit.data.kinds.registry import kind_for
from toolkit.data.layouts.layout import ColumnLayout, Layout
from toolkit.data.rows.sources import Source
from toolkit.data.rows.values import listed
from toolkit.errors import DataError, closest
from toolkit.recipe.objectives.registry import SPECS
from toolkit.recipe.schema import ColumnsSection


def recognise(source: Source, columns: ColumnsSection, *objectives: str) -> Layout:
    """Returns the layout of a source.

    Args:
        objectives: `objective.kind` of the recipe; if there are several, layouts of the first are tried first.

    Raises:
        DataError: if its columns match no known layout, or it lacks a column that the recipe names.
    """
    place = "data.columns" if source.by_hand is None else "columns"
    by_hand = (source.by_hand or columns).model_dump(exclude_none=True)
    for what, name in by_hand.items():
        if not _has_column(name, source.columns):
            raise DataError(
                f"{source.field}: {source.name!r} has no column {name!r} ({place}.{what}); {_columns_text(source)}"
            )
    kinds = [kind_for(objective) for objective in objectives]
    forms = [form for kind in kinds for form in kind.layouts]
    only_optional = by_hand.keys().isdisjoint(what for form in forms for what in form.needed)
    unused: list[tuple[str, ColumnLayout]] = []
    for objective, kind in zip(objectives, kinds, strict=True):
        idle = kind.idle_columns(SPECS[objective])
        for form in kind.layouts:
            layout = _matched(form, source, kind.names_in(source, by_hand), by_hand, only_optional)
            if layout is None:
                continue
            # Columns that the recipe names, and that have no effect in this layout, rule it out.
            without_effect = [what for what in by_hand if what in idle or what not in (*form.needed, *form.optional)]
            if not without_effect:
                return kind.adapted(replace(layout, idle=idle), source, by_hand)
            unused.append((without_effect[0], form))
    if unused:
        what, form = unused[0]
        elsewhere = f", {form.elsewhere[what].format(columns=place)}" if what in form.elsewhere else ""
        raise DataError(
            f"{place}.{what} has no effect on {source.name!r}, whose rows would be read as {form.name}; remove it"
            f"{elsewhere}"
        )
    allowed = "; ".join(dict.fromkeys(" + ".join(form.needed) for form in forms))
    others = [
        spec.kind
        for spec in SPECS.values()
        if any(set(form.needed) <= set(source.columns) for form in kind_for(spec.kind).layouts)
    ]
    fitting = f"Its columns fit {' or '.join(f'objective.kind={other}' for other in others)}. " if others else ""
    raise DataError(
        f"{source.field}: {source.name!r} matches no known column layout; {_columns_text(source)}; needed: {allowed}. "
        f"{fitting}{_advice(source, kinds, forms, place)}"
    )


def _matched(
    form: ColumnLayout, source: Source, found: dict[str, str], by_hand: dict[str, str], only_optional: bool
) -> Layout | None:
    """Returns the layout of this form if the source has its columns, else None.

    Args:
        found: meaning of a column -> its name, as the kind of row finds it.
        only_optional: whether the recipe names no column that any layout needs.
    """
    usual = {what: name for what, name in form.names.items() if what not in source.columns}
    names = {what: what for what in ColumnsSection.model_fields} | usual | found | by_hand
    needed = {what: names[what] for what in form.needed}
    # A needed column that is named by hand picks the layout; an optional one rules out layouts without it.
    chosen = any(what in by_hand for what in form.needed) or all(what in form.optional for what in by_hand)
    if not (chosen or only_optional) or not all(_has_column(name, source.columns) for name in needed.values()):
        return None
    # What is named by hand is not read once more under its own name: `input` as the instruction is no input as well.
    taken = {*needed.values(), *by_hand.values()}
    unnamed = [what for what in form.optional if what in by_hand or names[what] not in taken]
    # The first rows need not have all columns, so optional columns are looked up in each row.
    more = {what: names[what] for what in unnamed if what not in form.of_all_rows or names[what] in source.columns}
    labels = next((source.label_names[name] for name in needed.values() if name in source.label_names), [])
    return Layout(form, needed | more, tuple(labels))


def _advice(source: Source, kinds: Sequence[type[RowKind]], forms: Sequence[ColumnLayout], place: str) -> str:
    """Suggests how to turn the columns of a source into a known layout; `place` is the field that names columns."""
    columns = source.columns
    separator = next((s for s in (";", "\t", "|") if len(columns) == 1 and s in columns[0]), None)
    if separator is not None:
        return f"They are separated by {separator!r}: save the file with commas" + (
            ", or name it .tsv" if separator == "\t" else ""
        )
    named = kinds[0].hint(columns, place)
    if named is None and len(columns) < min(len(form.needed) for form in forms):
        return "Add the columns that are missing"
    also = {what: names for kind in kinds for what, names in kind.also_called.items()}
    return f"Name its columns by hand, for example {named or _nearest_layout(columns, forms, also, place)}"


def _has_column(name: str, columns: list[str]) -> bool:
    """Returns whether there is such a column; `translation.de` is a key of one that holds mappings."""
    return name in columns or ("." in name and name.partition(".")[0] in columns)


def _nearest_layout(
    columns: list[str], forms: Sequence[ColumnLayout], also: Mapping[str, Sequence[str]], place: str
) -> str:
    """Returns settings that match a source's columns to the nearest layout, or an example if none is near.

    Args:
        also: meaning of a column -> other names that data sets give it.
        place: the field that names columns.
    """
    own = {column.lower(): column for column in columns}

    def usual(what: str) -> str | None:
        return next((own[name] for name in (what, *also.get(what, ())) if name in own), None)

    def nearest(what: str) -> str | None:
        near = closest(what, own, cutoff=0.75)
        return usual(what) or (None if near is None else own[near])

    best: dict[str, str] = {}
    for form in forms:
        near = {what: column for what in form.needed if (column := nearest(what)) is not None}
        if len(near) == len(form.needed):
            near |= {what: column for what in form.optional if (column := usual(what)) is not None}
            best = max(best, near, key=_nearness)
    wanted = best or {what: columns[-1] if len(columns) == 1 else "NAME" for what in forms[-1].needed}
    needed = {what: column for what, column in wanted.items() if not best or what != column} or wanted
    return " ".join(f"{place}.{what}={column}" for what, column in needed.items())


def _nearness(found: dict[str, str]) -> tuple[int, int]:
    """Returns how well columns fit a layout: columns with its own names count first."""
    return sum(what == column for what, column in found.items()), len(found)


def _columns_text(source: Source) -> str:
    return f"it has {listed(source.columns) or 'no columns'}"
