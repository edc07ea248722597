"""Reads values of a row: each function returns what a layout needs, or raises a RowProblem about what it found."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any


class RowProblem(ValueError):  # noqa: N818 (a row's fate, not a failure of the program)
    """Why a row cannot be trained on.

    The text is the reason under which the data report counts rows, so it names no particulars of one row.
    """


class RowValues:
    """The values of a row by the meaning of their columns. It records which of them are taken.

    A layout may take more columns than it takes of one row: a text prompt, for example, has no use for tools.

    Attributes:
        row: the row as it was read.
        columns: meaning of a column -> its name.
        label_names: names of the numbers in the column of labels, if the source has them.
        images: images of the row's own column, or None if rows have no images.
        templated: whether a prompt that is text is a user's message, which the chat template writes.
        taken: names of the columns whose values were taken.
    """

    def __init__(
        self,
        row: Mapping[str, Any],
        columns: Mapping[str, str],
        label_names: Sequence[str] = (),
        images: list[Any] | None = None,
        templated: bool = False,
    ) -> None:
        self.row = row
        self.columns = columns
        self.label_names = label_names
        self.images = images
        self.templated = templated
        self.taken: set[str] = set()

    def __getitem__(self, what: str) -> Any:
        """Returns the value of a column, or None if the layout or the row has no such column."""
        name = self.columns.get(what)
        if name is None:
            return None
        column, _, key = name.partition(".")
        inner = self.row.get(column) if name not in self.row and key else None
        self.taken |= {name, column}
        return inner.get(key) if isinstance(inner, dict) else self.row.get(name)

    def text(self, what: str) -> str:
        """Returns the text of a column; see `text_of`."""
        return text_of(self[what], self.columns[what])


def text_of(value: Any, column: str) -> str:
    """Returns a column's text.

    Raises:
        RowProblem: if it holds none.
    """
    if value is None:
        raise RowProblem(f"{column} is missing or null")
    if not isinstance(value, str):
        raise RowProblem(f"{column} is {type_of(value)}, not text")
    if not value.strip():
        raise RowProblem(f"{column} is empty")
    return encodable(value, column)


def is_absent(value: Any) -> bool:
    """Returns whether an optional column has no value; a CSV file has empty text instead of null."""
    return value is None or (isinstance(value, str) and not value.strip())


def is_empty(value: Any) -> bool:
    """Returns whether a value holds nothing: it is absent, or a list or an object without entries."""
    return is_absent(value) or value in ([], {})


JUDGED = ("label", "kto_tag")
"""Columns that say whether an answer is good or bad: TRL's name and LLaMA-Factory's."""

_YES_OR_NO = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}


def yes_or_no(value: Any) -> bool | None:
    """Returns whether a value says yes, or None if it says neither yes nor no; a CSV file holds only text."""
    return _YES_OR_NO.get(str(value).strip().lower())


def is_judged_bad(row: Mapping[str, Any]) -> bool:
    """Returns whether a row's answer is judged bad."""
    return any(yes_or_no(row.get(column)) is False for column in JUDGED)


def encodable(value: str, column: str) -> str:
    """Returns the text.

    Raises:
        RowProblem: if UTF-8 cannot encode it.
    """
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise RowProblem(f"{column} contains half a character (a lone surrogate)") from None
    return value


COLUMNS_LISTED = 10
"""The most columns that an error names."""

COLUMN_LENGTH = 40
"""The most characters that it shows of each."""

KEY_CHARACTERS = 60


def key_shown(name: Any) -> str:
    """Returns the name of a column or key for a note: short, encodable, and without the separator of notes."""
    text = str(name).encode("utf-8", "backslashreplace").decode().replace(";", ",")
    return text if len(text) <= KEY_CHARACTERS else f"{text[: KEY_CHARACTERS - 3]}..."


def writable(value: Any, what: str) -> None:
    """Checks that the text in a value can be encoded.

    Raises:
        RowProblem: if not.
    """
    if isinstance(value, str):
        encodable(value, what)
    elif isinstance(value, dict | list):
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            writable(item, what)


def type_of(value: Any) -> str:
    """Describes the type of a value in words."""
    names = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return {**names, str: "text", type(None): "null"}.get(type(value), type(value).__name__)


def parsed(value: Any, what: str) -> Any:
    """Returns the value of JSON in a string, and any other value unchanged.

    Raises:
        RowProblem: if a string is not JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise RowProblem(f"{what} is not JSON") from None


def numbers_first(label: str) -> tuple[bool, int, str]:
    """Returns a sort key that puts labels that are numbers first, in their order."""
    is_number = re.fullmatch(r"-?[0-9]{1,18}", label) is not None
    return (not is_number, int(label) if is_number else 0, label)


def listed(names: list[str]) -> str:
    """Lists the first columns for an error, on one line."""
    shown = [name if name.isprintable() else repr(name)[1:-1] for name in names[:COLUMNS_LISTED]]
    cut = [name if len(name) <= COLUMN_LENGTH else f"{name[:COLUMN_LENGTH]}..." for name in shown]
    more = f" and {len(names) - COLUMNS_LISTED:,} more" if len(names) > COLUMNS_LISTED else ""
    return ", ".join(cut) + more
