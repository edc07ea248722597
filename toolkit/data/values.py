"""Values of a row: each function gives what a layout needs, or raises the RowProblem that says what is there."""

from __future__ import annotations

import json
import re
from typing import Any

from toolkit.data.problem import RowProblem

MAX_LEVELS = 100
"""Deepest nesting of a row's tools and calls; templates and Python's JSON give up at some hundreds."""


def text_of(value: Any, column: str) -> str:
    """A column's text. Raises RowProblem where it holds none."""
    if value is None:
        raise RowProblem(f"{column} is missing or null")
    if not isinstance(value, str):
        raise RowProblem(f"{column} is {type_of(value)}, not text")
    if not value.strip():
        raise RowProblem(f"{column} is empty")
    return encodable(value, column)


def is_absent(value: Any) -> bool:
    """Whether a column that a row may lack says nothing: a CSV file has empty text where others have null."""
    return value is None or (isinstance(value, str) and not value.strip())


def encodable(value: str, column: str) -> str:
    """The text. Raises RowProblem where UTF-8 cannot hold it."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise RowProblem(f"{column} contains half a character (a lone surrogate)") from None
    return value


KEY_CHARACTERS = 60


def key_shown(name: Any) -> str:
    """The name of a column or key in a note: short, encodable, and without what parts notes."""
    text = str(name).encode("utf-8", "backslashreplace").decode().replace(";", ",")
    return text if len(text) <= KEY_CHARACTERS else f"{text[: KEY_CHARACTERS - 3]}..."


def writable(value: Any, what: str, levels: int = MAX_LEVELS) -> None:
    """Raises RowProblem where a template could not write a value, or its text not be encoded."""
    if levels == 0:
        raise RowProblem(f"{what} nested more than {MAX_LEVELS} levels deep")
    if isinstance(value, str):
        encodable(value, what)
    elif isinstance(value, dict | list):
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            writable(item, what, levels - 1)


def type_of(value: Any) -> str:
    """What kind of value it is, in words."""
    names = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


def parsed(value: Any, what: str) -> Any:
    """The value of JSON in a string; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise RowProblem(f"{what} is not JSON") from None


def numbers_first(label: str) -> tuple[bool, int, str]:
    """Labels that are numbers in the order of numbers."""
    is_number = re.fullmatch(r"-?[0-9]{1,18}", label) is not None
    return (not is_number, int(label) if is_number else 0, label)
