"""What the pages of a run share: Jinja2's templates in `templates/`, and what they are given to show.

A page is one file with nothing loaded from outside. Every text is escaped where a template shows it.
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

from toolkit.pages.svg import Drawing
from toolkit.paths import atomic_write
from toolkit.terminal import harmless

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).with_name("templates")

Key = tuple[str, str, str]
"""An entry of a legend: kind, CSS variable of its colour, and name."""


@dataclass(frozen=True)
class Table:
    """A table in a card; nothing of it is shown without rows.

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
        plain: says in everyday words what the number is.
        detail: is shown if a reader asks for it.
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
    """A box that stands out: `lead` in bold, a sentence after it, and a list."""

    name: str
    lead: str
    text: str
    items: Sequence[str]


@dataclass(frozen=True)
class ChartCard:
    """A chart in a card: `spoken` is for readers that see no picture, `table` has its values.

    `data` is what the page's script draws it from, empty on pages without one.
    """

    name: str
    title: str
    remark: str
    keys: Sequence[Key]
    drawings: Sequence[Drawing]
    spoken: str
    table: Table
    data: str = ""


def render(template: str, **values: Any) -> str:
    """Fills in a template of `templates/`."""
    return _environment().get_template(template).render(**values)


@functools.cache
def script(name: str) -> str:
    """A script of `templates/`."""
    return (TEMPLATES / name).read_text(encoding="utf-8")


def script_policy(*names: str) -> str:
    """Lets these scripts run on a page, and no other; empty without one."""
    digests = [hashlib.sha256(script(name).encode()).digest() for name in names]
    allowed = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
    return " ".join(["script-src", *allowed]) if allowed else ""


def write_page(path: Path, text: str) -> None:
    """Write a page to `path`; a reader sees the old file or the new one, never a part."""
    # Generated text can hold half of a surrogate pair, which UTF-8 cannot encode.
    atomic_write(path, text, errors="xmlcharrefreplace")


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    # Imported and made with the first page: commands that show none start without it.
    found = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["row_parts"] = _ROW_NUMBER.split
    found.tests["one_number"] = _NUMBER.fullmatch
    return found


def _shown(value: Any) -> Any:
    """Text without codes that steer a terminal or turn the direction of text, and without NUL, which HTML forbids."""
    return value if hasattr(value, "__html__") else harmless(str(value).replace("\0", "\ufffd"))


_NUMBER = re.compile(r"[<>]? ?[-\N{MINUS SIGN}]?\d[\d.,]*(e[-+]?\d+)?( ?[%a-zA-Z]{1,3})?")
"""A number stays in one line."""

_ROW_NUMBER = re.compile(r"(?<=:)(?=\d+\)?$)")
"""The name of a row may be broken before its number."""
