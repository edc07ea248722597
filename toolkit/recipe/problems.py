"""Turns pydantic's errors into the messages of a recipe: a line for each wrong field.

`root` is the class of the whole recipe. It is an argument because the recipe imports this file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import date
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic_core import ErrorDetails

from toolkit.errors import did_you_mean
from toolkit.recipe.gone import GONE_KEYS, gone_sentence
from toolkit.recipe.objectives.section import Section

TYPE_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    date: "a date as in 2026-11-25",
    type(None): "null",
}

BOUNDS = (("ge", "of at least"), ("gt", "greater than"), ("le", "up to"), ("lt", "less than"))
"""Attribute of a constraint -> its words."""

Location = tuple[int | str, ...]
"""The keys and list positions that lead to a field."""


def problems_of(root: type[Section], errors: list[ErrorDetails]) -> list[str]:
    """Returns a line for each wrong field; a field that fits no member of a union has one line."""
    by_field: dict[str, str] = {}
    listed: set[str] = set()
    for details in errors:
        if details["type"] == "contradiction":
            by_field.update((line, line) for line in str(details["msg"]).splitlines())
        else:
            by_field.setdefault(_dotted(_field_location(root, details["loc"])), _describe(root, details, listed))
    return list(by_field.values())


def _describe(root: type[Section], details: ErrorDetails, listed: set[str]) -> str:
    """Describes one wrong field: dotted path, what was found, what is allowed, how to fix it.

    Args:
        listed: sections whose keys are listed in a line above; they are not listed again.
    """
    location = _field_location(root, details["loc"])
    path = _dotted(location) or "recipe"
    if details["type"] == "extra_forbidden":
        return _describe_unknown(root, details["loc"], listed)
    if details["type"] == "missing":
        return f"{path}: missing; needs {_allowed_text(root, location) or 'a value'}"
    value = details["input"]
    if details["loc"][-1] == "[key]":
        return f"{_dotted(details['loc'][:-2])}: found the key {value!r} ({_type_name(value)}); keys are text: quote it"
    if details["type"] == "impossible":
        return f"{path}: {details['msg']}"
    if gone := gone_sentence(GONE_KEYS, f"{path}={value}"):
        return f"{path}: {value!r} is {gone}"
    found = "found null" if value is None else f"found {value!r} ({_type_name(value)})"
    allowed = _allowed_text(root, location)
    if allowed:
        return f"{path}: {found}; allowed: {allowed}"
    message = re.sub(r"a valid dictionary or instance of \w+", "a mapping", details["msg"])
    message = message[0].lower() + message[1:]
    return f"{path}: {found}; {message}"


def _describe_unknown(root: type[Section], location: Location, listed: set[str]) -> str:
    key = str(location[-1])
    if gone := gone_sentence(GONE_KEYS, _dotted(tuple(part for part in location if isinstance(part, str)))):
        return f"{_dotted(location)}: {gone}"
    section = _section_at(root, location)
    known = list(section.model_fields) if section is not None else []
    hint = did_you_mean(key, known)
    if not hint:
        homes = [f"{name}.{key}" for name, field in root.model_fields.items() if _has_field(field.annotation, key)]
        hint = f" (did you mean {homes[0]!r}?)" if homes else ""
    section_name = _dotted(location[:-1])
    if section_name in listed:
        return f"{_dotted(location)}: unknown key{hint}"
    listed.add(section_name)
    return f"{_dotted(location)}: unknown key{hint}; allowed here: {', '.join(known)}"


def _dotted(location: Location) -> str:
    return ".".join(map(str, location))


def _has_field(annotation: Any, key: str) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section) and key in annotation.model_fields


def _type_name(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "not finite"
    return {"dict": "mapping", "str": "text"}.get(type(value).__name__, type(value).__name__)


def _allowed_text(root: type[Section], location: Location) -> str:
    """Returns the words, types and ranges that a field takes; empty if the location names no field."""
    # The error of an item names what the whole list takes.
    named = location[:-1] if location and isinstance(location[-1], int) else location
    section = _section_at(root, named)
    field = section.model_fields.get(str(named[-1])) if section is not None and named else None
    return ", ".join(allowed_values(field.annotation, field.metadata)) if field is not None else ""


def allowed_values(annotation: Any, bounds: Sequence[Any] = ()) -> list[str]:
    """Describes each value that a field takes: `float32`, `a whole number of at least 1`, `null`.

    Args:
        bounds: pydantic's constraints of the value.
    """
    if get_origin(annotation) is Annotated:
        inner, *extra = get_args(annotation)
        return allowed_values(inner, [*bounds, *(bound for one in extra for bound in getattr(one, "metadata", [one]))])
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    if get_origin(annotation) in (Union, UnionType):
        return [text for member in get_args(annotation) for text in allowed_values(member, bounds)]
    if get_origin(annotation) is list:
        (item,) = get_args(annotation)
        if isinstance(item, type) and section_of(item) is not None:
            return ["a path", "a mapping", "a list of them"]
        some = "a non-empty list" if any(getattr(bound, "min_length", 0) == 1 for bound in bounds) else "a list"
        return [f"{some} (each item {' or '.join(allowed_values(item))})"]
    kind = annotation if isinstance(annotation, type) else get_origin(annotation)
    name = TYPE_WORDS.get(kind, "a mapping")
    limits = [
        f"{words} {_number_text(getattr(bound, key))}"
        for bound in bounds
        for key, words in BOUNDS
        if hasattr(bound, key)
    ]
    if kind is str and (shapes := [shape for bound in bounds if (shape := getattr(bound, "pattern", None))]):
        return [f"{name} that matches {shapes[0]}"]
    if kind is str and any(getattr(bound, "min_length", 0) for bound in bounds):
        return [f"non-empty {name}"]
    return [" and ".join([f"{name} {limits[0]}", *limits[1:]]) if limits and kind in (int, float) else name]


def _number_text(number: float) -> str:
    return str(int(number)) if number == int(number) else str(number)


def _section_at(root: type[Section], location: Location) -> type[Section] | None:
    """Returns the section class that holds the last key of `location`."""
    section: Any = root
    for part in location[:-1]:
        if isinstance(part, int) and isinstance(section, list):
            section = section[0]
            continue
        field = section.model_fields.get(part) if isinstance(part, str) and not isinstance(section, list) else None
        section = section_of(field.annotation) if field is not None else None
        if section is None:
            return None
    return None if isinstance(section, list) else section


def _field_location(root: type[Section], location: Location) -> Location:
    """Returns the location without pydantic's names of union members."""
    for end in range(1, len(location) + 1):
        if isinstance(location[end - 1], int):
            continue
        section = _section_at(root, location[:end])
        if section is None:
            return location[: end - 1]
        if location[end - 1] not in section.model_fields:
            return location[:end]
    return location


def section_of(annotation: Any) -> Any:
    """Returns the section class of a field, in a list if the field is a list of sections; None for other fields."""
    for member in (annotation, *get_args(annotation)):
        if isinstance(member, type) and issubclass(member, Section):
            return member
        items = get_args(member)
        if get_origin(member) is list and isinstance(items[0], type) and issubclass(items[0], Section):
            return [items[0]]
    return None
