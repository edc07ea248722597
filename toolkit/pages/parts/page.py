"""The shared parts of a run's pages: Jinja2's templates in `templates/`, and the types that they show.

A page is one file with nothing loaded from outside. Templates escape every text.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.pages.parts.turns import turns_of
from toolkit.paths import atomic_write
from toolkit.terminal import harmless

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).parents[1] / "templates"

Key = tuple[str, str, str]
"""An entry of a legend: kind, CSS variable of its colour, and name."""


@dataclass(frozen=True)
class Table:
    """A table in a card; it is not shown without rows.

    `kind` is `numbers` (all but the first column aligned to the right), `names` (nothing aligned to the right), or
    empty (the last column aligned to the right). The first cell of a row is its heading.
    """

    name: str
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    kind: str = "numbers"
    remark: str = ""


@dataclass(frozen=True)
class Tile:
    """A headline number.

    Attributes:
        values: one value, or the one before and the one after.
        plain: explains the number in everyday words.
        detail: shown on demand.
        change: from the first value to the last, as its kind (good, bad or same) and a text.
    """

    name: str
    label: str
    values: Sequence[str]
    plain: str
    detail: str = ""
    change: tuple[str, str] | None = None


@dataclass(frozen=True)
class Note:
    """A highlighted box: `lead` in bold, a sentence after it, and a list."""

    name: str
    lead: str
    text: str
    items: Sequence[str]


@dataclass(frozen=True)
class ChartCard:
    """A chart in a card: `spoken` is for screen readers, `table` has its values.

    Attributes:
        sizes: the windows that show it (any, wide or narrow), and its width and height there (CSS pixels).
        data: the input of the page's script, which draws it.
    """

    name: str
    title: str
    keys: Sequence[Key]
    sizes: Sequence[tuple[str, tuple[int, int]]]
    spoken: str
    table: Table
    data: str


@dataclass(frozen=True)
class Histogram:
    """Upright bars in a card.

    Attributes:
        bars: width in units of the axis, share of the highest bar, and what it says.
        axis: the first value, the name, and the last value.
        mark: share of the width where a dashed line is, or None.
        spoken: for screen readers; `table` has the values.
    """

    name: str
    title: str
    remark: str
    keys: Sequence[Key]
    bars: Sequence[tuple[float, float, str]]
    axis: tuple[str, str, str]
    mark: float | None
    spoken: str
    table: Table


def render(template: str, **values: Any) -> str:
    """Renders a template of `templates/`."""
    return _environment().get_template(template).render(**values)


@functools.cache
def script(name: str) -> str:
    """Returns the text of a script in `templates/`."""
    return (TEMPLATES / name).read_text(encoding="utf-8")


def script_policy(*names: str) -> str:
    """Returns a content security policy that allows only these scripts; empty without any."""
    digests = [hashlib.sha256(script(name).encode()).digest() for name in names]
    allowed = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
    return " ".join(["script-src", *allowed]) if allowed else ""


def write_page(path: Path, text: str) -> None:
    """Writes a page to `path` atomically: a reader sees the old file or the new one."""
    # Generated text can hold half of a surrogate pair, which UTF-8 cannot encode.
    atomic_write(path, text, errors="xmlcharrefreplace")


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    # Imported and made with the first page, so that commands without pages start faster.
    found = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=_escaped_controls,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["row_parts"] = _ROW_NUMBER.split
    found.filters["turns"] = turns_of
    found.tests["one_number"] = _NUMBER.fullmatch
    return found


def _escaped_controls(value: Any) -> Any:
    """Returns text without terminal codes, codes for the direction of text, and NUL, which HTML forbids."""
    return value if hasattr(value, "__html__") else harmless(str(value).replace("\0", "\ufffd"))


_NUMBER = re.compile(r"[<>]? ?[-\N{MINUS SIGN}]?\d[\d.,]*(e[-+]?\d+)?( ?[%a-zA-Z]{1,3})?")
"""A number, which stays on one line."""

_ROW_NUMBER = re.compile(r"(?<=:)(?=\d+\)?$)")
"""The place before its number where the name of a row may be broken."""
